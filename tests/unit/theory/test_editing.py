"""One fact more: every answer kept, the count of facts, what is refused, and exact forgetting."""

import copy
import re

import pytest
import torch
from torch.nn.functional import pad

from attnmem import MHAWeights, mha, mha_features, random_mha
from attnmem.core import bounds
from attnmem.theory.editing import Memory


def data(seed, T, n, d, shared=False):
    g = torch.Generator().manual_seed(seed)
    E = torch.randn(*(() if shared else (T,)), n, d, generator=g, dtype=torch.float64)
    e = torch.randn(T, d, generator=g, dtype=torch.float64)
    return E, e, torch.randn(T, generator=g, dtype=torch.float64)


def fill(memory, E, e, y, most):
    """Write facts in order until one is refused; how many were taken."""
    for t in range(most):
        try:
            memory.write(E[t] if E.ndim == 3 else E, e[t], y[t])
        except ValueError:
            return t
    return most


def unfit(memory, *fact):
    with pytest.raises(ValueError, match="label: got") as error:
        memory.write(*fact)
    return str(error.value)


@pytest.fixture
def ten():
    """A layer of 80 weights' shape, ten facts in it, and the data."""
    E, e, y = data(0, 130, 3, 4)
    layer = random_mha(4, 4, 2, seed=0)
    memory = Memory(layer, E[20:], e[20:])
    assert fill(memory, E, e, y, 10) == 10
    return memory, layer, E, e, y


SIZES = [(3, 2, 5, 1, "own"), (4, 3, 6, 6, "own"), (2, 8, 5, 2, "own"), (3, 1, 5, 2, "one token")]
SIZES += [(4, 5, 8, 2, "shared"), (3, 9, 4, 2, "shared"), (5, 4, 3, 1, "self"), (4, 3, 5, 2, "sum")]


@pytest.mark.hostile("mahdavi-finding-edits")
@pytest.mark.parametrize(("H", "n", "d", "d_h", "kind"), SIZES)
def test_facts_fit_up_to_the_rank(H, n, d, d_h, kind):
    E, e, y = data(H, 10 * H * d, n, d, kind == "shared")
    if kind == "self":
        e = E[:, 0].clone()
    if kind == "sum":
        E[..., -1] = 1 - E[..., :-1].sum(-1)
    R = {
        "one token": d,
        "shared": bounds.affine_span_rank(H, min(n - 1, d), n > d),
        "sum": bounds.affine_rank(H, d),
    }.get(kind, H * d)
    layer, own = random_mha(H, d, d_h, seed=H, spread=2), kind != "shared"
    memory = Memory(layer, E[2 * H * d :] if own else E, e[2 * H * d :])
    assert memory.room == R
    assert fill(memory, E, e, y, R + 2) == R
    assert memory.room == 0
    out = mha(memory.layer(), E[:R] if own else E, e[:R])[:, 0]
    assert (out - y[:R]).abs().max() < 1e-9


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_facts_a_hundredth_apart_fit(seed):
    """What a fact has of its own is then smaller than what rounding leaves of the others."""
    E, e, y = data(seed, 528, 3, 6)
    memory = Memory(random_mha(8, 6, 6, seed=seed), E[48:], e[48:])
    E, e = E[:1] + 0.01 * E[:48], e[:1] + 0.01 * e[:48]
    assert fill(memory, E, e, y, 48) == 48
    torch.testing.assert_close(mha(memory.layer(), E, e)[:, 0], y[:48], rtol=0, atol=1e-8)


def test_change_is_least_and_price_its_square(ten):
    memory, layer, E, e, y = ten
    Z = mha_features(layer, E, e)
    others, facts = Z[20:], Z[:10]
    C = others.mT @ others / len(others)
    start = mha(layer, E, e)[:, 0]
    G = facts @ torch.linalg.solve(C, facts.mT)
    w = torch.linalg.solve(C, facts.mT @ torch.linalg.solve(G, y[:10] - start[:10]))
    added = mha(memory.layer(), E, e)[:, 0] - start
    torch.testing.assert_close(added, Z @ w, rtol=0, atol=1e-9)
    assert memory.price == pytest.approx(float(added[20:].square().mean()), rel=1e-9)


