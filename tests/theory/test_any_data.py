"""What every construction owes for any data: scales, repeats, empty sizes, tensors as they are."""

import functools
import itertools

import pytest
import torch

from attnmem import aot, memorize_mha, mha, random_mha
from attnmem.core import memorize
from attnmem.core.bounds import own_context_floor
from attnmem.examples import unit
from attnmem.theory import associations, fitting, impossible, sequence_ranks
from attnmem.theory.associations import memorize_aot, memorize_next_tokens
from attnmem.theory.near import memorize_by_cancellation, memorize_by_difference, memorize_scalars
from attnmem.theory.tangents import ScalarHeads, balancing_map

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


def given(T=7, own=False, seed=0):
    g = torch.Generator().manual_seed(seed)
    normal = functools.partial(torch.randn, generator=g, dtype=torch.float64)
    return normal(*((T, N, D) if own else (N, D))), normal(T, D), normal(T)


def missed(weights, E, e, y, skip=False):
    """The largest error, in units of the largest label; of outputs that are divided first."""
    largest = y.abs().max()
    outputs = mha(weights, E, e, skip=skip)[:, 0]
    return float((outputs / largest - y / largest).abs().max())


def outcome(build, *data):
    """What is built, or what the refusal says."""
    try:
        return build(*data), None
    except ValueError as error:
        return None, str(error)


# --- scales ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("power", [-900, -500, 102, 900])
def test_powers_of_four_change_no_output(name, power):
    """Contexts, queries and labels in turn: every digit is that of the data near one."""
    skip, scale = name.endswith("skip"), 2.0**power
    E, e, y = given()
    plain = mha(LAYERS[name](E, e, y), E, e, skip=skip)
    for a, b, c in ((scale, 1, 1), (1, scale, 1), (1, 1, scale), (scale, 1 / scale, 1)):
        weights, refusal = outcome(LAYERS[name], a * E, b * e, c * y)
        if skip and refusal:  # the decoder has the ratio of labels and queries
            assert "the range of float64" in refusal
            continue
        assert torch.equal(mha(weights, a * E, b * e, skip=skip) / c, plain)


@pytest.mark.parametrize("name", LAYERS)
def test_what_float64_does_not_hold_is_refused_as_that(name):
    """Values of 1e400; labels of which subnormal numbers keep a digit or two."""
    E, e, y = given()
    y = y / y.abs().max()
    for a, b, c in ((1e-200, 1e-200, 1e200), (1, 1, 1e-322)):
        with pytest.raises(ValueError, match="leave the range of float64"):
            LAYERS[name](a * E, b * e, c * y)


@pytest.mark.parametrize("name", LAYERS)
def test_labels_at_the_end_of_float64_are_met_or_refused(name):
    E, e, y = given()
    y = y / y.abs().max() * torch.finfo(torch.float64).max
    weights, refusal = outcome(LAYERS[name], E, e, y)
    if refusal:
        assert "leave the range of float64" in refusal
    else:
        assert missed(weights, E, e, y, name.endswith("skip")) <= 1e-8


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("offset", [30.0, 1e4, 1e9])
def test_labels_far_from_zero_are_met_within_their_spread_or_refused(name, offset):
    E, e, y = given()
    weights, refusal = outcome(LAYERS[name], E, e, y + offset)
    if refusal:
        assert offset > 100
        assert "error" in refusal or "errs by" in refusal
    else:
        outputs = mha(weights, E, e, skip=name.endswith("skip"))[:, 0]
        assert (outputs - (y + offset)).abs().max() <= 1e-8 * (y.max() - y.min()) / 2


@pytest.mark.parametrize("name", LAYERS)
def test_equal_labels_are_met(name):
    E, e, y = given()
    weights = LAYERS[name](E, e, torch.full_like(y, 3.0))
    assert missed(weights, E, e, torch.full_like(y, 3.0), name.endswith("skip")) <= 1e-8


def test_outputs_may_differ_in_scale():
    E, e, y = given(8, own=True)
    labels = torch.stack([y, 1e-200 * y.flip(0)], dim=1)
    weights = memorize_by_difference(E, e, labels, heads=8, head_dim=3, seed=0)
    relative = (mha(weights, E, e) - labels).abs().amax(0) / labels.abs().amax(0)
    assert relative.max() <= 1e-8


@pytest.mark.parametrize("build", [LAYERS["scalars"], LAYERS["difference"], LAYERS["theorem 1"]])
def test_labels_of_zero_are_met_exactly(build):
    E, e, y = given()
    assert not mha(build(E, e, 0 * y), E, e).any()


@pytest.mark.parametrize(
    ("x", "power"),
    [(0.0, 1.0), (1.0, 1.0), (3.99, 1.0), (-4.0, 4.0), (0.99, 0.25), (5e-324, 2.0**-1074)],
)
def test_the_unit_is_a_power_of_four(x, power):
    assert unit(torch.tensor([0.0, x], dtype=torch.float64)) == power
    assert unit(torch.tensor(torch.finfo(torch.float64).max, dtype=torch.float64)) == 2.0**1022


