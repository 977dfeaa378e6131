"""Each recipe by itself: what it meets, and where it ends."""

import math

import numpy as np
import pytest
import torch

from attnmem_yours import recipes
from attnmem_yours.data import as_data
from attnmem_yours.recipes import Effort

from layouts import normal, outputs


def silent(words):
    """Nobody listens."""


def posed(T=20, labels=None, mask=None, head_dim=2):
    """The problem of T examples of three tokens in four dimensions, and its data."""
    E, e = normal(T, 3, 4), normal(T, 4, seed=1)
    labels = normal(T, seed=2) if labels is None else labels
    examples = as_data(E, e, labels, mask)
    problem = recipes.posed(examples, torch.arange(T), examples.labels, head_dim, seed=0)
    return problem, E, e


def met(weights, E, e, y):
    y = y.reshape(len(e), -1)
    return int((np.abs(outputs(weights, E, e) - y).max(1) <= 1e-6 * np.abs(y).max()).sum())


def test_posed_takes_rows_in_the_dimensions_of_all():
    examples = as_data(normal(6, 3, 4), normal(6, 4, seed=1), normal(6))
    problem = recipes.posed(examples, torch.tensor([4, 1]), torch.ones(2, 1), 2, seed=0)
    assert len(problem.examples.queries) == len(problem.reduced.queries) == 2
    assert problem.examples.queries.equal(examples.queries[[4, 1]])
    assert problem.reduction.dimensions == (4, 4, 0)


@pytest.mark.parametrize(("T", "count"), [(4, 4), (5, 4)])
def test_theorem_is_used_up_to_its_number(T, count):
    problem, E, e = posed(T, normal(T, seed=2))
    weights = recipes.by_theorem(problem, 3)
    assert met(weights, E, e, normal(T, seed=2)) == count


def test_theorem_is_not_for_masked_or_dependent_data():
    mask = np.zeros((20, 3), bool)
    mask[7, 0] = True
    assert recipes.by_theorem(posed(mask=mask)[0], 3) is None
    problem, _, _ = posed()
    problem.examples.queries[1] = problem.examples.queries[0]
    assert recipes.by_theorem(problem, 19) is None


def test_zeros_are_met_by_zeros():
    """One label among forty; without the time for another attempt."""
    problem, _, _ = posed(40)
    heads, how = recipes.fit_output(problem, 1, torch.zeros(40).double(), Effort(9), silent)
    assert (how, heads.mu.any()) == (recipes.ZEROS, False)
    late = Effort(steps=1, until=-math.inf)
    y = torch.eye(40).double()[3]
    problem = problem._replace(head_dim=1)
    heads, how = recipes.fit_output(problem, 1, y, late, silent)
    assert how != recipes.ZEROS or not heads.mu.any()


def test_cancelling_heads_meet_all_of_their_rank():
    problem, E, e = posed(12)
    y = problem.examples.labels[:, 0]
    *_, last = recipes.by_cancelling(problem, 2, y)
    assert int((last.errors <= 1e-6).sum()) == 12
    weights = problem.reduction.maps.outward(last.heads).layer()
    assert (
        np.abs(np.abs(outputs(weights, E, e)[:, 0] - y.numpy()) - last.errors.numpy()).max() < 1e-9
    )


def test_descent_takes_fewer_and_spends_its_steps():
    problem, _, _ = posed(40)
    told, effort = [], Effort(steps=500)
    attempts = [*recipes.by_descent(problem, 1, problem.examples.labels[:, 0], effort, told.append)]
    counts = [int(line.split()[2]) for line in told]
    assert len(attempts) == len(counts)
    assert counts == sorted(counts, reverse=True)
    assert max(counts) == recipes.ceiling(problem, 1) == 16
    assert 0 <= effort.steps < 500
    assert int((attempts[-1].errors <= 1e-6).sum()) >= counts[-1] or not effort.steps


@pytest.mark.parametrize(("columns", "rank", "heads", "built"), [(9, 1, 3, 30), (2, 2, 5, 30)])
def test_columns_share_the_heads(columns, rank, heads, built):
    y = normal(30, rank, seed=5) @ normal(rank, columns, seed=3)
    problem, E, e = posed(30, y)
    weights, how = recipes.by_columns(problem, heads, Effort(2000), silent)
    assert met(weights, E, e, y) == built
    assert how in (recipes.DESCENT, recipes.CANCELLING)


def test_columns_beyond_the_heads_take_the_read_out():
    y = normal(30, 3, seed=5)
    problem, E, e = posed(30, y)
    assert recipes.by_columns(problem, 2, Effort(2000), silent) is None
    assert met(recipes.by_read_out(problem, 2), E, e, y) == 2 * 4


@pytest.mark.parametrize(("heads", "steps", "right"), [(1, 20, False), (3, 2000, True)])
def test_entropy_ends_when_all_classes_are_right(heads, steps, right):
    labels = [*"abcde"] * 8
    problem, E, e = posed(40, labels)
    weights = recipes.by_entropy(problem, heads, steps)
    answers = outputs(weights, E, e).argmax(1)
    assert (answers == problem.examples.labels.numpy()).all() == right


def test_affordable_steps_fall_with_the_examples():
    few, many = (recipes.affordable_steps(posed(T)[0], 400) for T in (20, 4000))
    assert few == 20_000
    assert 1 <= many < few


@pytest.mark.parametrize("labels", ["reals", "classes"])
def test_candidates_come_in_the_order_of_the_recipe(labels):
    problem, _, _ = posed(20, [*"ab"] * 10 if labels == "classes" else None)
    late = Effort(steps=1, until=-math.inf)
    names = [how for _, how in recipes.candidates(problem, 2, late, silent)]
    assert names[0] == recipes.THEOREM
    assert names[-1] == (recipes.ENTROPY if labels == "classes" else recipes.READ_OUT)
    assert len(names) == (2 if labels == "classes" else 3)