def test_order_does_not_matter(ten):
    memory, layer, E, e, y = ten
    turned = Memory(layer, E[20:], e[20:])
    for t in reversed(range(10)):
        turned.write(E[t], e[t], y[t])
    both = (mha(one.layer(), E, e) for one in (memory, turned))
    torch.testing.assert_close(*both, rtol=0, atol=1e-9)


@pytest.mark.parametrize("number", [0, 4, 9])
def test_forgetting_gives_the_weights_without_it(ten, number):
    memory, layer, E, e, y = ten
    never = Memory(layer, E[20:], e[20:])
    for t in range(10):
        if t != number:
            never.write(E[t], e[t], y[t])
    before = memory.price
    memory.forget(number)
    assert memory.price == never.price < before
    for one, other in zip(memory.layer(), never.layer(), strict=True):
        assert torch.equal(one, other)
    assert abs(float(mha(memory.layer(), E[number][None], e[number][None])) - y[number]) > 1e-3
    with pytest.raises(ValueError, match=f"number: got {number}; expected one of"):
        memory.forget(number)
    assert memory.write(E[number], e[number], 0.0) == 10  # numbers are not used twice


def test_forgetting_moves_this_fact_alone(ten):
    memory, layer, E, e, _ = ten
    Z = mha_features(layer, E[:10], e[:10])
    whole = memory.layer().W_V.flatten()
    memory.forget(3)
    step = whole - memory.layer().W_V.flatten()
    off = (Z @ step).abs()
    assert off[3] > 1e-3
    assert off[[t for t in range(10) if t != 3]].max() < 1e-10


def test_repeat_is_free_and_contradiction_named(ten):
    memory, _, E, e, y = ten
    room, price = memory.room, memory.price
    again = E[3][[2, 0, 1]]  # tokens in another order are the same context
    assert memory.write(again, e[3], y[3]) == 10
    assert (memory.room, memory.price) == (room, price)
    said = unfit(memory, again, e[3], y[3] + 1)
    assert re.search(r"already fixed by fact 3(, fact 10)? \(room for 6\)$", said)
    implied = float(re.search(r"expected \[(.*)\]", said)[1])
    assert implied == pytest.approx(float(y[3]), rel=1e-6)
    assert (memory.room, memory.price) == (room, price)
    memory.forget(3)  # its repeat still says so
    assert memory.room == room
    assert float(mha(memory.layer(), E[3][None], e[3][None])) == pytest.approx(float(y[3]))
    memory.forget(10)
    assert memory.room == room + 1


@pytest.mark.hostile("mahdavi-finding-edits")
def test_facts_on_contexts_of_one_repeated_token():
    """All heads see the same token there, though the sample has more room."""
    E, e, y = data(1, 200, 3, 4)
    E[:10] = E[:10, :1]
    memory = Memory(random_mha(3, 4, 2, seed=1), E[20:], e[20:])
    assert memory.room == 12
    assert fill(memory, E, e, y, 10) == 4
    assert memory.room == 8
    assert "(room for 8)" in unfit(memory, E[5], e[5], 1.0)


def test_without_room_what_follows_is_taken(ten):
    memory, _, E, e, y = ten
    assert fill(memory, E[10:], e[10:], y[10:], 9) == 6
    said = unfit(memory, E[17], e[17], 1.0)
    assert said.endswith("already fixed by fact 0, fact 1, fact 2 and others (room for 0)")
    out = float(mha(memory.layer(), E[17][None], e[17][None]))
    memory.write(E[17], e[17], out)  # what the layer says anyway
    assert memory.room == 0