@pytest.mark.parametrize("power", [-600, 600])
def test_a_balancing_map_is_that_of_rows_near_one(power):
    rows, scale = given(9)[1], 2.0**power
    assert torch.equal(balancing_map(scale * rows) * scale, balancing_map(rows))


# --- one dimension --------------------------------------------------------------------------------


@pytest.mark.hostile("mahdavi-finding-answer")
@pytest.mark.parametrize("build", [memorize_by_difference, memorize_by_cancellation])
@pytest.mark.parametrize(("heads", "n", "kind"), [*itertools.product((2, 4, 5), (2, 3), "osq")])
def test_in_one_dimension_two_labels_are_met_for_two_heads(build, heads, n, kind):
    """``P(h) = 2 h`` examples of numbers: logit maps of one size would be equal or opposite."""
    T = 2 * (heads // 2)
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        E = torch.randn(*((n, 1) if kind == "s" else (T, n, 1)), generator=g, dtype=torch.float64)
        e = torch.randn(T, 1, generator=g, dtype=torch.float64)
        e = E[:, 0] if kind == "q" else e  # self-attention
        y = torch.rand(T, generator=g, dtype=torch.float64)
        weights = build(E, e, y, heads=heads, head_dim=1, seed=seed)
        assert missed(weights, E, e, y) <= 1e-8


# --- repeats --------------------------------------------------------------------------------------


def repeated(own, label, order=slice(None)):
    E, e, y = given(own=own)
    e[2], y[2] = e[0], y[0] if label == "equal" else y[2]
    if own:
        E[2] = E[0][order]
    return E, e, y


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_equal_examples_are_named(name, own):
    if own and name == "scalars":
        return
    with pytest.raises(ValueError, match="examples: got 0 and 2 equal, with different labels"):
        LAYERS[name](*repeated(own, "other"))
    with pytest.raises(ValueError, match=r"examples: got 0 and 2 equal \(repeats in all: 1\)"):
        LAYERS[name](*repeated(own, "equal"))


def test_attention_does_not_see_the_order_of_tokens_nor_the_sign_of_zero():
    E, e, y = repeated(True, "other", torch.tensor([1, 2, 0]))
    e[0, 0], e[2, 0] = 0.0, -0.0
    for name in ("difference", "cancellation", "theorem 1"):
        with pytest.raises(ValueError, match="examples: got 0 and 2 equal, with different labels"):
            LAYERS[name](E, e, y)


@pytest.mark.parametrize("name", ["difference", "cancellation"])
def test_a_context_of_one_repeated_token_gives_one_output(name):
    """Its query changes nothing. A single one is an example like others."""
    E, e, y = given(own=True)
    E[3] = E[3, 0]
    assert missed(LAYERS[name](E, e, y), E, e, y) <= 1e-8
    E[1] = E[3]
    what = "contexts of one repeated token: got 1 and 3 equal"
    with pytest.raises(ValueError, match=f"{what}, with different labels"):
        LAYERS[name](E, e, y)
    y[1] = y[3]
    with pytest.raises(ValueError, match=rf"{what} \(repeats in all: 1\)"):
        LAYERS[name](E, e, y)
    with pytest.raises(ValueError, match="contexts of one repeated token: got 0 and 1 equal, with"):
        LAYERS[name](E[3], e, torch.arange(float(len(e))))


@pytest.mark.parametrize("name", SEQUENCES)
def test_equal_sequences_are_named(name):
    rows = torch.tensor([[0, 1], [1, 0], [0, 1]])
    with pytest.raises(
        ValueError, match="sequences: got 0 and 2 equal, with different next tokens"
    ):
        SEQUENCES[name](rows, torch.tensor([0, 0, 1]))
    with pytest.raises(ValueError, match=r"sequences: got 0 and 2 equal \(repeats in all: 1\)"):
        SEQUENCES[name](rows, torch.tensor([0, 0, 0]))


# --- empty and smallest sizes ---------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYERS)
def test_sizes_of_zero_and_one_are_met_or_refused_by_name(name):
    met = 0
    sizes = range(3), (0, 1, 2, 3), (0, 1, 3), (None, 0, 1), (False, True)
    for T, n, d, d_out, own in itertools.product(*sizes):
        g = torch.Generator().manual_seed(0)
        E = torch.randn(*((T, n, d) if own else (n, d)), generator=g, dtype=torch.float64)
        e = torch.randn(T, d, generator=g, dtype=torch.float64)
        y = torch.randn(*((T,) if d_out is None else (T, d_out)), generator=g, dtype=torch.float64)
        weights, refusal = outcome(LAYERS[name], E, e, y)
        if refusal:
            assert "; expected " in refusal
            continue
        assert missed(weights, E, e, y.reshape(T), name.endswith("skip")) <= 1e-8
        met += 1
    assert met > 0


def test_sequences_of_size_zero_and_one_are_met_or_refused_by_name():
    for T, S, vocab, dim in itertools.product(range(3), range(4), (1, 2, 5), (1, 2, 3)):
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
            (sequence_ranks.jacobian_rank, (rows, 2), size | {"trained": True}),
            (sequence_ranks.cancelling_rank, (rows, (2,)), size),
        ]
        for function, data, how in calls:
            found, refusal = outcome(functools.partial(function, **how), *data)
            if refusal:
                assert "; expected " in refusal
            elif isinstance(found, tuple):
                assert torch.equal(aot(found, rows).argmax(-1), next_tokens)
            elif isinstance(found, torch.Tensor):
                assert found.dtype == torch.int64
    with pytest.raises(ValueError, match=r"^sequences: got T_0 = 0; expected 1 <= T_0"):
        memorize_aot(rows[:0], next_tokens[:0], heads=2, **learn)
    with pytest.raises(ValueError, match="examples: got 0"):
        memorize.serve(0, 2)


