"""Every kind of array is read; labels, masks, equal examples; what is refused."""

import numpy as np
import pandas as pd
import pytest
import torch

from attnmem_yours.data import Examples, as_data, majority, repeats


def tensor(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


ARRAYS = {
    "list": lambda x: x.tolist(),
    "numpy float16": lambda x: x.numpy().astype(np.float16),
    "numpy big-endian": lambda x: x.numpy().astype(">f4"),
    "longdouble": lambda x: x.numpy().astype(np.longdouble),
    "strided": lambda x: torch.stack([x, x], -1)[..., 0],
    "with gradients": lambda x: x.clone().requires_grad_(),
    "bfloat16": lambda x: x.bfloat16(),
    "integers": lambda x: (4 * x).round().to(torch.int16),
    "read-only": lambda x: np.broadcast_to(x.numpy(), x.shape),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_as_data_reads_every_kind_of_array(kind):
    E, e = tensor(7, 3, 4, dtype=torch.float32), tensor(7, 4, seed=1, dtype=torch.float32)
    examples = as_data(ARRAYS[kind](E), ARRAYS[kind](e))
    assert examples.contexts.dtype == torch.float64
    assert (examples.contexts - (4 if kind == "integers" else 1) * E).abs().max() < 0.51
    assert not examples.contexts.requires_grad


LABELS = {
    "unsigned": (np.array([3, 1, 3], np.uint8), [1, 3]),
    "booleans": ([True, False, True], [False, True]),
    "objects": (np.array(["b", "a", "b"], object), ["a", "b"]),
    "categories": (pd.Series(["x", "y", "x"], dtype="category"), ["x", "y"]),
    "a column": (torch.tensor([[7], [7], [8]]), [7, 8]),
    "floats": ([0.5, 1.0, 2.0], None),
    "objects of numbers": (np.array([0.5, 1, 2], object), None),
    "rows": (torch.zeros(3, 2, dtype=torch.float16), None),
}


@pytest.mark.parametrize(("labels", "classes"), LABELS.values(), ids=LABELS)
def test_as_data_takes_all_but_floats_for_classes(labels, classes):
    examples = as_data(tensor(3, 2, 4), tensor(3, 4), labels)
    assert examples.classes == classes
    if classes:
        assert [classes[k] for k in examples.labels] == [*np.asarray(labels).reshape(-1)]


@pytest.mark.parametrize("kind", ["tables", "a mask of booleans", "a mask of logits"])
def test_as_data_pads_contexts_of_any_lengths(kind):
    lengths = np.array([2, 4, 3, 1, 4, 2])
    tables = [tensor(n, 4, seed=int(n)).numpy() for n in lengths]
    contexts, mask = np.full((6, 4, 4), np.nan), np.arange(4) >= lengths[:, None]
    for row, table in zip(contexts, tables, strict=True):
        row[: len(table)] = table
    given = {"tables": (tables, None), "a mask of booleans": (contexts, mask)}
    E, hidden = given.get(kind, (contexts, np.where(mask, -np.inf, 0)))
    examples = as_data(E, tensor(6, 4), mask=hidden)
    assert examples.mask.numpy().tolist() == mask.tolist()
    assert np.array_equal(examples.contexts.numpy(), np.nan_to_num(contexts))
    assert examples.lengths.tolist() == lengths.tolist()


def test_as_data_masks_a_shared_context():
    mask = torch.tensor([[False, True], [False, False]])
    examples = as_data(E := tensor(2, 4), tensor(2, 4), mask=mask)
    assert examples.contexts[0].equal(E * torch.tensor([[1.0], [0.0]]))
    assert not examples.shared
    assert as_data(E, tensor(2, 4), mask=mask[0]).contexts.equal(E[:1])


E, e = tensor(3, 2, 4), tensor(3, 4)
MALFORMED = [
    ((E, tensor(3, 5)), "contexts: got d = 4"),
    ((E, e[:2]), "contexts: got 3 contexts"),
    ((E, e, [1, 2]), "labels: got 2 labels"),
    ((E / 0, e), "contexts: got no finite number at"),
    ((E, e, [1.0, 2.0, float("nan")]), "labels: got NaN .*in row 2"),
    ((E, e, [[1.0], [np.inf], [2.0]]), "labels: got NaN .*in row 1"),
    ((E, e, ["a", None, "b"]), "labels: got words beside others .*in row 1"),
    (([[[1, 2], [3]], [[1, 2]]], tensor(2, 2)), r"contexts\[0\]: got list"),
    ((E, [["a", "b"]]), "queries: got dtype <U1"),
    ((E, e.to(torch.complex64)), "queries: got dtype torch.complex64"),
    ((E, e, None, torch.ones(3, 2).bool()), "mask: got no token left"),
    ((E, e, None, torch.zeros(3)), "mask: got shape"),
    ((E, e, None, torch.ones(3, 2)), "mask: got numbers that"),
    ((E, e, None, torch.ones(3, 2).long()), "mask: got integers"),
]


@pytest.mark.parametrize(("arguments", "message"), MALFORMED, ids=[m for _, m in MALFORMED])
def test_as_data_refuses_by_name(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        as_data(*arguments)


@pytest.mark.parametrize("shared", [False, True])
def test_some_takes_the_rows_of_all_arrays(shared):
    E = tensor(2, 4) if shared else tensor(5, 2, 4)
    mask = None if shared else torch.arange(2) >= torch.tensor([2, 1, 1, 2, 1])[:, None]
    offsets = tensor(1 if shared else 5, 4, seed=2)
    examples = Examples(E, tensor(5, 4), torch.arange(5), mask, offsets=offsets)
    rows = torch.tensor([4, 1])
    chosen = examples.some(rows)
    assert chosen.queries.equal(examples.queries[rows])
    assert chosen.labels.tolist() == [4, 1]
    assert chosen.contexts.equal(E if shared else E[rows])
    assert chosen.offsets.equal(offsets if shared else offsets[rows])
    assert chosen.mask is None if shared else chosen.mask.equal(mask[rows])


def test_repeats_of_tokens_in_another_order():
    a, b = tensor(2, 3)
    E = torch.stack([torch.stack(x) for x in ([a, b, a, b], [b, b, a, a], [a, b, b, b])])
    same = repeats(as_data(E, torch.ones(3, 3), [0.0, 1.0, 2.0]))
    assert same.equal == [(0, 1)] == same.conflicts
    assert same.repeated_tokens == 3


def test_repeats_of_one_token_whatever_the_query():
    a, b = tensor(2, 3)
    same = repeats(as_data(torch.stack([a, a, b])[:, None], tensor(3, 3), ["x", "y", "x"]))
    assert (same.conflicts, same.constant) == ([(0, 1)], 3)
    same = repeats(as_data(a[None], tensor(3, 3)))
    assert (same.group.tolist(), same.constant) == ([0, 0, 0], 1)


def test_repeats_of_queries_in_a_shared_context():
    e = tensor(3, 3)
    e[2], e[0, 0], e[2, 0] = e[0], 0.0, -0.0
    same = repeats(as_data(tensor(2, 3), e, ["x", "y", "x"]))
    assert (same.group.tolist(), same.conflicts) == ([0, 1, 0], [])


@pytest.mark.parametrize(
    "labels",
    [[5.0, 2.0, 5.0, 5.0, 1.0], [5.0, 2.0, 5.0000001, 5.0, 1.0], [2, 0, 2, 2, 1]],
)
def test_majority_of_equal_examples(labels):
    assert majority(torch.tensor(labels), torch.tensor([0, 0, 0, 0, 4])).tolist() == [0] * 4 + [4]