def test_kept_inputs_keep_answers_and_take_room():
    E, e, y = data(2, 300, 3, 4)
    layer = random_mha(4, 4, 2, seed=2)
    kept = (E[100:105], e[100:105])
    memory = Memory(layer, E[150:], e[150:], keep=kept)
    assert memory.room == 11
    assert fill(memory, E, e, y, 16) == 11
    before, after = (mha(one, *kept) for one in (layer, memory.layer()))
    torch.testing.assert_close(after, before, rtol=0, atol=1e-9)
    full = Memory(layer, E[150:], e[150:], keep=kept)
    assert "by fact kept 2 (" in unfit(full, E[102], e[102], 9.0)


def test_several_outputs_and_a_bias_as_a_coordinate():
    E, e, _ = data(3, 200, 3, 4)
    g = torch.Generator().manual_seed(3)
    maps = (torch.randn(2, 5, k, generator=g).double() for k in (2, 2, 3))
    W_O, W_D = (torch.randn(s, generator=g).double() for s in ((6, 7), (7, 2)))
    layer = MHAWeights(*maps, W_O, W_D)
    E, e = pad(E, (0, 1), value=1.0), pad(e, (0, 1), value=1.0)
    memory = Memory(layer, E[20:], e[20:])
    torch.testing.assert_close(mha(memory.layer(), E, e), mha(layer, E, e))
    assert memory.room == bounds.affine_span_rank(2, 4) == 9
    labels = torch.randn(9, 2, generator=g).double()
    assert fill(memory, E, e, labels, 9) == 9
    torch.testing.assert_close(mha(memory.layer(), E[:9], e[:9]), labels, rtol=0, atol=1e-9)


def test_features_of_zeros_answer_as_ever():
    E, e, _ = data(4, 100, 2, 3)
    memory = Memory(random_mha(2, 3, 1, seed=4), E, e)
    nothing = torch.zeros(2, 3, dtype=torch.float64)
    assert "features of zeros" in unfit(memory, nothing, e[0], 1.0)
    memory.write(nothing, e[0], 0.0)
    assert memory.room == 6


def test_rounding_of_single_precision_is_no_room():
    """Tokens of one sum, rounded: in double precision they would seem to span one more."""
    E, e, y = data(5, 200, 3, 4)
    E[..., -1] = 1 - E[..., :-1].sum(-1)
    memory = Memory(random_mha(3, 4, 2, seed=5), E[30:].float(), e[30:].float())
    assert memory.room == bounds.affine_rank(3, 4) == 10
    assert fill(memory, E.float(), e.float(), y, 10) == 10
    out = mha(memory.layer(), E[:10].float(), e[:10].float())[:, 0]
    assert (out - y[:10]).abs().max() < 1e-6


