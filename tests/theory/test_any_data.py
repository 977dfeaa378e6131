"""What every construction owes for any data: scales, repeats, empty sizes, tensors as they are."""

import functools
import itertools

import pytest
import torch

from attnmem import aot, memorize_aot, memorize_mha, mha, random_mha
from attnmem.core import memorize
from attnmem.core.bounds import own_context_floor
from attnmem.examples import unit
from attnmem.theory import impossible, sequence_ranks
from attnmem.theory.associations import memorize_next_tokens, obstacle
from attnmem.theory.cancelling import memorize_by_cancellation, memorize_by_difference
from attnmem.theory.scalars import memorize_scalars
from attnmem.theory.tangents import balancing_map

from oracles import F64, gaussian, uniform

H, N, D = 4, 3, 5
HOW = {"heads": H, "head_dim": 4, "seed": 0}
LAYERS = {
    "difference": functools.partial(memorize_by_difference, **HOW),
    "cancellation": functools.partial(memorize_by_cancellation, **HOW),
    "theorem 1": functools.partial(memorize_mha, **HOW),
    "theorem 1 with a skip": functools.partial(memorize_mha, **HOW, skip=True),
    "scalars": functools.partial(memorize_scalars, heads=H),
}
SEQUENCES = {
    "aot": functools.partial(memorize_aot, vocab=5, dim=3, head_dim=2, heads=4, seed=0),
    "next tokens": functools.partial(
        memorize_next_tokens, vocab=5, dim=3, head_dim=2, groups=(2, 2), seed=0
    ),
}
PAIRS = torch.cartesian_prod(torch.arange(3), torch.arange(3))
every_layer = pytest.mark.parametrize("name", LAYERS)


def examples(T=7, own=False):
    g = torch.Generator().manual_seed(0)
    contexts = gaussian(g, T, N, D) if own else gaussian(g, N, D)
    return contexts, gaussian(g, T, D), gaussian(g, T)


def missed(weights, E, e, y, skip=False):
    """The largest error, in units of the largest label; of outputs that are divided first."""
    largest = y.abs().max()
    outputs = mha(weights, E, e, skip=skip)[:, 0]
    return float((outputs / largest - y / largest).abs().max())


def built_or_refused(build, *data):
    """What is built, or what the refusal says."""
    try:
        return build(*data), None
    except ValueError as error:
        return None, str(error)


# --- scales ---------------------------------------------------------------------------------------


@every_layer
@pytest.mark.parametrize("power", [-900, 900])
def test_powers_of_four_change_no_output(name, power):
    """Contexts, queries and labels in turn: every digit is that of the data near one."""
    skip, scale = name.endswith("skip"), 2.0**power
    E, e, y = examples()
    plain = mha(LAYERS[name](E, e, y), E, e, skip=skip)
    for a, b, c in ((scale, 1, 1), (1, scale, 1), (1, 1, scale), (scale, 1 / scale, 1)):
        weights, refusal = built_or_refused(LAYERS[name], a * E, b * e, c * y)
        if skip and refusal:  # the decoder has the ratio of labels and queries
            assert "the range of float64" in refusal
            continue
        assert torch.equal(mha(weights, a * E, b * e, skip=skip) / c, plain)


@every_layer
def test_numbers_beyond_float64_are_refused(name):
    """Values of 1e400; labels of which subnormal numbers keep a digit or two."""
    E, e, y = examples()
    y = y / y.abs().max()
    for a, b, c in ((1e-200, 1e-200, 1e200), (1, 1, 1e-322)):
        with pytest.raises(ValueError, match="leave the range of float64"):
            LAYERS[name](a * E, b * e, c * y)


@every_layer
def test_labels_at_the_end_of_float64(name):
    """They are met or refused."""
    E, e, y = examples()
    y = y / y.abs().max() * torch.finfo(torch.float64).max
    weights, refusal = built_or_refused(LAYERS[name], E, e, y)
    if refusal:
        assert "leave the range of float64" in refusal
    else:
        assert missed(weights, E, e, y, name.endswith("skip")) <= 1e-8


