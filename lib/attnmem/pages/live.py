"""A chapter's figures trained again on this machine, for some minutes, beside the stored rows."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import pandas as pd
from matplotlib.axes import Axes

from ..checks import check_number, refuse
from ..lab import experiments, searches, store
from ..lab.study import SIZES, Selection
from .reporting import show, titled_table

_STREAMS = 8  # units in flight on a GPU
_Rows = Mapping[str, store.Row]
_Judge = Callable[[pd.DataFrame], bool | None]
_Value = str | Callable[[pd.DataFrame], pd.Series]  # a column of a table, or computed from it


class Live(NamedTuple):
    """What was trained here; ``rows`` of no study where a chapter reads the stored ones only."""

    profile: str
    variant: str | None
    rows: dict[str, _Rows]
    said: str

    def table(self, name: str, rows: _Rows | None = None) -> pd.DataFrame:
        """What was trained here of a study, or these rows, as a table of its kind."""
        rows = self.rows.get(name, {}) if rows is None else rows
        if name in searches.SEARCHES:
            return searches.found(name, self.profile, rows)
        return experiments.STUDIES[name].table(rows.values())

    def draw(
        self, ax: Axes, name: str, x: _Value, y: _Value = "accuracy", **only: Sequence[int]
    ) -> None:
        """Draw the means of a study as open circles; of the published curves some, as ``d=[4]``."""
        rows = self.table(name)
        if self.profile == "paper":
            for field, values in only.items():
                rows = rows[rows[field].isin(values)]
        if rows.empty:
            return
        sizes = [field for field in SIZES if field in rows and rows[field].notna().all()]
        points = rows.assign(x=_column(rows, x), y=_column(rows, y))
        means = points.groupby(sizes)[["x", "y"]].mean()
        label = "trained here" if self.profile == "paper" else "trained here, quick"
        if label in ax.get_legend_handles_labels()[1]:
            label = f"_{label}"  # which a legend leaves out
        ax.plot(*means.T.values, "ok", zorder=3, fillstyle="none", label=label)
        ax.legend()

    def report(self, judges: Mapping[str, _Judge] | None = None) -> None:
        """Show what was trained here beside stored and published points, and judge both.

        A page that only reads stored trainings, as the book does, shows nothing here.
        A judge says whether a claim holds on a table of one whole curve, or on all that a search or
        fits have so far; None if that cannot tell. Rows of ``quick`` are not judged.
        """
        if not self.rows:
            return
        blocks = [self._beside_stored(name) for name, rows in self.rows.items() if rows]
        lines = []
        if judges and self.profile == "paper":
            lines = [f"`{name}`: {self._verdict(name, judge)}" for name, judge in judges.items()]
        lines.append(self.said)
        blocks.append("\n".join(f"- {line}." for line in lines))
        n_rows = sum(len(rows) for rows in self.rows.values())
        show("\n\n".join(blocks), {"trained": n_rows})

    def _curves(self, name: str, rows: _Rows) -> dict[object, pd.DataFrame]:
        """Tables of whole curves by what tells them apart; a search and fits are one curve."""
        field = experiments.STUDIES[name].curves
        if name in experiments.EXPERIMENTS:
            runs = experiments.runs(name, self.profile, variant=self.variant)
            usable, complete = experiments.usable({run.key: run for run in runs}, rows, field)
            rows = {run.key: (run, result) for run, result in usable if complete}
        table = self.table(name, rows)
        if table.empty:
            return {}
        return dict(list(table.groupby(field))) if field else {"": table}

    def _verdict(self, name: str, judge: _Judge) -> str:
        """On how many of the whole curves a claim holds, and on how many of the same as stored."""
        trained = self._curves(name, self.rows[name])
        stored = self._curves(name, self._stored(name))
        answers = [judge(curve) for curve in trained.values()]
        if answers.count(None) == len(answers):
            selection = Selection(variant=self.variant)
            have, total = experiments.STUDIES[name].done(self.profile, selection, self.rows[name])
            units = "cells" if name in searches.SEARCHES else "trainings"
            return f"cannot be judged yet: {have} of {total} {units}"
        before = [judge(stored[key]) for key in trained if key in stored]
        curves = "whole curves" if name in experiments.EXPERIMENTS else "tables"
        return (
            f"the claim holds on {answers.count(True)} of {len(answers)} {curves} trained here, "
            f"and on {before.count(True)} of {len(before)} of the same as stored"
        )

    def _stored(self, name: str) -> _Rows:
        """The stored rows of what was trained here; of a search all."""
        stored = store.known(name, self.profile)
        if name in searches.SEARCHES:
            return stored
        return {key: row for key, row in stored.items() if key in self.rows[name]}

    def _beside_stored(self, name: str) -> str:
        """A line for each cell that was trained here."""
        trained, stored = self.table(name), self.table(name, self._stored(name))
        if trained.empty:
            return f"No cell of {name} is complete."
        value = next(field for field in ("memorized", "met", "accuracy") if field in trained)
        if "task" in trained and (trained.task == "reals").all():
            value = "loss"
        axes = self._axes(name, trained)
        groups = trained.astype({value: float}).groupby(axes)[value]
        means = pd.DataFrame({"rows": groups.size(), "here": groups.mean()})
        if len(stored):
            means["stored"] = stored.astype({value: float}).groupby(axes)[value].mean()
            means["difference"] = means.here - means.stored
        if name in experiments.DANA and self.profile == "paper" and not self.variant:
            means["published"] = experiments.beside_published(name).set_index(axes).published
        cells = means.reset_index().map(lambda x: f"{x:.4g}" if isinstance(x, float) else x)
        title = f"Mean {value} of what was trained here: {name}, profile {self.profile}."
        return titled_table(title, f"tab-live-{name}", [[*cells], *cells.itertuples(index=False)])

    def _axes(self, name: str, trained: pd.DataFrame) -> list[str]:
        """The fields that tell cells apart: those with several values, trained here or stored."""
        stored = self.table(name, store.known(name, self.profile))
        axes = []
        for field in ("way", "shape", "fraction", "lr", "table", *SIZES):
            if field in trained:
                values = {*trained[field].dropna(), *stored.get(field, trained[field]).dropna()}
                if len(values) > 1:
                    axes.append(field)
        return axes or ["H"]


def _column(rows: pd.DataFrame, value: _Value) -> pd.Series:
    column = value(rows) if callable(value) else rows[value]
    return column.astype(float)


def train(
    names: Sequence[str],
    device: str = "cpu",
    minutes: int | float = 10,
    profile: str = "paper",
    variant: str | None = None,
) -> Live:
    """Train studies for so many minutes in one queue, of each the cheapest curves first.

    On the CPU the published profile is not trained: a chapter then reads the stored rows only. The
    profile ``quick`` is trained anywhere. Rows go to a folder of their own, where a second run goes
    on.
    """
    if not check_number("minutes", minutes, least=0, most=math.inf):
        refuse("minutes", minutes, "a number above 0")
    for name in names:
        experiments.STUDIES[name].check_profile(profile)
    asked, root = device, store.writable_root()
    device = experiments.choose_device(asked)
    if device == "cpu" and profile == "paper":
        if asked != "cpu":
            print("no GPU was found here, so nothing is trained: the figures show stored trainings")
        return Live(profile, variant, {}, "")
    if root.resolve() == store.SHIPPED.resolve():
        root = store.PACKAGE.parents[1] / "_build" / "runs"
    print(f"profile {profile} is trained now on {device}, for {minutes:g} minutes at most")
    many = {"workers": 1 if device == "cpu" else _STREAMS, "limit_minutes": minutes}
    many["report"] = lambda p: print(f"{p.seconds:.0f} s, {p.said}", file=sys.stderr)
    jobs = [experiments.Job(name, profile, Selection(variant=variant)) for name in names]
    place = {"root": (root / "live").absolute(), "recompute": True}
    with experiments.pool(many["workers"], device) as executor:
        added = experiments.run_jobs(jobs, device, executor, **place, **many)
    found = {name: experiments.rows(name, profile, **place) for name in names}
    rows = {}
    for name, measured in found.items():  # an earlier run may have left another variant's
        chosen = variant or next(iter(experiments.STUDIES[name].variants), None)
        rows[name] = dict(measured)
        if chosen is not None:
            for key, (config, _) in measured.items():
                if getattr(config, "variant", None) != chosen:
                    del rows[name][key]
    results = [result for of_study in rows.values() for _, result in of_study.values()]
    devices = " and ".join(sorted({result.device for result in results}))
    summary = f"{added} rows were measured now, begun within {minutes:g} minutes; "
    summary += f"all are from {devices}"
    if profile == "quick":
        summary += "; profile quick, a smoke test and not a result, which judges no claim"
    return Live(profile, variant, rows, summary)
