"""Mahdavi et al.'s assumptions on the features of real models: which tests, and what they found.

``assumptions.toml`` lists the cases of each study by tier: ``published`` are the paper's models and
data, which need a hub; ``shipped`` random models of the same size on what lies on every machine;
``trained`` small models that are trained here first; ``pretrained`` what Python packages carry (the
extra ``pretrained``); ``quick`` a tiny model, a smoke test.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from ..checks import checked, reading, refuse
from ..features import corpora, encoders, hub, pretrained
from ..features.encoders import Seen
from ..theory.independence import numerical_rank, sampled_independence
from . import store
from .store import Check, Finding, HubCheck, HubFinding, Row, Rows
from .study import ALL, ByName, Place, Selection, Study, Unit
from .training import origin

SEED = 0
TIERS = ("published", "shipped", "trained", "pretrained")  # those that repeat the published tests
_RANKED = 20  # subsets of which the rank itself is computed, not only whether it is full


def _pairs_of(text: Callable[[], str], count: int, length: int) -> Iterable[corpora.Inputs]:
    return corpora.distinct_passages(text(), pretrained.packaged_bert(), count, length=length)


_READERS: dict[str, Callable[..., Iterable[corpora.Inputs]]] = {
    "published_images": corpora.published_images,
    "published_texts": corpora.published_texts,
    "photograph_crops": partial(corpora.photograph_crops, seed=SEED),
    "nature_crops": partial(corpora.photograph_crops, seed=SEED, source=corpora.nature),
    "digits": lambda batch: corpora.digits()[0].split(batch),
    "enlarged_digits": lambda: corpora.enlarged(corpora.digits()[0]),
    "enlarged_clothes": lambda count: corpora.enlarged(corpora.clothes()[:count]),
    "library_passages": partial(corpora.library_passages, seed=SEED),
    "library": partial(_pairs_of, lambda: corpora.library_text().decode()),
    "manual": partial(_pairs_of, corpora.manual),
}


@dataclass(frozen=True, eq=False)  # each is itself, as a key of a cache
class Case:
    """A model and its data: a table of ``assumptions.toml``, which explains each field."""

    source: str
    architecture: str
    T: int
    n: int
    d: int
    data: Mapping[str, Any]
    samples: Sequence[int]
    random: bool = True
    trained: str | None = None
    least: float | None = None
    sizes: Sequence[int] | None = None
    curves: Sequence[str] = ()
    positions: bool = False
    depth: int = 1
    also: tuple[Case, ...] = ()

    @property
    def maps(self) -> list[str]:
        """Names of the feature maps, as ``collect`` of the features gives them."""
        names = []
        if self.random:
            names += [f"random L{layer}" for layer in range(self.depth + 1)]
        if "random attention" in self.curves:
            names.append("random attention")
        if self.trained:
            names += [f"trained L{layer}" for layer in range(self.depth + 1)]
        return names

    @property
    def on_hub(self) -> bool:
        """Whether its data and its trained weights lie on a hub."""
        return "files" in self.data

    def fetched(self) -> dict[str, hub.Fetched]:
        """What it has from a hub; that which may need an agreement comes first."""
        if not self.on_hub:
            return {}
        parts = {"data": hub.dataset(self.data["source"], self.data["files"])}
        if "tokenizer" in self.data:
            parts["tokenizer"] = hub.model(self.data["tokenizer"])
        return parts | {"weights": hub.model(self.trained)}

    def origins(self) -> dict[str, str]:
        """What rows say of it: names, commits, and digests of the large files."""
        parts = self.fetched()
        data = str(parts["data"])
        if "tokenizer" in parts:
            data += f" read by {parts['tokenizer'].name}@{parts['tokenizer'].commit}"
        return {"data": data, "weights": str(parts["weights"])}

    def batches(self) -> Iterable[corpora.Inputs]:
        """The examples, as the model reads them."""
        options = {name: value for name, value in self.data.items() if name != "reader"}
        parts = self.fetched()
        if self.on_hub:
            del options["source"]
            options["files"] = [parts["data"].folder / path for path in parts["data"].digests]
        if "tokenizer" in parts:
            options["tokenizer"] = str(parts["tokenizer"].folder)
        inputs = _READERS[self.data["reader"]](**options)
        family, _ = encoders.ARCHITECTURES[self.architecture]
        return map(corpora.standardized, inputs) if family == "dinov2" else inputs

    def weights(self) -> str:
        """The folder of the trained weights."""
        if self.on_hub:
            return str(self.fetched()["weights"].folder)
        make = getattr(pretrained, self.trained)
        return make() if self.least is None else _trained_here(make, self.least)

    def tests(self, map_: str) -> list[tuple[str, int, int]]:
        """Of one of the maps the vectors, the sizes and the number of samples of each test."""
        of_n, of_d = self.samples  # subsets of n vectors, and of d or another size
        tests = [("queries", self.n, of_n), ("contexts", self.n, self.T), ("queries", self.d, of_d)]
        if map_.endswith("L0"):
            tests += [("relaxed", self.n, of_n), ("relaxed", self.d, of_d)]
            if self.positions:
                tests.append(("positions", self.n, 1))
        if map_ in self.curves:
            tests += [("queries", size, of_d) for size in self.sizes or ()]
        return tests


@functools.cache
def _trained_here(train: Callable[..., float], least: float) -> str:
    """The folder of a model that is trained here, once a process; refused below ``least``."""
    folder = tempfile.mkdtemp(prefix="attnmem-")
    reached = train(folder, seed=SEED)
    if reached < least:
        refuse(train.__name__, f"{reached:.4f} on data held out", f"at least {least}")
    return folder


@dataclass(frozen=True, eq=False)
class AssumptionTests(Study):
    """The tests of the assumptions on one kind of model, at each of its ``tiers``.

    In its table ``test`` is ``A1``, ``A2``, ``A3``, ``GP`` (general position), ``GP of A3``,
    ``positions``, or ``curve`` for further sizes; ``share`` is that of the samples that
    were independent, ``ranks`` from the least to the largest.
    """

    tiers: dict[str, Case]

    kind = "tests of linear independence"
    config = Check
    default_profile = "shipped"

    @property
    def profiles(self) -> tuple[str, ...]:  # not every model has every tier
        return (*self.tiers,)

    def configs(self, profile: str, selection: Selection = ALL) -> list[Check]:
        super().configs(profile, selection)
        checks = []
        for case in (self.tiers[profile], *self.tiers[profile].also):
            kind = HubCheck if case.on_hub else Check
            data = {field: getattr(case, field) for field in ("source", "architecture", *"Tnd")}
            for dtype, map_ in itertools.product(("float32", "float64"), case.maps):
                data |= {"map": map_, "dtype": dtype}
                for vectors, size, samples in case.tests(map_):
                    test = {"vectors": vectors, "size": size, "samples": samples}
                    checks.append(kind(self.name, profile, seed=SEED, **data, **test))
        return checks

    def units(self, profile: str, selection: Selection, rows: Rows, place: Place) -> list[Unit]:
        """What is missing. All that it takes from a hub is fetched now, before any computation."""
        units, case = [*super().units(profile, selection, rows, place)], self.tiers[profile]
        if units and case.on_hub:
            origins = case.origins()
            for _, finding in rows.values():
                stored = {name: getattr(finding, name) or now for name, now in origins.items()}
                if stored != origins:
                    refuse("rows", f"some of {stored}", f"the same files as now, {origins}")
        return units

    def perform(self, unit: Unit, device: str, root: Path | None = None) -> list[Row]:
        store.commit()
        rows = []
        for check in unit:
            tier = self.tiers[check.profile]
            [case] = [case for case in (tier, *tier.also) if case.source == check.source]
            features = features_of(case, check.dtype, device)[check.map]
            finding = independence(features, check)
            if case.on_hub:
                origins = case.origins()
                if not check.map.startswith("trained"):
                    del origins["weights"]
                finding = HubFinding(**vars(finding), **origins)
            rows.append((check, finding))
        return rows

    def say(self, rows: Sequence[Row]) -> str:
        check, finding = rows[-1]
        test = f"{check.map}, {check.dtype}: {check.vectors}, size {check.size}"
        return f"{check.experiment}, {test}, {finding.dependent} of {check.samples} dependent"

    def table(self, rows: Iterable[Row]) -> pd.DataFrame:
        table = super().table(rows)
        ranks = table.least_rank.astype(str) + " to " + table.most_rank.astype(str)
        share = 1 - table.dependent / table.samples
        return table.assign(test=[*map(_test, table.itertuples())], share=share, ranks=ranks)


def _test(row: Any) -> str:
    """The name of a test: the paper's assumption, or what the vectors are."""
    if row.vectors == "contexts":
        return "A2"
    if row.vectors == "positions":
        return "positions"
    at_n, at_d = {"queries": ("A1", "GP"), "relaxed": ("A3", "GP of A3")}[row.vectors]
    if row.size == row.d:
        return at_d
    return at_n if row.size == row.n else "curve"


