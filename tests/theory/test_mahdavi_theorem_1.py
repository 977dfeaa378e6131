"""Theorem 1 built: any admissible sizes, both context modes, with and without skip, any seed."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmem import memorize_mha, mha, mha_attention, mha_features
from attnmem.core import memorize
from attnmem.core.bounds import mha_capacity
from attnmem.theory.independence import numerical_rank

F64 = {"dtype": torch.float64}


def examples(T, n, d, shared, outputs=1, generator=None):
    draw = {"generator": generator, **F64}
    contexts = torch.rand(*(() if shared else (T,)), n, d, **draw)
    return contexts, torch.rand(T, d, **draw), torch.rand(T, outputs, **draw)


def error(weights, contexts, queries, labels, skip=False):
    """One example at a time, as no batched evaluation rounds: the most different order."""
    rows = [
        mha(weights, contexts if contexts.ndim == 2 else contexts[t][None], e[None], skip=skip)
        for t, e in enumerate(queries)
    ]
    return float((torch.cat(rows) - labels.reshape(len(labels), -1)).abs().max())


@st.composite
def admissible(draw):
    d = draw(st.integers(2, 14))
    sizes = {
        "d": d,
        "n": draw(st.integers(1, d - 1)),
        "heads": draw(st.integers(1, 6)),
        "head_dim": draw(st.integers(1, d + 2)),
        "outputs": draw(st.integers(1, min(d, 3))),
        "shared": draw(st.booleans()),
        "skip": draw(st.booleans()),
        "extra": draw(st.integers(0, 2)),
        "seed": draw(st.integers(0, 2**32)),
    }
    sizes["T"] = draw(st.integers(1, mha_capacity(sizes["heads"], sizes["n"], sizes["head_dim"])))
    return sizes


@settings(max_examples=120)
@given(admissible())
def test_theorem_1_every_admissible_task_is_memorized(case):
    generator = torch.Generator().manual_seed(case["seed"])
    sizes = [case[name] for name in ("T", "n", "d", "shared", "outputs")]
    contexts, queries, labels = examples(*sizes, generator)
    value_dim = case["outputs"] + case["extra"]
    weights = memorize_mha(
        contexts,
        queries,
        labels,
        heads=case["heads"],
        head_dim=case["head_dim"],
        seed=case["seed"],
        value_dim=value_dim,
        skip=case["skip"],
    )
    d, H = case["d"], case["heads"]
    output = d if case["skip"] else case["outputs"]
    assert [tuple(W.shape) for W in weights] == [
        (H, d, case["head_dim"]),
        (H, d, case["head_dim"]),
        (H, d, value_dim),
        (H * value_dim, output),
        (output, case["outputs"]),
    ]
    assert error(weights, contexts, queries, labels, case["skip"]) <= 1e-8
    # Rows of comparable length before the rank is judged by float64's default tolerance.
    assert numerical_rank(mha_features(weights, contexts, queries)) == case["T"]


@pytest.mark.parametrize("heads", [32, 60])
def test_the_papers_size_with_a_shared_context(heads):
    T = mha_capacity(heads, 32, 64)
    contexts, queries, labels = examples(T, 32, 64, shared=True)
    weights = memorize_mha(contexts, queries, labels, heads=heads, head_dim=32, seed=1)
    assert error(weights, contexts, queries, labels) <= 1e-8


def test_nearly_dependent_tokens_are_told_apart_to_1e_8_or_refused():
    errors = []
    for power in range(-12, 0):
        contexts, queries, labels = examples(13, 4, 6, shared=True)
        contexts[3] = contexts[:3].sum(0) + 10.0**power * contexts[3]
        try:
            weights = memorize_mha(contexts, queries, labels, heads=4, head_dim=4, seed=0)
        except ValueError as refusal:
            refused = str(refusal)
        else:
            errors.append(error(weights, contexts, queries, labels))
    assert 0 < len(errors) < 12
    assert max(errors) <= 1e-8
    assert refused.startswith("contexts, queries: got nearly dependent contexts or queries (error")


def test_the_refused_example_does_not_depend_on_rounding():
    """Coordinates in another order give the same problem, with other sums."""
    queries = torch.randn(9, 3, **F64) @ torch.randn(3, 12, **F64)
    contexts, _, labels = examples(9, 6, 12, shared=True)
    said = set()
    for seed in range(10):
        order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
        with pytest.raises(ValueError, match=r"^queries: ") as refusal:
            memorize_mha(contexts[:, order], queries[:, order], labels, heads=3, head_dim=6, seed=0)
        said.add(str(refusal.value))
    assert len(said) == 1


def test_same_seed_same_weights():
    data = examples(29, 8, 16, shared=True)
    first, again, other = (memorize_mha(*data, heads=4, head_dim=8, seed=s) for s in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first.W_Q, other.W_Q)


def test_float32_data_give_float64_weights():
    contexts, queries, labels = (x.float() for x in examples(29, 8, 16, shared=True))
    weights = memorize_mha(contexts, queries, labels[:, 0], heads=4, head_dim=8, seed=0)
    assert weights.W_Q.dtype == torch.float64
    assert error(weights, contexts, queries, labels) <= 1e-8


# --- the steps of the proof -----------------------------------------------------------------------


@pytest.mark.parametrize(("T", "heads"), [(1, 3), (2, 5), (25, 8), (24, 8), (993, 32)])
def test_every_example_but_the_first_is_served(T, heads):
    served = memorize.serve(T, heads)
    assert served.shape == (heads, math.ceil((T - 1) / heads))
    assert set(served.flatten().tolist()) == set(range(1, T))
    assert all(len(set(row)) == len(row) for row in served.tolist())


@pytest.mark.parametrize("shared", [True, False])
def test_claim_2_heads_choose_where_they_serve_and_are_one_hot_elsewhere(shared):
    T, n, d, heads = 29, 8, 16, 4
    contexts, queries, labels = examples(T, n, d, shared)
    weights = memorize_mha(contexts, queries, labels, heads=heads, head_dim=n, seed=0)
    alpha = mha_attention(weights, contexts, queries)
    mine = torch.zeros(T, heads, dtype=torch.bool)
    served = memorize.serve(T, heads)
    mine[served, torch.arange(heads)[:, None]] = True
    largest = alpha.amax(dim=-1)
    assert (largest[~mine] == 1.0).all()  # to the last bit: what the computed scale promises
    assert (largest[mine] < 0.99).all()
    assert (alpha[mine] > 0).all()
