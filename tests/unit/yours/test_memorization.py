"""Which labels are met, against plain loops; degenerate data; as many as is promised."""

import itertools
import time

import numpy as np
import pytest
import torch

from attnmem import mha
from attnmem.core.bounds import own_context_ceiling
from attnmem_yours import cut, examine, layer, memorize
from attnmem_yours.data import as_data

from layouts import layouts, normal, outputs

datasets = pytest.importorskip("sklearn.datasets")


def test_errors_of_several_columns_and_lengths():
    """In units of each column, and beyond the block of 2,048 examples."""
    E, e, mask, _ = layouts(T=30)["masked"]
    y = normal(30, 2, seed=5) * [1e6, 1e-3]
    built = memorize(E, e, y, heads=4, head_dim=2, mask=mask)
    errors = (np.abs(outputs(built.weights, E, e, mask) - y) / np.abs(y).max(0)).max(1)
    assert np.abs(built.errors.numpy() - errors).max() < 1e-9
    assert built.met.tolist() == [*(errors <= 1e-6)]
    assert 8 < built.count < 30  # in contexts of one token no query counts
    E, e, mask, _ = layouts(T=2100)["masked"]
    predicted, scores = built.predict(E, e, mask), outputs(built.weights, E, e, mask)
    assert np.abs(predicted - scores).max() < 1e-9 * np.abs(scores).max()
    unmasked = built.predict(np.nan_to_num(E), e)
    assert np.abs(unmasked - predicted).max() > 1e-3 * np.abs(scores).max()


@pytest.mark.parametrize("column", [0, 1])
@pytest.mark.parametrize("apart", [0.9e-6, 1.5e-6])
def test_a_label_is_met_if_every_column_is(column, apart):
    """Two equal examples, whose labels are apart in one column by a share of its largest label."""
    E, e = normal(8, 3, 4), normal(8, 4, seed=1)
    E[7], e[7] = E[0], e[0]
    y = normal(8, 2, seed=2)
    y /= np.abs(y).max(0)
    y[7] = y[0]
    y[7, column] += apart
    y = y / np.abs(y).max(0) * [1.0, 1e6]
    built = memorize(E, e, y, heads=4, head_dim=2)
    errors = (np.abs(outputs(built.weights, E, e) - y) / np.abs(y).max(0)).max(1)
    assert np.abs(built.errors.numpy() - errors).max() < 1e-8
    assert built.met.tolist() == [*(errors <= 1e-6)]
    assert built.count == (8 if apart < 1e-6 else 7)
    assert ("0 and 7" in built.reason) == (apart > 1e-6)


def test_margins_of_classes():
    E, e, mask, _ = layouts(T=12)["masked"]
    words = np.array(["a", "b", "c"])[np.random.default_rng(3).integers(0, 3, 12)]
    built = memorize(E, e, words, heads=2, head_dim=2, mask=mask)
    for t, row in enumerate(outputs(built.weights, E, e, mask)):
        right = "abc".index(words[t])
        margin = max(x for k, x in enumerate(row) if k != right) - row[right]
        assert abs(margin - float(built.errors[t])) < 1e-9
        assert bool(built.met[t]) == (margin < 0)
    assert f"(least margin {-float(built.errors[built.met].max()):.1e})" in str(built)


def test_a_tie_of_classes_is_not_met():
    E, e = 0 * normal(12, 3, 4), normal(12, 4, seed=1)  # all scores are zero
    built = memorize(E, e, [*"abc"] * 4, heads=2, head_dim=2)
    assert built.errors.tolist() == [0.0] * 12
    assert built.count == 0