def test_refused_facts_change_nothing(ten):
    memory, layer, E, e, _ = ten
    bad = torch.full((4,), float("nan"), dtype=torch.float64)
    cases = [
        ((E[:2], e[0], 1.0), "context: got shape"),
        ((E[0], e[:2], 1.0), "query: got shape (2, 4)"),
        ((E[0].half(), e[0], 1.0), "torch.float16"),
        ((E[0].bfloat16(), e[0], 1.0), "torch.bfloat16"),
        ((E[0], bad, 1.0), "query: got 4 entries that are NaN"),
        ((E[0], e[0], float("inf")), "label: got 1 entries"),
        ((E[0], e[0], torch.ones(2)), "label: got shape (2,); expected 1 along axis 0"),
        ((E[0][:, :3], e[0], 1.0), "query: got d = 4"),
        ((E[0][:, :3], e[0][:3], 1.0), "context: got d = 3"),
        ((E[:2], e[:2], torch.ones(2)), "context: got shape (2, 3, 4)"),
        ((E[0].numpy(), e[0], 1.0), "context: got ndarray; expected a torch.Tensor"),
        ((E[0], e[0], "yes"), "label: got 'yes'; expected a number"),
        ((E[0], e[0], None), "label: got None; expected a number"),
        ((E[0], e[0], [[1.0], []]), "label: got [[1.0], []]; expected a number"),
    ]
    before = memory.price, memory.room
    for fact, said in cases:
        with pytest.raises(ValueError, match=re.escape(said)):
            memory.write(*fact)
    assert (memory.price, memory.room) == before
    for number in (99, -1, "kept 0", True, 1.5):
        with pytest.raises(ValueError, match="number: got"):
            memory.forget(number)
    with pytest.raises(ValueError, match=r"layer.W_Q: got dtype torch.float16"):
        Memory(MHAWeights(*(W.half() for W in layer)), E, e)
    with pytest.raises(ValueError, match="keep: got Tensor; expected tuple"):
        Memory(layer, E, e, keep=E)
    for keep in ((E,), (E, e, e)):
        with pytest.raises(ValueError, match=rf"keep: got a tuple of {len(keep)}; expected a pair"):
            Memory(layer, E, e, keep=keep)
    runs = MHAWeights(*(W[None] for W in layer))
    with pytest.raises(ValueError, match=r"layer.W_Q: got shape"):
        Memory(runs, E, e)


def test_refusal_of_a_label_of_many_numbers_is_short():
    E, e, _ = data(40, 40, 3, 48)
    layer = random_mha(2, 48, 2, seed=6)._replace(W_D=torch.randn(2, 99))
    layer = MHAWeights(*(W.double() for W in layer))
    layer = layer._replace(W_O=torch.randn(layer.W_O.shape[0], 2).double())
    memory = Memory(layer, E, e)
    memory.write(E[0], e[0], torch.ones(99))
    with pytest.raises(
        ValueError, match=r"label: got .2, 2, 2, and 96 more.; .*by fact 0"
    ) as error:
        memory.write(E[0], e[0], 2 * torch.ones(99))
    assert len(str(error.value)) <= 400


def test_a_memory_says_how_full_it_is(ten):
    memory, layer, E, e, _ = ten
    assert repr(memory) == f"Memory: 10 facts, room for 6, price {memory.price:.1f}"
    kept = Memory(layer, E, e, keep=(E[:3], e[:3]))
    assert repr(kept) == "Memory: 3 facts, room for 13, price 0.0"


def test_of_a_small_sample_the_room_is_its_number():
    E, e, y = data(6, 40, 3, 4)
    memory = Memory(random_mha(4, 4, 2, seed=6), E[30:], e[30:])
    assert memory.room == 10
    assert fill(memory, E, e, y, 12) == 10


def test_forgetting_all_gives_the_first_weights(ten):
    memory, layer, E, e, y = ten
    with pytest.raises(ValueError, match="label: got"):
        memory.write(E[4], e[4], y[4] + 1)
    for t in range(10):
        memory.forget(t)
    assert (memory.room, memory.price) == (16, 0)
    assert torch.equal(memory.layer().W_V, Memory(layer, E[20:], e[20:]).layer().W_V)
    assert memory.write(E[4], e[4], y[4] + 1) == 10  # nobody contradicts it now


def test_large_label_hides_no_small_contradiction(ten):
    memory, _, E, e, y = ten
    memory.write(E[10], e[10], 1e9)
    assert "by fact 3" in unfit(memory, E[3], e[3], y[3] + 0.01)
    E, e, y = data(41, 300, 3, 5)  # the same attention on tokens in large units: answers of 1e8
    layer = random_mha(4, 5, 2, seed=1, spread=2)
    layer = layer._replace(W_Q=layer.W_Q / 1e8, W_K=layer.W_K / 1e8)
    memory = Memory(layer, 1e8 * E[60:], 1e8 * e[60:])
    assert fill(memory, 1e8 * E, 1e8 * e, y, 30) == 20
    out = mha(memory.layer(), 1e8 * E[:20], 1e8 * e[:20])[:, 0]
    assert (out - y[:20]).abs().max() < 1e-4