@pytest.mark.parametrize("vocab", [3, 4, 5])
@pytest.mark.parametrize("groups", [(1,), (3,)])
def test_every_constant_task_is_met_up_to_the_rank(vocab, groups):
    """For the middle token all scalars are zero: with as many sequences as weights matter, too."""
    rows = torch.cartesian_prod(torch.arange(3), torch.arange(3))[torch.tensor([8, 1, 3, 5, 6, 2])]
    counts = [T for T in range(1, 7) if sequence_ranks.cancelling_rank(rows[:T], groups, 1, 2) == T]
    for T, token in itertools.product(counts, range(vocab)):
        labels = torch.full((T,), token)
        built = memorize_next_tokens(
            rows[:T], labels, vocab=vocab, dim=2, head_dim=1, groups=groups, seed=0
        )
        assert torch.equal(aot(built, rows[:T]).argmax(-1), labels)
    assert max(counts) >= 4


# --- the tensors themselves -----------------------------------------------------------------------

DATA = given()
PAIRS = torch.cartesian_prod(torch.arange(3), torch.arange(3))


def built():
    """Weights of every construction, and what they were built from."""
    E, e, y = given()
    found = {name: (build(E, e, y), (E, e, y)) for name, build in LAYERS.items()}
    found["labels of zero"] = LAYERS["difference"](E, e, 0 * y), (E, e)
    found["random"] = random_mha(H, D, 2, seed=0), ()
    for name, build in SEQUENCES.items():
        found[name] = build(PAIRS, PAIRS.sum(1) % 5), ()
    found["parity"] = impossible.parity_by_heads(3), ()
    return found


def test_weights_are_whole_tensors_of_their_own():
    """As files of weights want them: contiguous, none in the memory of another or of an input."""
    for name, (weights, inputs) in built().items():
        assert all(w.is_contiguous() for w in weights), name
        places = [w.untyped_storage().data_ptr() for w in (*weights, *inputs)]
        assert len({*places}) == len(places), name
        for w in weights:
            assert w.untyped_storage().nbytes() == w.numel() * w.element_size(), name


def everything():
    """A result of each public function, on data that say their device."""
    E, e, y = DATA
    start = ScalarHeads(*(torch.ones(2, *s, device="cpu").double() for s in ((D, 2), (D, 2), (D,))))
    pairs, tokens = PAIRS.clone(), PAIRS.sum(1) % 5
    bits, parity = impossible.every_parity(2)
    yield from (build(E, e, y) for build in LAYERS.values())
    yield from (build(pairs, tokens) for build in SEQUENCES.values())
    yield random_mha(H, D, 2, seed=0)
    yield impossible.parity_by_heads(3)
    yield (
        bits,
        parity,
        associations.spread_tokens(5, 3, 0),
        associations.circle(5),
        memorize.serve(6, 2),
    )
    yield fitting.levenberg_marquardt(start, E, e, y, steps=2).weights
    yield fitting.lbfgs(start, E, e, y, steps=2).weights
    yield fitting.adam(start, E, e, y, steps=2, rate=lambda _: 0.1, batch=3).weights
    yield impossible.impossible_subset(bits, parity, 1)
    yield (sequence_ranks.dependent_subset(bits, 1, 2, 2),)
    yield (
        *fitting.limits(start, E, e, y),
        sequence_ranks.offered_rank(bits, 1, 2, 2),
        sequence_ranks.jacobian_rank(bits, 1, 2, 2),
        sequence_ranks.cancelling_rank(bits, (2,), 2, 2),
    )


def test_the_default_device_of_torch_is_not_asked():
    wanted = [*everything()]
    with torch.device("meta"):
        found = [*everything()]
    for got, right in zip(found, wanted, strict=True):
        for x, z in zip(got, right, strict=True):
            assert torch.equal(x, z) if isinstance(z, torch.Tensor) else x == z


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_heads_that_nearly_cancel_are_built_wherever_data_lie_in_memory(seed):
    T = own_context_floor(6, 2, 4)  # as many as there may be, so that values are large
    g = torch.Generator().manual_seed(seed)
    data = [torch.randn(T, *z, generator=g, dtype=torch.float64) for z in ((3, 4), (4,), ())]
    # Views that begin at no multiple of 16 bytes, as arrays of other libraries may.
    E, e, y = (torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in data)
    weights = memorize_by_cancellation(E, e, y, heads=6, head_dim=2, seed=0)
    assert (mha(weights, E, e)[:, 0] - y).abs().max() < 1e-8