@functools.lru_cache(maxsize=1)  # kept for the next test of the same features
def features_of(case: Case, dtype: str, device: str) -> dict[str, Seen]:
    """The features of all maps of a case."""
    options = {"dtype": getattr(torch, dtype), "device": device, "depth": case.depth}
    random = trained = None
    if case.random:
        random = encoders.random_encoder(case.architecture, seed=SEED, **options)
    if case.trained:
        trained = encoders.trained_encoder(case.weights(), **options)
        encoders.check_architecture(trained, case.architecture)
    attention = "random attention" in case.curves
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # a GPU's convolutions
        inputs = case.batches()
        features = encoders.collect(inputs, random, trained, attention=attention, seed=SEED)
    for of_map in features.values():
        count, d = of_map.queries.shape
        if count != case.T:
            refuse("source", f"{count} examples of {case.source}", f"{case.T}")
        n = case.n if of_map.positions is None else len(of_map.positions)
        if (n, d) != (case.n, case.d):
            refuse("source", f"{n} tokens of dimension {d}", f"{case.n} of dimension {case.d}")
    return features


def independence(features: Seen, check: Check) -> Finding:
    """Test one assumption on the features of its map, which are computed already."""
    start = time.perf_counter()
    if check.vectors == "contexts":
        ranks, dependent = features.ranks, int((features.ranks < check.size).sum())
    else:
        vectors = getattr(features, check.vectors)
        sampled = sampled_independence(vectors, check.size, samples=check.samples, seed=check.seed)
        g, dependent = torch.Generator().manual_seed(check.seed + 1), sampled.dependent
        subsets = [torch.randperm(len(vectors), generator=g)[: check.size] for _ in range(_RANKED)]
        ranks = torch.tensor([numerical_rank(vectors[subset]) for subset in subsets])
    return Finding(
        dependent=dependent,
        ranked=len(ranks),
        least_rank=int(ranks.min()),
        most_rank=int(ranks.max()),
        **origin(time.perf_counter() - start, next(iter(features)).device),
    )