def test_a_fact_that_another_needs_is_not_forgotten():
    """B is hardly apart from A, and its own label needs what C adds to it."""
    _, e, _ = data(12, 60, 1, 5)
    A, C, *others = torch.eye(5, dtype=torch.float64).repeat(12, 1)[:, None] + 0.1 * e[:, None]
    memory = Memory(random_mha(1, 5, 2, seed=12), torch.stack(others), e[2:])
    memory.write(A, e[0], 1.0)
    memory.write(C, e[0], 1e3)
    memory.write(A + 2e-7 * C, e[0], 1.0002)
    before = memory.layer()
    with pytest.raises(ValueError, match="number: got 1; expected one without which"):
        memory.forget(1)
    assert all(map(torch.equal, before, memory.layer()))
    memory.forget(2)
    memory.forget(1)
    assert memory.room == 4


def test_weights_are_shared_with_nobody():
    E, e, _ = data(13, 60, 3, 4)
    layer = random_mha(2, 4, 2, seed=0)
    layer = MHAWeights(*(W.double() for W in layer))
    memory = Memory(layer, E[10:], e[10:])
    memory.layer().W_V.zero_()
    memory.write(E[0], e[0], 1.0)
    for W in (*layer, memory.layer().W_V):
        W.zero_()
    assert float(mha(memory.layer(), E[:1], e[:1])) == pytest.approx(1)


def test_a_fact_in_single_precision_is_the_same_fact(ten):
    memory, _, E, e, y = ten
    assert "by fact 3" in unfit(memory, E[3].float(), e[3].float(), y[3] + 1e-3)
    memory.write(E[3].float(), e[3].float(), y[3])
    assert memory.room == 6


def test_outputs_are_judged_each_by_itself():
    E, e, _ = data(42, 100, 3, 4)
    layer = random_mha(2, 4, 2, seed=0)
    layer = layer._replace(W_D=torch.cat([layer.W_D, -layer.W_D], dim=1))
    memory = Memory(layer, E[50:], e[50:])
    memory.write(E[0], e[0], torch.tensor([1e12, 1.0]))
    said = unfit(memory, E[0], e[0], torch.tensor([1e12, 1.5]))
    assert "[1e+12, 1], already fixed by fact 0 (room for 7)" in said


def test_a_number_is_a_label_in_double_precision(ten):
    memory, _, E, e, _ = ten
    assert torch.get_default_dtype() == torch.float32
    memory.write(E[10], e[10], 0.1)
    assert abs(float(mha(memory.layer(), E[10:11], e[10:11])) - 0.1) < 1e-12


def test_nothing_of_a_memory_records_gradients():
    E, e, _ = data(11, 100, 3, 4)
    layer = MHAWeights(*(W.requires_grad_() for W in random_mha(2, 4, 2, seed=0)))
    memory = Memory(layer, E[50:].requires_grad_(), e[50:])
    memory.write(E[0], e[0].requires_grad_(), torch.tensor(1.0, requires_grad=True))
    assert not any(W.requires_grad for W in memory.layer())


def test_what_float64_would_miss_is_refused():
    """Many heads on tokens of two numbers are nearly dependent: full rank, and rounding decides."""
    E, e, y = data(7, 1600, 2, 2)
    memory = Memory(random_mha(100, 2, 1, seed=7), E[210:], e[210:])
    taken = fill(memory, E, e, y, 200)
    assert 40 < taken < memory.room + taken
    assert "expected one that float64 can add" in unfit(memory, E[taken], e[taken], y[taken])
    out = mha(memory.layer(), E[:taken], e[:taken])[:, 0]
    assert (out - y[:taken]).abs().max() < 1e-4
    sharp = random_mha(100, 2, 1, seed=7, spread=3)  # subtracted once, 160 would be taken
    assert fill(Memory(sharp, E[210:], e[210:]), E, e, y, 200) > 175