@every_layer
@pytest.mark.parametrize("offset", [30.0, 1e4, 1e9])
def test_labels_far_from_zero(name, offset):
    """They are met within their spread, or refused."""
    E, e, y = examples()
    weights, refusal = built_or_refused(LAYERS[name], E, e, y + offset)
    if refusal:
        assert offset > 100
        assert "error" in refusal or "errs by" in refusal
    else:
        outputs = mha(weights, E, e, skip=name.endswith("skip"))[:, 0]
        assert (outputs - (y + offset)).abs().max() <= 1e-8 * (y.max() - y.min()) / 2


@every_layer
def test_equal_labels_are_met(name):
    E, e, y = examples()
    weights = LAYERS[name](E, e, torch.full_like(y, 3.0))
    assert missed(weights, E, e, torch.full_like(y, 3.0), name.endswith("skip")) <= 1e-8


def test_outputs_may_differ_in_scale():
    E, e, y = examples(8, own=True)
    labels = torch.stack([y, 1e-200 * y.flip(0)], dim=1)
    weights = memorize_by_difference(E, e, labels, heads=8, head_dim=3, seed=0)
    relative = (mha(weights, E, e) - labels).abs().amax(0) / labels.abs().amax(0)
    assert relative.max() <= 1e-8


@pytest.mark.parametrize("name", ["scalars", "difference", "theorem 1"])
def test_labels_of_zero_are_met_exactly(name):
    E, e, y = examples()
    assert not mha(LAYERS[name](E, e, 0 * y), E, e).any()


@pytest.mark.parametrize(
    ("x", "power"),
    [(0.0, 1.0), (1.0, 1.0), (3.99, 1.0), (-4.0, 4.0), (0.99, 0.25), (5e-324, 2.0**-1074)],
)
def test_unit_is_a_power_of_four(x, power):
    assert unit(torch.tensor([0.0, x], **F64)) == power
    assert unit(torch.tensor(torch.finfo(torch.float64).max, **F64)) == 2.0**1022


@pytest.mark.parametrize("power", [-600, 600])
def test_balancing_map_is_that_of_rows_near_one(power):
    rows, scale = examples(9)[1], 2.0**power
    assert torch.equal(balancing_map(scale * rows) * scale, balancing_map(rows))


# --- one dimension --------------------------------------------------------------------------------