LABELS = {
    "reals": [5.0, 2.0, 5.0, 5.0, 1.0],
    "nearly equal": [5.0, 2.0, 5.0000001, 5.0, 1.0],
    "classes": ["z", "a", "z", "z", "b"],
}


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
def test_of_equal_examples_the_label_of_most_is_met(labels):
    E, e = normal(5, 3, 4), normal(5, 4, seed=1)
    for t in (1, 2, 3):
        E[t], e[t] = E[0][[1, 2, 0]], e[0]  # in another order
    built = memorize(E, e, labels, heads=2, head_dim=2)
    assert built.met.tolist() == [True, False, True, True, True]
    assert built.reason.startswith("1 of 5 labels are not stored: 1 because equal examples")
    assert "(such as 0 and 1)" in built.reason


def tables():
    """Tables of scikit-learn, raw and in standard units, cut into tokens."""
    cancer, iris = datasets.load_breast_cancer().data, datasets.load_iris().data
    wine = datasets.load_wine().data[:, :12]
    body = datasets.load_linnerud().data
    diabetes = datasets.load_diabetes(scaled=False).data
    for name, table, n, places, *sizes in (
        ("cancer", cancer, 5, False, 16, 6),
        ("iris", iris, 2, True, 6, 3),
        ("wine", wine, 3, False, 8, 4),
        ("linnerud", body, 3, False, 16, 2),
        ("diabetes", diabetes, 5, True, 8, 3),
    ):
        scaled = (table - table.mean(0)) / table.std(0)
        for x, end in ((table, ""), (scaled, "-std")):
            yield pytest.param(*cut(x, n, positions=places), *sizes, id=name + end)
    rng = np.random.default_rng(0)
    E, e = rng.integers(0, 4, (90, 3, 3)), rng.integers(0, 5, (90, 3))
    yield pytest.param(E, e, 5, 2, id="integers")
    yield pytest.param(1e4 + normal(60, 3, 4), normal(60, 4, seed=1), 5, 2, id="an offset")
    yield pytest.param(normal(6, 4), normal(80, 4, seed=1), 4, 2, id="shared, long")
    yield pytest.param(normal(3, 5), normal(80, 5, seed=1), 5, 2, id="shared, short")


def weakest(E, e, rows, heads, head_dim):
    """Labels along which the rows of the derivative differ least where heads cancel."""
    reduced, reduction = layer.reduced(as_data(E, e))
    examples, sizes = reduced.some(rows), reduction.dimensions
    base = layer.draw(heads, head_dim, examples, sizes, layer.SHARP, 0, cancelling=True)
    clear, _ = layer.independent_rows(base, examples, layer.SURE)
    _, axes = torch.linalg.eigh(layer.derivative(base, examples.some(clear)).gram())
    y = np.zeros(len(e))
    y[rows[clear]] = axes[:, 0]
    return y


def applies(bound):
    return "any real labels" in bound.means and not bound.missing and not bound.unsure


@pytest.mark.parametrize(("E", "e", "heads", "head_dim"), [*tables()])
@pytest.mark.parametrize("kind", ["normal", "weakest", "one"])
def test_as_many_labels_are_met_as_examine_says(E, e, heads, head_dim, kind):
    """Random labels, those along which the rows differ least, and one label among zeros."""
    T = len(e)
    x = examine(E, e, heads=heads, head_dim=head_dim, samples=9)
    repeated = {t for _, t in x.equal}
    rows = torch.tensor([t for t in range(T) if t not in repeated])
    y = {"normal": normal(T, seed=6), "one": np.eye(T)[3]}.get(kind)
    if y is None:
        y = weakest(E, e, rows, heads, head_dim)
    for s, t in x.equal:
        y[t] = y[s]
    built = memorize(E, e, y, heads=heads, head_dim=head_dim, seconds=0)  # the first attempts alone
    assert int(built.met[rows].sum()) >= x.met.rank > 0
    assert x.met.rank >= max((bound.labels for bound in x.bounds if applies(bound)), default=0)