def test_near_facts_have_a_price_or_are_refused():
    E, e, _ = data(8, 100, 3, 4)
    for apart, taken in ((1e-3, True), (1e-8, False)):
        memory = Memory(random_mha(4, 4, 2, seed=8), E[10:], e[10:])
        memory.write(E[0], e[0], 1.0)
        near = E[0] + apart * E[1], e[0], -1.0
        if taken:
            memory.write(*near)
            assert memory.price > 1e3
        else:
            assert "by fact 0 (room for 15)" in unfit(memory, *near)


def test_answers_as_they_are_cost_nothing():
    E, e, _ = data(9, 100, 3, 4)
    layer = random_mha(4, 4, 2, seed=9)
    memory, out = Memory(layer, E[30:], e[30:]), mha(layer, E, e)[:, 0]
    assert fill(memory, E, e, out, 30) == 30
    assert memory.room == 0
    assert memory.price < 1e-20


def least_norm(layer, others, facts, features, answers):
    """The plain version: all facts at once, in lengths that others decide."""
    start = torch.block_diag(*layer.W_V) @ layer.W_O @ layer.W_D
    Z = features(layer, *others)
    C = Z.mT @ Z / len(Z)
    X = features(layer, *facts)
    G = X @ torch.linalg.solve(C, X.mT)
    return start + torch.linalg.solve(C, X.mT @ torch.linalg.solve(G, answers - X @ start))


def test_weights_of_many_facts_are_those_of_one_solve():
    """Across the sizes at which buffers grow, with outputs of their own, and after forgetting."""
    E, e, _ = data(50, 900, 3, 8)
    layer = random_mha(6, 8, 4, seed=50, spread=2)
    layer = layer._replace(W_D=torch.cat([layer.W_D, -layer.W_D.flip(0), layer.W_D], dim=1))
    layer = MHAWeights(*(W.double() for W in layer))
    labels = torch.randn(45, 3, generator=torch.Generator().manual_seed(50)).double()
    memory, kept = Memory(layer, E[100:], e[100:]), []
    for t in range(45):
        assert memory.write(E[t], e[t], labels[t]) == t
        kept.append(t)
        if t in (15, 16, 31, 32):
            memory.forget(kept.pop(3))
        if t in (14, 15, 16, 17, 31, 32, 33, 44):
            facts, others = (E[kept], e[kept]), (E[100:], e[100:])
            wanted = least_norm(layer, others, facts, mha_features, labels[kept])
            found = memory.layer().W_V.flatten(0, 1)
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)
            assert memory.room == 48 - len(kept)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy])
def test_a_copy_has_facts_of_its_own(ten, again):
    memory, _, E, e, _ = ten
    other = again(memory)
    memory.write(E[10], e[10], 1.0)
    other.write(E[11], e[11], 2.0)
    memory.write(E[11], e[11], -2.0)
    for one, labels in ((memory, [1.0, -2.0]), (other, [None, 2.0])):
        out = mha(one.layer(), E[10:12], e[10:12])[:, 0].tolist()
        for found, label in zip(out, labels, strict=True):
            assert label is None or found == pytest.approx(label)


def test_a_refused_fact_leaves_no_row_behind(ten):
    memory, _, E, e, y = ten
    for t in range(10, 15):
        unfit(memory, E[3], e[3], y[3] + 1)
        memory.write(E[t], e[t], y[t])
    out = mha(memory.layer(), E[:15], e[:15])[:, 0]
    torch.testing.assert_close(out, y[:15], rtol=0, atol=1e-8)


WIDTHS = [(3, 5, 2, 2, 6), (4, 6, 2, 3, 1), (2, 4, 3, 1, 4)]


