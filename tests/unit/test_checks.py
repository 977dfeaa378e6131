"""Numbers of numpy are numbers of Python before any function checks them or computes with them."""

import importlib
import inspect
import pkgutil
import re
import typing
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
import pytest
import torch
from jaxtyping import Float, Int

import attnmem
from attnmem.checks import Range, Seed, checked, refuse
from attnmem.core import memorize, sequences
from attnmem.theory import (
    associations,
    cancelling,
    depth,
    fitting,
    impossible,
    independence,
    scalars,
    sequence_ranks,
    tiny,
)
from attnmem.theory.tangents import ScalarHeads

DRAWN = torch.rand(3, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
PAIRS = torch.cartesian_prod(torch.arange(3), torch.arange(3))
TABLE = {"vocab": 3, "dim": 4, "head_dim": 2}
TASK = PAIRS[None], PAIRS[None, :, 0]
HEADS = DRAWN[:2, :, :3], DRAWN[:2, :, 1:4]
MHA = attnmem.MHAWeights(*HEADS, DRAWN[:2, :, :1], DRAWN[0, :2], DRAWN[1, :, :1])
SIDES = [DRAWN[:2, :3]] * 3
AOT = attnmem.AoTWeights(DRAWN[0], DRAWN[0, :2], *SIDES, DRAWN[:2, :, :3], DRAWN[1])
TASK_OF_REALS = DRAWN[0, :3], DRAWN[1, :4], DRAWN[2, :4, 0]
START = ScalarHeads(DRAWN[:2, :, :2], DRAWN[1:, :, :2], DRAWN[:2, 0])
DEEP = {"heads": (1, 1), "head_dim": 1, "value_dim": 1, "seed": 0}
SEEDED = [
    (attnmem.memorize_mha, (DRAWN[0, :3], DRAWN[1, :4], DRAWN[2, :4]), {"heads": 2, "head_dim": 3}),
    (attnmem.random_mha, (2, 5, 3), {}),
    (attnmem.memorize_aot, (PAIRS[:5], PAIRS[:5, 0]), TABLE | {"heads": 2}),
    (sequence_ranks.offered_rank, (PAIRS, 1), {"head_dim": 2, "dim": 3}),
    (independence.sampled_independence, (PAIRS, 2), {"samples": 9}),
    (tiny.random_facts, (3, 4), {}),
    (tiny.train_tiny, TASK, TABLE | {"heads": 1, "steps": 2}),
]


def _parts(result):
    """All numbers of a result, in order."""
    if isinstance(result, torch.Tensor):
        return result.tolist()
    if isinstance(result, (str, int, float, type(None))):
        return result
    return [_parts(part) for part in getattr(result, "__dict__", {}).values() or result]


@pytest.mark.parametrize("kind", [np.int64, np.uint8])
def test_seed_of_numpy_is_the_same_seed(kind):
    seeds = 3, kind(3)
    one, other = (attnmem.random_mha(2, 5, 3, seed=seed) for seed in seeds)
    assert _parts(one) == _parts(other)


@pytest.mark.parametrize("seed", [-1, 2**63, np.uint64(2**63), True, np.True_, 1.0, None])
def test_seed_that_no_generator_takes_is_refused(seed):
    with pytest.raises(ValueError, match=r"^seed: got "):
        attnmem.random_mha(2, 5, 3, seed=seed)


def test_seed_is_checked_by_every_function():
    """Each is annotated as that of the two tests above is."""
    marked = checked(lambda: None).__code__
    for place in pkgutil.walk_packages(attnmem.__path__, "attnmem."):
        if "__main__" not in place.name:
            for name, function in vars(importlib.import_module(place.name)).items():
                # A check may stand within another wrapper, such as that of on_cpu.
                inner = inspect.unwrap(function, stop=lambda f: getattr(f, "__code__", 0) is marked)
                if getattr(inner, "__code__", 0) is marked:
                    kind = typing.get_type_hints(inner, include_extras=True).get("seed", Seed)
                    assert Seed.__metadata__[0] in kind.__metadata__, name


PLACED = [
    *((f, a, {**o, "seed": 3}) for f, a, o in SEEDED),
    (independence.numerical_rank, (PAIRS,), {}),
    (independence.numerical_rank, (DRAWN[:, :0],), {}),
    (independence.numerical_rank, (DRAWN[:, :1].float().expand(3, 2, 5),), {}),
    (independence.kruskal_rank, (PAIRS[1:4],), {}),
    (tiny.trained_matrix, (tiny.random_facts(5, 4, seed=0),), {"steps": 3}),
    (tiny.recalled, (DRAWN[0, :4, :4], tiny.random_facts(5, 4, seed=0)), {}),
    (attnmem.mha, (MHA, DRAWN[2], DRAWN[1]), {}),
    (attnmem.mha_attention, (MHA, DRAWN[2], DRAWN[1]), {}),
    (attnmem.aot, (AOT, PAIRS), {}),
    (attnmem.aot_features, (AOT, PAIRS), {}),
    (memorize.serve, (6, 2), {}),
    (cancelling.memorize_by_difference, TASK_OF_REALS, {"heads": 2, "head_dim": 2, "seed": 0}),
    (cancelling.memorize_by_cancellation, TASK_OF_REALS, {"heads": 2, "head_dim": 2, "seed": 0}),
    (scalars.memorize_scalars, TASK_OF_REALS, {"heads": 1}),
    (depth.memorize_by_depth, (DRAWN, DRAWN[0, 0, :3]), DEEP),
    (
        associations.memorize_next_tokens,
        (PAIRS, PAIRS.sum(1) % 3),
        TABLE | {"groups": (2, 2), "seed": 0},
    ),
    (impossible.every_parity, (2,), {}),
    (impossible.parity_by_heads, (3,), {}),
    (sequences.circle, (5,), {}),
    (sequences.spread_tokens, (5, 3, 0), {}),
    (impossible.impossible_subset, (*impossible.every_parity(2), 1), {}),
    (sequence_ranks.dependent_subset, (PAIRS, 1, 2, 2), {}),
    (sequence_ranks.jacobian_rank, (PAIRS, 1, 2, 2), {}),
    (sequence_ranks.cancelling_rank, (PAIRS, (2,), 2, 2), {}),
    (fitting.levenberg_marquardt, (START, *TASK_OF_REALS), {"steps": 2}),
    (fitting.lbfgs, (START, *TASK_OF_REALS), {"steps": 2}),
    (fitting.adam, (START, *TASK_OF_REALS), {"steps": 2, "batch": 3, "rate": lambda _: 0.1}),
    (fitting.limits, (START, *TASK_OF_REALS), {}),
]


@pytest.mark.parametrize(
    ("function", "arguments", "options"),
    [pytest.param(*row, id=f"{row[0].__name__}-{number}") for number, row in enumerate(PLACED)],
)
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
def test_checks_and_functions_get_numbers_of_python(given, seen):
    relations = []
    result = checked(lambda value: [value], also=lambda value: relations.append(value))(given)
    assert repr(result) == repr(relations) == repr([seen])  # which names numpy's types


@pytest.mark.parametrize("given", [torch.tensor(3), np.array([3]), "3", None, (PAIRS,)])
def test_all_else_is_given_as_it_is(given):
    result = checked(lambda value: value)(given)
    assert result is given or result[0] is PAIRS


def _names_too_many_heads(heads, dim):
    if heads > 3 * dim:
        refuse("heads", heads, "at most three times dim")


@checked(also=_names_too_many_heads)
def layer(
    contexts: Float[torch.Tensor, "T n d"] | Float[torch.Tensor, "n d"],
    queries: Float[torch.Tensor, "T d"],
    tokens: Int[torch.Tensor, " T"] | None = None,
    *,
    heads: int = 1,
    dim: Annotated[int, Range(1, "heads")] = 1,
    share: Annotated[float, Range(0, 1)] = 0.5,
    seed: Seed = 0,
    skip: bool = False,
    groups: Sequence[int] = (1,),
    how: Literal["lm", "adam"] = "lm",
):
    return heads


@checked
def weighted(weights: attnmem.MHAWeights, query: Float[torch.Tensor, "*data B d"]):
    return query.shape


@pytest.mark.parametrize("dim", [0, "4", None])
def test_an_argument_that_bounds_is_checked_first(dim):
    @checked
    def width(head_dim: Annotated[int, Range(1, "dim")], dim: int):
        return head_dim

    with pytest.raises(ValueError, match=f"^dim: got {dim!r}; expected an integer"):
        width(1, dim)
    assert width(4, 4) == 4


OWN_CONTEXTS, QUERIES = DRAWN[:2, :4].transpose(0, 1), DRAWN[1, :4]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 0}, "heads: got 0; expected an integer of at least 1"),
        ({"heads": 2.0}, "heads: got 2.0; expected an integer"),
        ({"heads": None}, "heads: got None; expected an integer"),
        ({"heads": np.True_}, "heads: got True; expected an integer"),
        ({"heads": 4}, "heads: got 4; expected at most three times dim"),
        ({"dim": 2}, "dim: got 2; expected an integer of at least 1 and at most 1"),
        ({"share": 1.01}, "share: got 1.01; expected a number from 0 to 1"),
        ({"share": float("nan")}, "share: got nan; expected a number from 0 to 1"),
        ({"share": "half"}, "share: got 'half'; expected a number"),
        ({"skip": 1}, "skip: got 1; expected True or False"),
        ({"groups": [2, 0]}, "groups[1]: got 0; expected an integer of at least 1"),
        ({"groups": 2}, "groups: got 2; expected a sequence of integers"),
        ({"how": "sgd"}, "how: got 'sgd'; expected one of lm, adam"),
        ({"queries": 3}, "queries: got int; expected a torch.Tensor of shape (T, d)"),
        ({"queries": QUERIES[0]}, "queries: got shape (5,); expected shape (T, d)"),
        ({"queries": QUERIES[:3]}, "queries: got T = 3 (shape (3, 5)); expected T = 4"),
        ({"contexts": OWN_CONTEXTS[None]}, "contexts: got shape (1, 4, 2, 5); expected shape"),
        ({"contexts": OWN_CONTEXTS.half()}, "contexts: got dtype torch.float16; expected"),
        ({"tokens": torch.zeros(4)}, "tokens: got dtype torch.float32; expected torch.int64"),
    ],
)
def test_an_argument_not_as_annotated_is_refused(changes, message):
    arguments = {"contexts": OWN_CONTEXTS, "queries": QUERIES} | changes
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        layer(**arguments)


