"""Numbers of numpy are numbers of Python before any function checks them or computes with them."""

import importlib
import inspect
import pkgutil

import numpy as np
import pytest
import torch

import attnmem
from attnmem import (
    attention,
    bounds,
    constructions,
    descent,
    fitting,
    independence,
    recall,
    scaling,
    tasks,
)
from attnmem.attention.tangents import ScalarHeads
from attnmem.checks import checked_by
from attnmem.constructions import jacobians, sequences
from attnmem.training import single

DRAWN = torch.rand(3, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
EXAMPLES = E, e, y = DRAWN[0, :3], DRAWN[1, :4], DRAWN[2, :4, :1]
OWN = DRAWN[:2, :4].transpose(0, 1), e, y
PAIRS = torch.cartesian_prod(torch.arange(3), torch.arange(3))
TABLE = {"vocab": 3, "dim": 4, "head_dim": 2}
WIDE = {"head_dim": 2, "dim": 3}
ONE_HEAD = ScalarHeads(DRAWN[:1, :, :2], DRAWN[1:2, :, :2], DRAWN[2, :1])
TASK = PAIRS[None], PAIRS[None, :, 0]
HEADS = DRAWN[:2, :, :3], DRAWN[:2, :, 1:4]
MHA = attention.MHAWeights(*HEADS, DRAWN[:2, :, :1], DRAWN[0, :2], DRAWN[1, :, :1])
SIDES = [DRAWN[:2, :3]] * 3
AOT = attention.AoTWeights(DRAWN[0], DRAWN[0, :2], *SIDES, DRAWN[:2, :, :3], DRAWN[1])
HERE = "attnmem.independence", "attnmem.recall", "attnmem.descent", "attnmem.scaling"
SEEDED = [
    (constructions.memorize_aot, (PAIRS[:5], PAIRS[:5, 0]), TABLE | {"heads": 2}),
    (constructions.memorize_by_cancellation, OWN, {"heads": 2, "head_dim": 2}),
    (constructions.memorize_by_difference, OWN, {"heads": 2, "head_dim": 2}),
    (constructions.memorize_mha, EXAMPLES, {"heads": 2, "head_dim": 3}),
    (constructions.memorize_next_tokens, (PAIRS[:4], PAIRS[:4, 0]), TABLE | {"groups": [2]}),
    (constructions.random_mha, (2, 5, 3), {}),
    (descent.train_tiny, TASK, TABLE | {"heads": 1, "steps": 2}),
    (fitting.adam, (ONE_HEAD, *OWN[:2], y[:, 0]), {"steps": 2, "rate": float, "batch": 2}),
    (independence.certified_rank, (PAIRS,), {}),
    (independence.sampled_independence, (PAIRS, 2), {"samples": 9}),
    (independence.sampled_kruskal_rank, (PAIRS,), {"samples": 9}),
    (jacobians.cancelling_rank, (PAIRS, [2, 2]), WIDE),
    (jacobians.jacobian_rank, (PAIRS, 1), WIDE),
    (recall.draw, (3, 4), {}),
    (scaling.bootstrap, (np.mean, [[0.0], [1.0]]), {"draws": 9}),
    (sequences.dependent_subset, (PAIRS, 1), WIDE),
    (sequences.offered_rank, (PAIRS, 1), WIDE),
    (single.xavier, (2, 5, 3, 1), {}),
]


def _parts(result):
    """All numbers of a result, in order."""
    if isinstance(result, torch.Tensor):
        return result.tolist()
    if isinstance(result, (str, int, float, type(None))):
        return result
    return [_parts(part) for part in getattr(result, "__dict__", {}).values() or result]


@pytest.mark.parametrize("kind", [np.int64, np.uint8])
@pytest.mark.parametrize(("function", "arguments", "options"), SEEDED)
def test_a_seed_of_numpy_is_the_same_seed(function, arguments, options, kind):
    results = [function(*arguments, **options, seed=seed) for seed in (3, kind(3))]
    assert _parts(results[0]) == _parts(results[1])


@pytest.mark.parametrize("seed", [-1, 2**63, np.uint64(2**63), True, np.True_, 1.0, None])
@pytest.mark.parametrize(("function", "arguments", "options"), SEEDED)
def test_what_seeds_no_generator_is_refused_by_name(function, arguments, options, seed):
    with pytest.raises(ValueError, match=r"^seed: got "):
        function(*arguments, **options, seed=seed)


def test_bools_of_numpy_are_no_integers():
    with pytest.raises(ValueError, match="heads: got True; expected an integer"):
        bounds.affine_rank(np.True_, 3)
    g = torch.Generator()
    drawn = tasks.context_queries(g, 3, context=2, dim=5, shared=np.True_)
    assert drawn.contexts.shape == (2, 5)


def test_every_checked_function_with_a_seed_stands_among_them():
    marked, found = checked_by(lambda: None)(lambda: None).__code__, set()
    for place in pkgutil.walk_packages(attnmem.__path__, "attnmem."):
        if place.name.startswith(("attnmem.__main__", "attnmem.features")):  # these draw slowly
            continue
        for name, function in vars(importlib.import_module(place.name)).items():
            # A check may stand within another wrapper, such as that of on_cpu.
            inner = inspect.unwrap(function, stop=lambda f: getattr(f, "__code__", 0) is marked)
            if getattr(inner, "__code__", 0) is marked and function.__module__ == place.name:
                found |= {name} if "seed" in inspect.signature(inner).parameters else set()
    assert found == {function.__name__ for function, *_ in SEEDED}


PLACED = [
    *((f, a, {**o, "seed": 3}) for f, a, o in SEEDED if f.__module__.startswith(HERE)),
    (independence.numerical_rank, (PAIRS,), {}),
    (independence.numerical_rank, (DRAWN[:, :0],), {}),
    (independence.numerical_rank, (DRAWN[:, :1].float().expand(3, 2, 5),), {}),
    (independence.kruskal_rank, (PAIRS[1:4],), {}),
    (independence.kruskal_rank, (PAIRS[1:4],), {"method": "milp"}),
    (recall.trained, (recall.draw(5, 4, seed=0),), {"steps": 3}),
    (recall.recalled, (DRAWN[0, :4, :4], recall.draw(5, 4, seed=0)), {}),
    (descent.never_learned, TASK, TABLE | {"heads": 1, "rounds": 1, "steps": 2}),
    *((draw, (), {"vocab": 3, "count": 4}) for draw in (tasks.bigrams, tasks.associations)),
    (tasks.context_queries, (), {"examples": 3, "context": 2, "shared": True}),
    (tasks.context_queries, (), {"examples": 3, "context": 2, "shared": True, "classes": None}),
    (attention.mha, (MHA, DRAWN[2], DRAWN[1]), {}),
    (attention.mha_attention, (MHA, DRAWN[2], DRAWN[1]), {}),
    (attention.aot, (AOT, PAIRS), {}),
    (attention.aot_features, (AOT, PAIRS), {}),
]


@pytest.mark.parametrize(("function", "arguments", "options"), PLACED)
def test_results_do_not_depend_on_the_default_device(function, arguments, options):
    results = []
    for device in ("cpu", "meta"):
        drawn = options
        if "generator" in inspect.signature(function).parameters:
            drawn = options | {"generator": torch.Generator().manual_seed(0)}
        with torch.device(device):
            results.append(_parts(function(*arguments, **drawn)))
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        (np.uint8(200), 200),
        (np.array(200, np.int16), 200),
        (np.float16(0.5), 0.5),
        (np.array(0.5, np.float32), 0.5),
        ([np.int8(3), (np.uint64(2**63),)], [3, (2**63,)]),
        (True, True),
        (np.True_, True),
        (np.array(False), False),
        ({"d": np.int64(8), "pair": (np.uint8(1), "a")}, {"d": 8, "pair": (1, "a")}),
    ],
)
def test_check_and_function_are_given_numbers_of_python(given, seen):
    checked = []
    found = checked_by(lambda value: checked.append(value))(lambda value: [value])(given)
    assert repr(found) == repr(checked) == repr([seen])  # which names numpy's types


@pytest.mark.parametrize(
    "given", [torch.tensor(3), np.array([3]), np.array([True]), "3", None, (PAIRS,)]
)
def test_all_else_is_given_as_it_is(given):
    found = checked_by(lambda value: None)(lambda value: value)(given)
    assert found is given or found[0] is PAIRS