@pytest.mark.parametrize(("H", "d", "d_h", "d_v", "d_out"), WIDTHS)
def test_with_the_same_widths_only_the_output_map_changes(H, d, d_h, d_v, d_out):
    E, e, _ = data(51, 300, 3, d)
    g = torch.Generator().manual_seed(51)
    shapes = (H, d, d_h), (H, d, d_h), (H, d, d_v), (H * d_v, 7), (7, d_out)
    layer = MHAWeights(*(torch.randn(shape, generator=g).double() for shape in shapes))
    bias = torch.randn(d_out, generator=g)
    memory = Memory(layer, E[50:], e[50:], keep=(E[40:42], e[40:42]), same_widths=True, bias=bias)
    before = mha(layer, E, e)
    torch.testing.assert_close(mha(memory.layer(), E, e), before)
    assert memory.room == H * d_v - 2
    labels = torch.randn(H * d_v, d_out, generator=g).double()
    assert fill(memory, E, e, labels, H * d_v) == H * d_v - 2
    edited = memory.layer()
    for name in ("W_Q", "W_K", "W_V"):
        assert torch.equal(getattr(edited, name), getattr(layer, name))
    assert edited.W_O.shape == (H * d_v, d_out)
    assert torch.equal(edited.W_D, torch.eye(d_out).double())
    after, n = mha(edited, E, e) + bias, H * d_v - 2
    torch.testing.assert_close(after[:n], labels[:n], rtol=0, atol=1e-8)
    torch.testing.assert_close(after[40:42], before[40:42] + bias, rtol=0, atol=1e-8)
    said = unfit(memory, E[n], e[n], labels[n])
    assert said.endswith(f"(room for 0 of {H * d_v}; W_O has {H * d_v} rows)")
    implied = float(re.search(r"expected \[([^,\]]*)", said)[1])
    assert implied == pytest.approx(float(after[n, 0]), rel=1e-4, abs=1e-6)


def test_a_bias_is_a_part_of_labels(ten):
    _, layer, E, e, y = ten
    memory = Memory(layer, E[20:], e[20:], bias=torch.tensor([5.0]))
    memory.write(E[0], e[0], y[0])
    assert float(mha(memory.layer(), E[:1], e[:1])) + 5 == pytest.approx(float(y[0]))
    said = unfit(memory, E[0], e[0], y[0] + 1)
    assert f"got [{float(y[0]) + 1:.7g}]; expected [{float(y[0]):.7g}], already" in said
    for bias, refusal in (
        (torch.ones(2), "bias: got d_out = 2"),
        (torch.tensor([torch.nan]), "bias: got 1 entries"),
    ):
        with pytest.raises(ValueError, match=refusal):
            Memory(layer, E[20:], e[20:], bias=bias)


@pytest.mark.parametrize("same_widths", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_missed_is_what_rounded_weights_do(same_widths, dtype):
    E, e, _ = data(52, 300, 3, 6)
    layer = random_mha(4, 6, 3, seed=52, value_dim=3)
    bias = torch.tensor([0.5])
    memory = Memory(layer, E[50:], e[50:], same_widths=same_widths, bias=bias)
    assert memory.missed(dtype) == 0
    labels = torch.randn(8, generator=torch.Generator().manual_seed(1)).double()
    before = mha(layer, E[:8], e[:8])[:, 0] + 0.5
    fill(memory, E, e, labels, 8)
    edited = memory.layer()
    name = "W_O" if same_widths else "W_V"
    rounded = edited._replace(**{name: getattr(edited, name).to(dtype).double()})
    off = (mha(rounded, E[:8], e[:8])[:, 0] + 0.5 - labels).abs()
    wanted = float((off / torch.maximum(labels.abs(), before.abs())).max())
    assert memory.missed(dtype) == pytest.approx(wanted, rel=1e-3, abs=1e-12)
    if dtype == torch.bfloat16:
        assert wanted > 1e-4