def test_the_ends_of_ranges_are_accepted():
    whole = {"tokens": torch.arange(4), "groups": (1, 2), "how": "adam", "skip": np.True_}
    for share in (0, 1, np.float32(0.5)):
        assert layer(OWN_CONTEXTS, QUERIES, heads=np.int8(3), share=share, **whole) == 3
    assert layer(OWN_CONTEXTS[0], QUERIES.float(), seed=2**63 - 1) == 1


@pytest.mark.parametrize(
    ("field", "tensor", "message"),
    [
        ("W_K", DRAWN[:2, :4, 1:4], "weights.W_K: got d = 4"),
        ("W_V", DRAWN[None, :2, :, :1], "weights.W_V: got shape (1, 2, 5, 1); expected shape"),
        ("W_O", DRAWN[0, :3], "weights.W_O: got H*d_v = 3 (shape (3, 5)); expected H*d_v = 2"),
        ("W_D", DRAWN[1, :, :1].half(), "weights.W_D: got dtype torch.float16; expected"),
        ("W_Q", None, "weights.W_Q: got NoneType; expected a torch.Tensor of shape (*runs, H, d"),
    ],
)
def test_a_weight_that_does_not_fit_is_refused(field, tensor, message):
    assert weighted(MHA, QUERIES) == (4, 5)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        weighted(MHA._replace(**{field: tensor}), QUERIES)
    with pytest.raises(ValueError, match=r"query: got d = 4 .*expected d = 5, as in weights.W_Q"):
        weighted(MHA, QUERIES[:, :4])