@pytest.mark.hostile("mahdavi-finding-answer")
@pytest.mark.parametrize("build", [memorize_by_difference, memorize_by_cancellation])
@pytest.mark.parametrize(("heads", "n"), [(2, 2), (5, 3)])
@pytest.mark.parametrize("kind", ["own", "shared", "self-attention"])
def test_one_dimension_has_two_labels_for_two_heads(build, heads, n, kind):
    """``P(h) = 2 h`` examples of numbers: logit maps of one size would be equal or opposite."""
    T = 2 * (heads // 2)
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        E = gaussian(g, n, 1) if kind == "shared" else gaussian(g, T, n, 1)
        e = gaussian(g, T, 1)
        if kind == "self-attention":
            e = E[:, 0]
        y = uniform(g, T)
        weights = build(E, e, y, heads=heads, head_dim=1, seed=seed)
        assert missed(weights, E, e, y) <= 1e-8, seed


# --- repeats --------------------------------------------------------------------------------------


def repeated(own, label, order=slice(None)):
    """Examples of which 0 and 2 are equal, but for the order of tokens; so are labels, or not."""
    E, e, y = examples(own=own)
    e[2] = e[0]
    if label == "equal":
        y[2] = y[0]
    if own:
        E[2] = E[0][order]
    return E, e, y


OWN_OR_SHARED = [(name, own) for name in LAYERS for own in (False, True)]
OWN_OR_SHARED.remove(("scalars", True))


@pytest.mark.parametrize(("name", "own"), OWN_OR_SHARED)
def test_equal_examples_are_named(name, own):
    with pytest.raises(ValueError, match="examples: got 0 and 2 equal, with different labels"):
        LAYERS[name](*repeated(own, "other"))
    with pytest.raises(ValueError, match=r"examples: got 0 and 2 equal \(repeats in all: 1\)"):
        LAYERS[name](*repeated(own, "equal"))


@pytest.mark.parametrize("name", ["difference", "cancellation", "theorem 1"])
def test_equal_examples_in_another_order_are_named(name):
    """Attention does not see the order of tokens, nor the sign of zero."""
    E, e, y = repeated(True, "other", torch.tensor([1, 2, 0]))
    e[0, 0], e[2, 0] = 0.0, -0.0
    with pytest.raises(ValueError, match="examples: got 0 and 2 equal, with different labels"):
        LAYERS[name](E, e, y)


@pytest.mark.parametrize("name", ["difference", "cancellation"])
def test_a_context_of_one_token_gives_one_output(name):
    """Its query changes nothing. A single one is an example like others."""
    E, e, y = examples(own=True)
    E[3] = E[3, 0]
    assert missed(LAYERS[name](E, e, y), E, e, y) <= 1e-8
    E[1] = E[3]
    contexts = "^contexts of one repeated token: got"
    with pytest.raises(ValueError, match=f"{contexts} 1 and 3 equal, with different labels"):
        LAYERS[name](E, e, y)
    y[1] = y[3]
    with pytest.raises(ValueError, match=rf"{contexts} 1 and 3 equal \(repeats in all: 1\)"):
        LAYERS[name](E, e, y)
    with pytest.raises(ValueError, match=f"{contexts} 0 and 1 equal, with"):
        LAYERS[name](E[3], e, torch.arange(float(len(e))))


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize(("last", "message"), [(1, ", with different next"), (0, r" \(repeats")])
def test_equal_sequences_are_named(name, last, message):
    rows = torch.tensor([[0, 1], [1, 0], [0, 1]])
    with pytest.raises(ValueError, match=f"^sequences: got 0 and 2 equal{message}"):
        SEQUENCES[name](rows, torch.tensor([0, 0, last]))


# --- empty and smallest sizes ---------------------------------------------------------------------


@every_layer
@pytest.mark.parametrize("own", [False, True])
def test_sizes_of_zero_and_one(name, own):
    """They are met, or refused by name."""
    met = 0
    for T, n, d, outputs in itertools.product(range(3), (0, 1, 2, 3), (0, 1, 3), (None, 0, 1)):
        g = torch.Generator().manual_seed(0)
        E = gaussian(g, T, n, d) if own else gaussian(g, n, d)
        e = gaussian(g, T, d)
        y = gaussian(g, T) if outputs is None else gaussian(g, T, outputs)
        weights, refusal = built_or_refused(LAYERS[name], E, e, y)
        if refusal:
            assert "; expected " in refusal, (T, n, d, outputs)
        else:
            error = missed(weights, E, e, y.reshape(T), name.endswith("skip"))
            assert error <= 1e-8, (T, n, d, outputs)
            met += 1
    assert met > 0 or (own and name == "scalars")


@pytest.mark.parametrize(("vocab", "dim"), [*itertools.product((1, 2, 5), (1, 2, 3))])
def test_sequences_of_size_zero_and_one(vocab, dim):
    """They are met, or refused by name."""
    for T, S in itertools.product(range(3), range(4)):
        rows = torch.arange(T * S).reshape(T, S) % vocab
        next_tokens = torch.zeros(T, dtype=torch.int64)
        size = {"head_dim": 1, "dim": dim}
        learn = {"vocab": vocab, "seed": 0, **size}
        calls = [
            (memorize_aot, (rows, next_tokens), learn | {"heads": 2}),
            (memorize_next_tokens, (rows, next_tokens), learn | {"groups": (2,)}),
            (sequence_ranks.offered_rank, (rows, 2), size),
            (sequence_ranks.dependent_subset, (rows, 2), size),
            (impossible.impossible_subset, (rows, next_tokens, 2), {}),
            (obstacle, (rows, next_tokens), size | {"heads": 2}),
            (sequence_ranks.jacobian_rank, (rows, 2), size | {"trained": True}),
            (sequence_ranks.cancelling_rank, (rows, (2,)), size),
        ]
        for function, data, how in calls:
            result, refusal = built_or_refused(functools.partial(function, **how), *data)
            if refusal:
                assert "; expected " in refusal, (function, T, S)
            elif isinstance(result, tuple):
                assert torch.equal(aot(result, rows).argmax(-1), next_tokens), (function, T, S)
            elif isinstance(result, torch.Tensor):
                assert result.dtype == torch.int64


def test_no_sequences_and_no_examples_are_refused():
    with pytest.raises(ValueError, match=r"^sequences: got T_0 = 0; expected 1 <= T_0"):
        SEQUENCES["aot"](PAIRS[:0], PAIRS[:0, 0])
    with pytest.raises(ValueError, match=r"^examples: got 0"):
        memorize.serve(0, 2)


@pytest.mark.parametrize("vocab", [3, 4, 5])
@pytest.mark.parametrize("groups", [(1,), (3,)])
def test_every_constant_task_is_met_up_to_the_rank(vocab, groups):
    """For the middle token all scalars are zero: with as many sequences as weights matter, too."""
    rows = PAIRS[torch.tensor([8, 1, 3, 5, 6, 2])]
    counts = [T for T in range(1, 7) if sequence_ranks.cancelling_rank(rows[:T], groups, 1, 2) == T]
    size = {"vocab": vocab, "dim": 2, "head_dim": 1, "groups": groups, "seed": 0}
    for T, token in itertools.product(counts, range(vocab)):
        labels = torch.full((T,), token)
        weights = memorize_next_tokens(rows[:T], labels, **size)
        assert torch.equal(aot(weights, rows[:T]).argmax(-1), labels), (T, token)
    assert max(counts) >= 4


# --- the tensors themselves -----------------------------------------------------------------------


E, e, y = examples()
BUILT = {name: (build, (E, e, y)) for name, build in LAYERS.items()}
BUILT |= {name: (build, (PAIRS, PAIRS.sum(1) % 5)) for name, build in SEQUENCES.items()}
BUILT["labels of zero"] = LAYERS["difference"], (E, e, 0 * y)
BUILT["random"] = functools.partial(random_mha, seed=0), (H, D, 2)
BUILT["parity"] = impossible.parity_by_heads, (3,)


@pytest.mark.parametrize("name", BUILT)
def test_weights_are_whole_tensors_of_their_own(name):
    """As files of weights want them: contiguous, none in the memory of another or of an input."""
    build, data = BUILT[name]
    weights = build(*data)
    inputs = [x for x in data if isinstance(x, torch.Tensor)]
    places = [w.untyped_storage().data_ptr() for w in (*weights, *inputs)]
    assert len({*places}) == len(places)
    for w in weights:
        assert w.is_contiguous()
        assert w.untyped_storage().nbytes() == w.numel() * w.element_size()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_data_may_lie_anywhere_in_memory(seed):
    """As many heads nearly cancel as there may be, so that values are large."""
    T = own_context_floor(6, 2, 4)
    g = torch.Generator().manual_seed(seed)
    data = gaussian(g, T, 3, 4), gaussian(g, T, 4), gaussian(g, T)
    # Views that begin at no multiple of 16 bytes, as arrays of other libraries may.
    E, e, y = (torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in data)
    weights = memorize_by_cancellation(E, e, y, heads=6, head_dim=2, seed=0)
    assert (mha(weights, E, e)[:, 0] - y).abs().max() < 1e-8
