"""One's own data: what is degenerate, what is met, real tables, and all kinds of input."""

import numpy as np
import pandas as pd
import pytest
import torch

from attnmem import mha
from attnmem.core import bounds
from attnmem.theory.tangents import ScalarHeads
from attnmem.yours import examine, memorize
from attnmem.yours import layer as one_layer
from attnmem.yours.data import as_data, repeats


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def verdicts(found, precision="float64"):
    return {x.name: x.verdict for x in found.findings if x.precision == precision}


def test_examine_draws_what_it_found():
    found = examine(normal(40, 3, 5), normal(40, 5), heads=2)
    ax = found.draw()
    names = [text.get_text() for text in ax.get_yticklabels()]
    assert len(names) == len(found.bounds) + 2
    assert f"{found.rank.rank:,}" in " ".join(text.get_text() for text in ax.texts)
    with pytest.raises(ValueError, match="heads: got None"):
        examine(normal(4, 3, 5), normal(4, 5)).draw()


def test_tokens_in_another_order_or_repeated_alike_make_equal_examples():
    a, b = normal(2, 3)
    E = torch.stack([torch.stack(x) for x in ([a, b, a, b], [b, b, a, a], [a, b, b, b])])
    found = repeats(as_data(E, torch.ones(3, 3), [0.0, 1.0, 2.0]))
    assert found.equal == [(0, 1)] == found.conflicts
    assert found.repeated_tokens == 3
    same = repeats(as_data(torch.stack([a, a, b])[:, None], normal(3, 3), ["x", "y", "x"]))
    assert (same.conflicts, same.constant) == ([(0, 1)], 3)  # one token, whatever the query


def test_the_derivative_is_that_of_autograd_with_a_mask():
    mask = torch.arange(5) >= torch.tensor([5, 2, 3, 1])[:, None]
    at = one_layer.reduced(as_data(normal(4, 5, 3), normal(4, 3), mask=mask))
    heads = one_layer.draw(2, 2, at, 1.0, seed=0)

    def plain(*weights):
        return at.outputs(ScalarHeads(*weights))

    J = torch.cat([p.flatten(1) for p in torch.autograd.functional.jacobian(plain, (*heads,))], 1)
    here = at.tangents(heads)
    torch.testing.assert_close(here.gram(), J @ J.T)
    torch.testing.assert_close(here.outputs, plain(*heads))


def test_what_is_dependent_in_one_precision_only_is_said():
    E, e = normal(12, 2, 3), normal(12, 3)
    hidden = torch.tensor([True, False]).expand(12, 2)
    assert "contexts with a mask" in str(examine(E, e, heads=3, mask=hidden).bounds[0])
    e[5] = e[2] * (1 + 1e-9)
    near = examine(E, e)
    assert near.equal == []
    assert verdicts(near, "float32")["Assumption 1"] == "fails"  # equal in this precision
    assert verdicts(near)["Assumption 1"] == "fails to rounding"


DEGENERATE = {
    "zero tokens": lambda E, e: (E * 0, e),
    "zero queries": lambda E, e: (E, e * 0),
    "one token": lambda E, e: (E[:, :1], e),
    "one dimension": lambda E, e: (E[..., :1], e[:, :1]),
    "equal examples": lambda E, e: (E[:1].expand_as(E), e[:1].expand_as(e)),
    "sizes": lambda E, e: (1e-20 * E, 1e20 * e),
    "one example": lambda E, e: (E[:1, :1], e[:1]),
}
LABELS = {
    "reals": normal(9),
    "tiny": 1e-300 * normal(9),
    "huge": 1e300 * normal(9),
    "classes": list("abcabcabc"),
    "one class": [True] * 9,
    "rows": normal(9, 2),
}


@pytest.mark.parametrize("change", DEGENERATE)
@pytest.mark.parametrize("kind", LABELS)
def test_something_is_met_on_every_degenerate_data_set(change, kind):
    E, e = DEGENERATE[change](normal(9, 3, 4), normal(9, 4, seed=1))
    labels = LABELS[kind][: len(e)]
    found = memorize(E, e, labels, heads=1 + (kind == "rows"), head_dim=5, seconds=20)
    assert found.count >= 1 or not E.any()
    assert found.met.all() == (found.reason == "all labels are met")
    assert str(examine(E, e, labels, heads=1, samples=10))
    if (change, kind) == ("zero tokens", "reals"):
        assert "all tokens are zero" in found.reason


