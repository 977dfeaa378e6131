"""The layers against loops over the papers' equations, and laws."""

from functools import partial

import pytest
import torch

from attnmem import AoTWeights, MHAWeights, aot, aot_features, mha, mha_attention, mha_features
from attnmem.core.layers import look_up

# Pairwise distinct primes, so that no swapped axis can pass.
RUNS, H, d, d_h, d_v, d_out, B, n = 2, 3, 11, 5, 7, 13, 17, 19
N, S = 23, 29
EXACT = {"rtol": 1e-12, "atol": 1e-12}  # a few hundred float64 roundings


def mha_weights(*runs, d_o=d, dtype=torch.float64):
    shapes = [(H, d, d_h), (H, d, d_h), (H, d, d_v), (H * d_v, d_o), (d_o, d_out)]
    return MHAWeights(*(torch.randn(*runs, *shape, dtype=dtype) for shape in shapes))


def aot_weights(*runs, d=d, d_h=d_h, S=S):
    shapes = [(N, d), (S, d), *[(H, d_h, d)] * 3, (H, d, d_h), (N, d)]
    return AoTWeights(*(torch.randn(*runs, *shape, dtype=torch.float64) / 3 for shape in shapes))


def data(*runs, shared):
    context = torch.randn(*runs, *(() if shared else (B,)), n, d, dtype=torch.float64)
    return context, torch.randn(*runs, B, d, dtype=torch.float64)


def softmax(logits):
    powers = (logits - logits.max()).exp()
    return powers / powers.sum()


def mha_by_the_equations(weights, E, e, skip):
    """Steps 1-6 of the setting, for one example."""
    heads = []
    for W_Q, W_K, W_V in zip(weights.W_Q, weights.W_K, weights.W_V, strict=True):
        alpha = softmax(E @ W_K @ W_Q.T @ e)
        heads.append(W_V.T @ (E.T @ alpha))
    o = weights.W_O.T @ torch.cat(heads)
    return weights.W_D.T @ (o + e if skip else o)


def aot_by_the_equations(weights, sequence):
    """Equations (1)-(2), for one sequence."""
    x = weights.embedding[sequence] + weights.positions
    out = x[-1].clone()
    for W_Q, W_K, W_V, W_O in zip(weights.W_Q, weights.W_K, weights.W_V, weights.W_O, strict=True):
        a = softmax(torch.stack([x[-1] @ W_Q.T @ W_K @ x_s for x_s in x]))
        out += W_O @ W_V @ sum(a_s * x_s for a_s, x_s in zip(a, x, strict=True))
    return weights.W_U @ out


@pytest.mark.parametrize("skip", [False, True], ids=["bare", "skip"])
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_mha_is_the_papers_layer(shared, skip):
    weights, (context, query) = mha_weights(), data(shared=shared)
    expected = torch.stack(
        [
            mha_by_the_equations(weights, context if shared else context[t], query[t], skip)
            for t in range(B)
        ]
    )
    torch.testing.assert_close(mha(weights, context, query, skip=skip), expected, **EXACT)


def test_a_look_up_and_its_gradient_go_token_by_token():
    table = torch.randn(2, 5, 3, requires_grad=True)
    chosen = torch.tensor([[4, 0, 4, 4, 1], [2, 2, 0, 3, 2]])
    found = look_up(table, chosen[:, None])[:, 0]
    g = torch.randint(-8, 9, found.shape).float()  # small integers: their sums are exact
    expected, total = torch.empty(2, 5, 3), torch.zeros(2, 5, 3)
    for r in range(2):
        for i, token in enumerate(chosen[r]):
            expected[r, i] = table.detach()[r, token]
            total[r, token] += g[r, i]
    assert torch.equal(found, expected)
    assert torch.equal(torch.autograd.grad(found, table, g)[0], total)


def test_aot_is_the_papers_transformer():
    weights, tokens = aot_weights(), torch.randint(N, (B, S))
    expected = torch.stack([aot_by_the_equations(weights, row) for row in tokens])
    torch.testing.assert_close(aot(weights, tokens), expected, **EXACT)


def test_no_sequences_have_no_logits():
    assert aot(aot_weights(), torch.zeros(0, S, dtype=torch.long)).shape == (0, N)
    shapes = [(5, 0), (3, 0), *[(2, 4, 0)] * 3, (2, 0, 4), (5, 0)]  # no dimensions: logits of zero
    weights = AoTWeights(*(torch.ones(shape) for shape in shapes))
    assert torch.equal(aot(weights, torch.zeros(7, 3, dtype=torch.long)), torch.zeros(7, 5))


@pytest.mark.parametrize("length", [1, 2, 3])
def test_transforms_of_torch_go_through_aot(length):
    weights, tokens = aot_weights(S=length), torch.randint(N, (7, length))

    def logits(*weights, tokens=tokens):
        return aot(AoTWeights(*weights), tokens)

    many, sets = aot_weights(4, S=length), torch.randint(N, (4, 7, length))
    for found, one in (
        (torch.vmap(logits)(*many), logits(*many)),
        (torch.vmap(lambda s: logits(*weights, tokens=s))(sets), logits(*weights, tokens=sets)),
    ):
        torch.testing.assert_close(found, one, **EXACT)


