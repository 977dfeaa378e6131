"""Dimensions, ranks and outputs of one layer against plain loops."""

import itertools

import numpy as np
import pytest
import torch

from attnmem.core import bounds
from attnmem.theory.tangents import ScalarHeads
from attnmem_yours import layer
from attnmem_yours.data import as_data

from layouts import LAYOUTS, free_rank, layouts, normal

datasets = pytest.importorskip("sklearn.datasets")


@pytest.mark.parametrize("name", LAYOUTS)
def test_dimensions_are_those_by_construction(name):
    E, e, mask, dimensions = layouts()[name]
    _, reduction = layer.reduced(as_data(E, e, mask=mask))
    assert reduction.dimensions == dimensions


@pytest.mark.parametrize("name", ["free", "masked in front", "shared, short", "two sums", "units"])
def test_outputs_of_reduced_examples_are_theirs(name):
    """A layer for the reduced examples, taken outward, computes the same."""
    E, e, mask, _ = layouts()[name]
    examples = as_data(E, e, mask=mask)
    reduced, reduction = layer.reduced(examples)
    heads = layer.draw(3, 2, reduced, reduction.dimensions, 1.0, seed=0)
    outer = layer.outputs(reduction.maps.outward(heads).layer(), examples)[:, 0]
    torch.testing.assert_close(layer.scalar_outputs(heads, reduced), outer)


def test_derivative_with_a_mask_is_that_of_autograd():
    mask = torch.arange(5) >= torch.tensor([5, 2, 3, 1])[:, None]
    reduced, reduction = layer.reduced(as_data(normal(4, 5, 3), normal(4, 3), mask=mask))
    heads = layer.draw(2, 2, reduced, reduction.dimensions, 1.0, seed=0)

    def outputs(*weights):
        return layer.scalar_outputs(ScalarHeads(*weights), reduced)

    blocks = torch.autograd.functional.jacobian(outputs, (*heads,))
    J = torch.cat([block.flatten(1) for block in blocks], 1)
    derivative = layer.derivative(heads, reduced)
    torch.testing.assert_close(derivative.gram(), J @ J.T)
    torch.testing.assert_close(derivative.outputs, outputs(*heads))


def test_free_rank_where_blunt_attention_hides_it():
    """Of two heads of width two on 569 patients and one context of 40 tokens."""
    table = datasets.load_breast_cancer().data
    queries = (table - table.mean(0)) / table.std(0)
    reduced, reduction = layer.reduced(as_data(normal(40, 30), queries))
    rank = layer.free_rank(2, 2, reduced, reduction.dimensions, 0)
    assert rank.rank == 2 * (2 * (30 + 30 - 2) + 30)


def test_free_rank_of_examples_hardly_apart():
    E, e = normal(12, 2, 3), normal(12, 3, seed=1)
    E[5], e[5] = E[2], e[2] + 1e-8 * normal(3, seed=2)
    reduced, reduction = layer.reduced(as_data(E, e))
    assert layer.free_rank(2, 3, reduced, reduction.dimensions, 0).rank == 12


@pytest.mark.parametrize("d_h", [1, 2, 5])
def test_ceiling_is_the_rank_of_small_dimensions(d_h):
    for m, q, c in itertools.product((0, 1, 2, 3), (1, 2, 3), (0, 1, 2)):
        if m + c == 0:
            continue
        d, T = max(m + c, q), 70
        E, e = np.zeros((T, 4, d)), np.zeros((T, d))
        E[..., :m] = normal(T, 4, m)
        E[..., m : m + c] = normal(T, 1, c, seed=1)
        e[:, :q] = normal(T, q, seed=2)
        E = E @ np.linalg.qr(normal(d, d, seed=3))[0]
        for heads in (1, 2):
            ceiling = heads * (min(d_h, m, q) * (m + q - min(d_h, m, q)) + m) + c
            assert bounds.context_ceiling(heads, d_h, m, q, c) == ceiling
            assert free_rank(heads, E, e, d_h) == min(T, ceiling)


@pytest.mark.parametrize(("T", "rows"), [(12_000, 12_000), (12_001, 31 + 3 + 50)])
def test_enough_rows_of_very_many(T, rows):
    chosen = layer.enough_rows(T, 31, seed=0)
    assert len(chosen) == len({*chosen.tolist()}) == rows
    assert int(chosen.max()) < T
