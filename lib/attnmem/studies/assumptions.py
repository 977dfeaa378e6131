"""Mahdavi et al.'s assumptions on the features of real models: which tests, and what they found.

:func:`checks` lists the tests of a study at a tier (:mod:`attnmem.studies.cases`), each of which
becomes a row.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from .. import features, store
from ..checks import refuse
from ..features import Seen
from ..independence import numerical_rank, sampled_independence
from ..store import Check, Finding, Row
from .cases import CASES, SEED, Case
from .study import Study, Unit, origin

DTYPES = {"float32": torch.float32, "float64": torch.float64}
DRAWS, STEPS = 5, 3000  # draws of random labels, and steps to meet them
HEADS = 4  # of the attention layer that reads the features for them
RANKED = 20  # subsets of which the rank itself is computed, not only whether it is full
TIERS = ("published", "shipped", "trained")  # those that repeat the published tests


class AssumptionTests(Study):
    """The tests of the assumptions on one kind of model, at each tier of its cases.

    In its table ``test`` is ``A1``, ``A2``, ``A3``, ``GP`` (general position), ``GP of A3`` (of the
    vectors of Assumption 3), ``positions``, ``labels``, or ``curve`` for further sizes; ``share``
    the share of the samples that were independent; ``ranks`` from the least to the largest.
    """

    kind = "tests of linear independence"
    config = Check
    default_profile = "shipped"
    profiles = (*TIERS, "deeper", "quick")

    @override
    def perform(self, unit: Unit, device: str) -> list[Row]:
        rows = []
        for check in unit:
            seen = collect(self.name, check.profile, check.dtype, device)
            rows.append((check, perform(seen[check.map], check)))
        return rows

    @override
    def say(self, rows: Sequence[Row]) -> str:
        check, finding = rows[-1]
        what = f"{check.map}, {check.dtype}: {check.vectors}, size {check.size}"
        return f"{check.experiment}, {what}, {finding.dependent} of {check.samples} dependent"

    def _listed(self, profile: str) -> list[Check]:
        return checks(self.name, profile)

    @override
    def table(self, rows: Iterable[Row]) -> pd.DataFrame:
        table = super().table(rows)
        tests = [_test(row) for row in table.itertuples()]
        ranks = table.least_rank.astype(str) + " to " + table.most_rank.astype(str)
        return table.assign(test=tests, share=1 - table.dependent / table.samples, ranks=ranks)


TABLES = {
    "assumptions-bert": "Table 3, BERT",
    "assumptions-gpt2": "Table 3, GPT-2",
    "assumptions-vision": "Table 1",
}
TESTS = {name: AssumptionTests(name, "mahdavi", what) for name, what in TABLES.items()}


def _case(name: str, tier: str) -> Case:
    if name not in CASES:
        refuse("name", repr(name), f"one of {', '.join(CASES)}")
    if tier not in CASES[name]:
        refuse("tier", repr(tier), f"one of {', '.join(CASES[name])} for {name}")
    return CASES[name][tier]


def checks(name: str, tier: str) -> list[Check]:
    """All tests of a study at a tier, in both precisions.

    Of every map: Assumption 1 (queries, size ``n``), Assumption 2 (contexts) and general position
    (queries, size ``d``). Of the embeddings: Assumption 3 (relaxed) and its general position. Of
    the maps in ``curves``: the queries at every further size. Of the position tables: their rank.
    Of every map that heads read: random labels.
    """
    case = _case(name, tier)
    many, few = case.samples
    listed = []
    for dtype in DTYPES:
        for map_ in case.maps:
            tests = [("queries", case.n, many), ("contexts", case.n, case.T)]
            tests += [("queries", case.d, few)]
            tests += [("labels", size, DRAWS) for size in case.labels]
            if map_.endswith("L0"):
                tests += [("relaxed", case.n, many), ("relaxed", case.d, few)]
                tests += [("positions", case.n, 1)] * case.positions
            if map_ in case.curves:
                tests += [("queries", size, few) for size in case.sizes]
            of_map = {"source": case.source, "architecture": case.architecture, "map": map_}
            of_map |= {"dtype": dtype, "T": case.T, "n": case.n, "d": case.d}
            for vectors, size, samples in tests:
                test = {"vectors": vectors, "size": size, "samples": samples, "seed": SEED}
                listed.append(Check(experiment=name, profile=tier, **of_map, **test))
    return listed


def _test(row: Any) -> str:
    if row.vectors in ("positions", "labels"):
        return row.vectors
    if row.vectors == "contexts":
        return "A2"
    few, many = {"queries": ("A1", "GP"), "relaxed": ("A3", "GP of A3")}[row.vectors]
    return {row.n: few, row.d: many}.get(row.size, "curve")


def curve(rows: pd.DataFrame, map_: str) -> dict[str, tuple[pd.Series, pd.Series]]:
    """Of one map in some tests, the share of the sets of queries that is independent, by size.

    For each precision there are the sizes in rising order and the shares at them.
    """
    of_map = rows[(rows["map"] == map_) & (rows.vectors == "queries")].sort_values("size")
    return {dtype: (part["size"], part.share) for dtype, part in of_map.groupby("dtype")}


def kruskal_estimate(rows: pd.DataFrame) -> int:
    """The largest size of which 99% of the sets of queries are independent, or 0.

    ``rows`` are tests of one map in one precision.
    """
    passed = rows[(rows.vectors == "queries") & (rows.share >= 0.99)]
    return max(passed["size"], default=0)


def by_precision(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """A column of some tests, such as ``share`` or ``ranks``, with the two precisions side by side.

    It has a line for each test and map but curves and labels, and a column for each precision.
    """
    tests = rows[~rows.test.isin(["curve", "labels"])]  # of which there is one size
    return tests.pivot(index=["test", "map"], columns="dtype", values=column)


def by_tier(name: str, column: str) -> pd.DataFrame:
    """The same of the tests at each of the :data:`TIERS` that has rows, side by side.

    It has a column for each tier and precision.
    """
    rows = {tier: TESTS[name].table(store.known(name, tier).values()) for tier in TIERS}
    columns = {tier: by_precision(tests, column) for tier, tests in rows.items() if len(tests)}
    return pd.concat(columns, axis=1).sort_index()


def beside_paper(ours: pd.DataFrame, paper: pd.Series) -> pd.DataFrame:
    """Our numbers (:func:`by_tier`) with the paper's in the column ``paper``.

    Those are in float32, with the same index. What is missing is an empty string.
    """
    both = ours.copy()
    both["paper", "float32"] = paper
    return both[sorted(both)].astype(object).fillna("")


def coverage(name: str) -> pd.DataFrame:
    """How many tests of each of the :data:`TIERS` are done, and of how many."""
    have = {tier: [len(store.known(name, tier)), len(checks(name, tier))] for tier in TIERS}
    return pd.DataFrame(have, index=["tests done", "of"]).T


def collect(name: str, tier: str, dtype: str, device: str = "cpu") -> dict[str, Seen]:
    """The features of each map that the tests of a tier look at.

    Args:
        name: A key of ``CASES``.
        tier: One of its tiers.
        dtype: ``float32`` or ``float64``.
        device: Where they are computed.

    Raises:
        ValueError: There is no such case or precision, or the data have another number of examples.
        ConnectionError: The tier needs a hub that cannot be reached.
    """
    case = _case(name, tier)
    if dtype not in DTYPES:
        refuse("dtype", repr(dtype), f"one of {', '.join(DTYPES)}")
    return _collected(case, dtype, device)


@functools.lru_cache(maxsize=1)  # kept for the next test of the same features
def _collected(case: Case, dtype: str, device: str) -> dict[str, Seen]:
    options = {"dtype": DTYPES[dtype], "device": device, "depth": case.depth}
    random = case.random(**options)
    trained = case.trained(**options) if case.trained else None
    maps = features.feature_maps(random, trained, seed=SEED if case.attention else None)
    heads = HEADS if case.labels else 0
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # a GPU's convolutions
        seen = features.collect(maps, case.batches(), query=random.query, heads=heads, seed=SEED)
    for of_map in seen.values():
        if len(of_map.queries) != case.T:
            refuse("source", f"{len(of_map.queries)} examples of {case.source}", f"{case.T}")
    for map_, encoder in {"random L0": random, "trained L0": trained}.items():
        if encoder:
            seen[map_] = seen[map_]._replace(positions=encoder.positions[: case.n])
    return seen


def perform(seen: Seen, check: Check) -> Finding:
    """Test one assumption on the features of its map, which are computed already."""
    start = time.perf_counter()
    if check.vectors in ("contexts", "labels"):
        ranks = seen.ranks if check.vectors == "contexts" else labels_met(seen.heads, check)
        dependent = int((ranks < check.size).sum())
    else:
        vectors = getattr(seen, check.vectors)
        sampled = sampled_independence(vectors, check.size, samples=check.samples, seed=check.seed)
        dependent, ranks = sampled.dependent, _some_ranks(vectors, check)
    return Finding(
        dependent=dependent,
        ranked=len(ranks),
        least_rank=int(ranks.min()),
        most_rank=int(ranks.max()),
        **origin(time.perf_counter() - start, next(iter(seen)).device),
    )


def labels_met(read: Float[Tensor, "T k"], check: Check) -> Int[Tensor, " samples"]:
    """How many of ``size`` random binary labels a trained linear read-out meets, for each draw.

    A logistic loss on the first ``size`` examples, coordinates scaled alike, all draws at once:
    full-batch Adam at a rate of 0.03 for ``STEPS`` steps.

    Args:
        read: What the read-out sees of each example, at least ``size`` rows.
        check: The test, which has the size, the number of draws and their seed.

    Returns:
        Numbers from 0 to ``size``, one for each draw.
    """
    x = read[: check.size]
    x = (x - x.mean(dim=0)) / x.std()
    g = torch.Generator().manual_seed(check.seed)
    signs = torch.randint(2, (check.size, check.samples), generator=g).to(x) * 2 - 1
    weights = x.new_zeros(x.shape[1], check.samples, requires_grad=True)
    bias = x.new_zeros(check.samples, requires_grad=True)
    optimizer = torch.optim.Adam([weights, bias], lr=0.03)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.softplus(-signs * (x @ weights + bias)).sum().backward()
        optimizer.step()
    return (signs * (x @ weights + bias) > 0).sum(dim=0).detach()


def _some_ranks(vectors: Tensor, check: Check) -> Tensor:
    g = torch.Generator().manual_seed(check.seed + 1)
    subsets = [torch.randperm(len(vectors), generator=g)[: check.size] for _ in range(RANKED)]
    return torch.tensor([numerical_rank(vectors[subset]) for subset in subsets])