def test_the_clock_changes_no_answer(monkeypatch):
    """A machine on which each look at the clock takes a day."""
    E, e, y = normal(40, 3, 4), normal(40, 4, seed=1), normal(40, seed=2)
    sizes = {"heads": 2, "head_dim": 2}
    first, told = memorize(E, e, y, **sizes), []
    clock = itertools.count(0, 86400)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    again = memorize(E, e, y, **sizes, say=told.append)
    assert told
    assert all(torch.equal(a, b) for a, b in zip(first.weights, again.weights, strict=True))
    short = memorize(E, e, y, **sizes, seconds=1)
    assert "more seconds" in short.reason
    assert "more seconds" not in first.reason
    assert 0 < short.count <= first.count < 40
    full = memorize(E[:32], e[:32], y[:32], **sizes, seconds=1)
    assert full.count < 32
    assert "derivative" not in full.reason  # whose rank excludes nothing


def test_very_many_labels_are_met_as_examine_says():
    """Beyond 12,000 examples a random part of them is met, of more than their parameters."""
    E, e, _, _ = layouts(T=12_100)["shared, short"]
    y = normal(12_100, seed=5)
    built = memorize(E, e, y, heads=3, head_dim=2, seconds=0)
    errors = np.abs(outputs(built.weights, E, e)[:, 0] - y) / np.abs(y).max()
    assert built.count == (errors <= 1e-6).sum() >= examine(E, e, heads=3, head_dim=2).met.rank
    assert "more than 31 examples (the outputs have so many parameters" in built.reason


DEGENERATE = {
    "zero tokens": lambda E, e: (E * 0, e),
    "zero queries": lambda E, e: (E, e * 0),
    "one token": lambda E, e: (E[:, :1], e),
    "one dimension": lambda E, e: (E[..., :1], e[:, :1]),
    "equal examples": lambda E, e: (np.repeat(E[:1], 9, 0), np.repeat(e[:1], 9, 0)),
    "sizes": lambda E, e: (1e-20 * E, 1e20 * e),
    "one example": lambda E, e: (E[:1, :1], e[:1]),
}
KINDS = {
    "reals": normal(9),
    "tiny": 1e-300 * normal(9),
    "huge": 1e300 * normal(9),
    "classes": list("abcabcabc"),
    "one class": [True] * 9,
    "rows": normal(9, 2),
}


@pytest.mark.parametrize("change", DEGENERATE)
@pytest.mark.parametrize("kind", KINDS)
def test_something_is_met_on_degenerate_data(change, kind):
    E, e = DEGENERATE[change](normal(9, 3, 4), normal(9, 4, seed=1))
    labels, heads = KINDS[kind][: len(e)], 2 if kind == "rows" else 1
    built = memorize(E, e, labels, heads=heads, head_dim=5, seconds=20)
    assert built.count >= 1 or not E.any()
    assert built.met.all() == (built.reason == "all labels are stored")
    assert str(examine(E, e, labels, heads=1, samples=10))
    if (change, kind) == ("zero tokens", "reals"):
        assert "all tokens are zero" in built.reason


@pytest.mark.parametrize("kind", ["tables", "a mask"])
def test_contexts_of_any_lengths_are_met_each_alone(kind):
    lengths = [2, 4, 3, 1, 4, 2]
    tables = [normal(n, 4, seed=n) for n in lengths]
    e, y, mask = normal(6, 4), normal(6), None
    contexts = tables
    if kind == "a mask":
        contexts = np.full((6, 4, 4), np.nan)
        for row, table in zip(contexts, tables, strict=True):
            row[: len(table)] = table
        mask = np.arange(4) >= np.array(lengths)[:, None]
    built = memorize(contexts, e, y, heads=2, head_dim=2, mask=mask)
    assert built.count == 6
    for table, query, label in zip(tables, e, y, strict=True):
        alone = mha(built.weights, torch.tensor(table), torch.tensor(query[None]))[0, 0]
        assert abs(float(alone) - label) < 1e-5


def test_classes_need_fewer_heads_than_reals():
    E, e, words = normal(42, 3, 4), normal(42, 4, seed=1), np.array([*"abcd"])[np.arange(42) % 4]
    assert own_context_ceiling(2, 4, 4) == 40
    assert (memorize(E, e, words, heads=2, head_dim=4).predict(E, e) == words).all()