def _case(where: str, table: dict[str, Any]) -> Case:
    further = tuple(_case(f"{where}.also", table | other) for other in table.pop("also", ()))
    with reading(where, "a case of a known architecture and reader"):
        case = checked(Case)(**table, also=further)
        _ = encoders.ARCHITECTURES[case.architecture], _READERS[case.data["reader"]]
        if case.trained and not case.on_hub:
            getattr(pretrained, case.trained)
    return case


def studies_in(text: str) -> ByName:
    """The studies that a file such as ``assumptions.toml`` describes; a bad case is refused."""
    studies = ByName()
    for name, tables in tomllib.loads(text).items():
        title = tables.pop("what")
        tiers = {tier: _case(f"{name}.{tier}", table) for tier, table in tables.items()}
        studies[name] = AssumptionTests(name, "mahdavi", title, tiers)
    return studies


_TABLES = resources.files(__package__).joinpath("assumptions.toml").read_text("utf-8")
TESTS: dict[str, AssumptionTests] = studies_in(_TABLES)


# --- tables ---------------------------------------------------------------------------------------


def curve(rows: pd.DataFrame, map_: str) -> dict[str, tuple[pd.Series, pd.Series]]:
    """Of one map, for each precision, the sizes of sets of queries and their independent share."""
    of_map = rows[(rows["map"] == map_) & (rows.vectors == "queries")].sort_values("size")
    return {dtype: (lines["size"], lines.share) for dtype, lines in of_map.groupby("dtype")}


def published(name: str) -> pd.DataFrame:
    """The rows of a study's published tier once all are there, and none before.

    Only rows of its own sizes count, so those of a smaller model are none.
    """
    study, rows = TESTS[name], store.known(name, "published")
    keys = [check.key for check in study.configs("published")]
    whole = all(key in rows for key in keys)
    return study.table([rows[key] for key in keys] if whole else [])


def sizes_of(*tables: pd.DataFrame) -> str | None:
    """The data, models and sizes of rows, for the ``sizes`` of a verdict; None without rows."""
    said = []
    for rows in tables:
        for row in rows.drop_duplicates(["source", "architecture", "T"]).itertuples():
            sizes = f"{row.architecture} (n = {row.n}, d = {row.d})"
            said.append(f"{row.T} examples of {row.source}, {sizes}")
    return "; ".join(said) or None


def by_precision(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """A column such as ``share`` or ``ranks``, a line for each test and map, by precision."""
    tests = rows[rows.test != "curve"]  # of which there is one size
    return tests.pivot(index=["test", "map"], columns="dtype", values=column)


def by_tier(name: str, column: str) -> pd.DataFrame:
    """The same for each of the :data:`TIERS` that has rows, of its first data, side by side."""
    study, columns = TESTS[name], {}
    for tier in TIERS:
        rows = study.table(store.known(name, tier).values())
        if len(rows):
            columns[tier] = by_precision(rows[rows.source == study.tiers[tier].source], column)
    return pd.concat(columns, axis=1).sort_index()


def by_source(name: str, column: str, tier: str = "pretrained") -> pd.DataFrame:
    """The same for each of the data of one tier, of trained weights and at most two blocks."""
    rows = TESTS[name].table(store.known(name, tier).values())
    rows = rows[rows["map"].isin(["trained L0", "trained L1", "trained L2"])]
    by_data = rows.groupby("source", sort=False)
    columns = {source: by_precision(lines, column) for source, lines in by_data}
    return pd.concat(columns, axis=1).sort_index()


def beside_paper(ours: pd.DataFrame, paper: pd.Series) -> pd.DataFrame:
    """Our numbers (:func:`by_tier`) with the paper's, of float32; what is missing is empty."""
    table = ours.copy()
    table["paper", "float32"] = paper
    return table[sorted(table)].map(lambda number: "" if pd.isna(number) else number)