def test_several_outputs_share_the_heads_and_random_classes_need_fewer_than_reals():
    E, e = normal(30, 3, 4), normal(30, 4, seed=1)
    assert memorize(E, e, normal(30, 2), heads=4, head_dim=2).count == 30
    low = normal(30, 1) @ normal(1, 9, seed=3)
    assert memorize(E, e, low, heads=3, head_dim=2).count == 30
    E, e, words = normal(42, 3, 4), normal(42, 4, seed=1), np.array([*"abcd"])[np.arange(42) % 4]
    assert bounds.own_context_ceiling(2, 4, 4) == 40
    assert (memorize(E, e, words, heads=2, head_dim=4).predict(E, e) == words).all()


KINDS = {
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


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_array_is_read(kind):
    E, e = normal(7, 3, 4, dtype=torch.float32), normal(7, 4, seed=1, dtype=torch.float32)
    data = as_data(KINDS[kind](E), KINDS[kind](e))
    assert data.contexts.dtype == torch.float64
    assert (data.contexts - (4 if kind == "integers" else 1) * E).abs().max() < 0.51
    assert not data.contexts.requires_grad


CLASSES = [
    (np.array([3, 1, 3], np.uint8), [1, 3]),
    ([True, False, True], [False, True]),
    (np.array(["b", "a", "b"], object), ["a", "b"]),
    (pd.Series(["x", "y", "x"], dtype="category"), ["x", "y"]),
    (torch.tensor([[7], [7], [8]]), [7, 8]),
    ([0.5, 1.0, 2.0], None),
    (np.array([0.5, 1, 2], object), None),
    (torch.zeros(3, 2, dtype=torch.float16), None),
]


@pytest.mark.parametrize(("labels", "classes"), CLASSES)
def test_integers_booleans_and_strings_are_classes(labels, classes):
    data = as_data(normal(3, 2, 4), normal(3, 4), labels)
    assert data.classes == classes
    if classes:
        assert [classes[k] for k in data.labels] == [*np.asarray(labels).reshape(-1)]


def test_lists_of_contexts_and_masks_mean_the_same():
    lengths = [2, 4, 3, 1, 4, 2]
    tables = [normal(n, 4, seed=n).numpy() for n in lengths]
    e, y = normal(6, 4), normal(6)
    padded = np.full((6, 4, 4), np.nan)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    mask = np.arange(4) >= np.array(lengths)[:, None]
    for contexts, given in ((tables, None), (padded, mask), (padded, np.where(mask, -np.inf, 0))):
        found = memorize(contexts, e, y, heads=2, head_dim=2, mask=given)
        assert found.count == 6
        pairs = zip(map(torch.from_numpy, tables), e, strict=True)
        alone = [mha(found.weights, E, query[None])[0, 0] for E, query in pairs]
        assert (torch.stack(alone) - y).abs().max() < 1e-5
        assert "1 to 4 tokens" in str(examine(contexts, e, y, mask=given, samples=10))
    shared = examine(tables[1], e, y, mask=mask, samples=10)  # parts of one context
    assert "1 to 4 tokens" in str(shared)


E, e = normal(3, 2, 4), normal(3, 4)
MALFORMED = [
    ((E, normal(3, 5)), "contexts: got d = 4"),
    ((E, e[:2]), "contexts: got 3 contexts"),
    ((E, e, [1, 2]), "labels: got 2 labels"),
    ((E / 0, e), "contexts: got no finite number at"),
    ((E, e, [1.0, 2.0, float("nan")]), "labels: got NaN .*in row 2"),
    ((E, e, [[1.0], [np.inf], [2.0]]), "labels: got NaN .*in row 1"),
    ((E, e, ["a", None, "b"]), "labels: got words beside others .*in row 1"),
    (([[[1, 2], [3]], [[1, 2]]], normal(2, 2)), r"contexts\[0\]: got list"),
    ((E, [["a", "b"]]), "queries: got dtype <U1"),
    ((E, e.to(torch.complex64)), "queries: got dtype torch.complex64"),
    ((E, e, None, torch.ones(3, 2).bool()), "mask: got no token left"),
    ((E, e, None, torch.zeros(3)), "mask: got shape"),
    ((E, e, None, torch.ones(3, 2)), "mask: got numbers that"),
]


@pytest.mark.parametrize(("arguments", "message"), MALFORMED)
def test_malformed_data_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        as_data(*arguments)