@pytest.mark.parametrize("kind", ["shared", "own", "sequences"])
def test_runs_of_weights_and_data_broadcast(kind):
    draw, call, kind_of = mha_weights, partial(mha, skip=True), MHAWeights
    one, sets = (data(*runs, shared=kind == "shared") for runs in ((), (RUNS,)))
    if kind == "sequences":
        draw, call, kind_of = aot_weights, aot, AoTWeights
        one, sets = ((torch.randint(N, (*runs, B, S)),) for runs in ((), (RUNS,)))
    many = draw(RUNS)
    second = kind_of(*(W[1] for W in many))
    torch.testing.assert_close(call(many, *one)[1], call(second, *one), **EXACT)
    for layer in (second, many):
        outputs = call(layer, *sets)
        assert len(outputs) == RUNS
        torch.testing.assert_close(outputs[1], call(second, *(x[1] for x in sets)), **EXACT)


def test_attention_weights_are_convex_combinations():
    weights, (context, query) = mha_weights(), data(shared=False)
    alpha = mha_attention(weights, context, query)
    assert alpha.shape == (B, H, n)
    assert (alpha >= 0).all()
    torch.testing.assert_close(alpha.sum(-1), torch.ones(B, H, dtype=alpha.dtype), **EXACT)
    Z = mha_features(weights, context, query).unflatten(-1, (H, d))
    torch.testing.assert_close(Z[4, 2], alpha[4, 2] @ context[4], **EXACT)


def test_aot_features_are_mha_features_of_the_tokens():
    weights, tokens = aot_weights(), torch.randint(N, (B, S))
    x = weights.embedding[tokens] + weights.positions
    other = mha_weights()._replace(W_Q=weights.W_Q.mT, W_K=weights.W_K.mT)
    expected = mha_features(other, x, x[:, -1])
    torch.testing.assert_close(aot_features(weights, tokens), expected, **EXACT)


def test_float32_stays_float32_and_mixes_upwards():
    weights, (context, query) = mha_weights(dtype=torch.float32), data(shared=True)
    assert mha(weights, context.float(), query.float()).dtype == torch.float32
    assert mha(weights, context, query.float()).dtype == torch.float64


BAD = {  # of each layer weights and data that do not fit, and the argument that is named
    mha: [
        (lambda w, E, e: (w._replace(W_V=w.W_V[1:]), E, e), "weights.W_V"),
        (lambda w, E, e: (w._replace(W_D=w.W_D[0]), E, e), "weights.W_D"),
        (lambda w, E, e: (tuple(w), E, e), "weights"),
        (lambda w, E, e: (w, E[..., 1:], e), "context"),
        (lambda w, E, e: (w, E[1:], e), "context"),
        (lambda w, E, e: (w, E[0, 0], e), "context"),
        (lambda w, E, e: (w, E[:, :0], e), "context"),
        (lambda w, E, e: (w, E[0, :0], e), "context"),
        (lambda w, E, e: (w, E.tolist(), e), "context"),
        (lambda w, E, e: (w, E.long(), e), "context"),
        (lambda w, E, e: (w, E, e[0]), "query"),
        (lambda w, E, e: (w, E, e.half()), "query"),
    ],
    aot: [
        (lambda w, t: (w, t.float()), "tokens"),
        (lambda w, t: (w, t[:, 1:]), "tokens"),
        (lambda w, t: (w, t[0]), "tokens"),
        (lambda w, t: (w, t + N), "tokens"),
        (lambda w, t: (w, t - N), "tokens"),
        (lambda w, t: (w._replace(positions=w.positions[:0]), t[:, :0]), "tokens"),
        (lambda w, t: (w._replace(W_U=w.W_U[1:]), t), "weights.W_U"),
        (lambda w, t: (w._replace(W_O=w.W_O.mT), t), "weights.W_O"),
        (lambda w, t: (w._replace(positions=w.positions[:, 1:]), t), "weights.positions"),
    ],
}


@pytest.mark.parametrize("layer", [mha, mha_attention, mha_features, aot, aot_features])
def test_bad_input_is_named(layer):
    """A skip also needs outputs of the query's size."""
    of_mha = layer not in (aot, aot_features)
    given = (mha_weights(), *data(shared=False))
    if not of_mha:
        given = aot_weights(), torch.randint(N, (B, S))
    for change, name in BAD[mha if of_mha else aot]:
        with pytest.raises(ValueError, match=rf"^{name}: got "):
            layer(*change(*given))
    with pytest.raises(ValueError, match=r"^weights.W_O: got "):
        mha(mha_weights(d_o=d + 1), *data(shared=True), skip=True)
