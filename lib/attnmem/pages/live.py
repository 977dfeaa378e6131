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
        for field, values in only.items() if self.profile == "paper" else ():
            rows = rows[rows[field].isin(values)]
        if len(rows):
            sizes = [field for field in SIZES if field in rows and rows[field].notna().all()]
            x, y = ((v(rows) if callable(v) else rows[v]).astype(float) for v in (x, y))
            means = rows.assign(x=x, y=y).groupby(sizes)[["x", "y"]].mean()
            label = "trained here" + ", quick" * (self.profile == "quick")
            seen = label in ax.get_legend_handles_labels()[1]
            ax.plot(*means.T.values, "ok", zorder=3, fillstyle="none", label="_" * seen + label)
            ax.legend()

    def report(self, judges: Mapping[str, _Judge] | None = None) -> None:
        """Show what was trained here beside stored and published points, and judge both.

        A judge says whether a claim holds on a table of one whole curve, or on all that a search or
        fits have so far; None if that cannot tell. Rows of ``quick`` are not judged.
        """
        if not self.rows:
            return print(self.said)
        told = [self._beside(name) for name, rows in self.rows.items() if rows]
        asked = (judges or {}) if self.profile == "paper" else {}
        said = [f"`{name}`: {self._verdict(name, judge)}" for name, judge in asked.items()]
        told.append("\n".join(f"- {line}." for line in (*said, self.said)))
        show("\n\n".join(told), {"trained": sum(map(len, self.rows.values()))})

    def _curves(self, name: str, rows: _Rows) -> dict[object, pd.DataFrame]:
        """Tables of whole curves by what tells them apart; a search and fits are one curve."""
        field = experiments.STUDIES[name].curves
        if name in experiments.EXPERIMENTS:
            runs = experiments.runs(name, self.profile, variant=self.variant)
            usable, whole = experiments.usable({run.key: run for run in runs}, rows, field)
            rows = {run.key: (run, result) for run, result in usable if whole}
        table = self.table(name, rows)
        return {} if table.empty else dict([*table.groupby(field)] if field else [("", table)])

    def _verdict(self, name: str, judge: _Judge) -> str:
        """On how many of the whole curves a claim holds, and on how many of the same as stored."""
        here, then = (self._curves(name, rows) for rows in (self.rows[name], self._stored(name)))
        now = [judge(curve) for curve in here.values()]
        if now.count(None) == len(now):
            part = Selection(variant=self.variant)
            what = "cells" if name in searches.SEARCHES else "trainings"
            have, of = experiments.STUDIES[name].done(self.profile, part, self.rows[name])
            return f"cannot be judged yet: {have} of {of} {what}"
        before = [judge(then[key]) for key in here if key in then]
        what = "whole curves" if name in experiments.EXPERIMENTS else "tables"
        told = f"the claim holds on {now.count(True)} of {len(now)} {what} trained here"
        return f"{told}, and on {before.count(True)} of {len(before)} of the same as stored"

    def _stored(self, name: str) -> _Rows:
        """The stored rows of what was trained here; of a search all."""
        known, here = store.known(name, self.profile), self.rows[name]
        return known if name in searches.SEARCHES else {k: known[k] for k in known if k in here}

    def _beside(self, name: str) -> str:
        """A line for each cell that was trained here."""
        here, then = self.table(name), self.table(name, self._stored(name))
        if here.empty:
            return f"No cell of {name} is complete."
        known = self.table(name, store.known(name, self.profile))
        value = next(field for field in ("memorized", "met", "accuracy") if field in here)
        if "task" in here and (here.task == "reals").all():
            value = "loss"
        axes = [f for f in ("way", "shape", "fraction", "lr", "table", *SIZES) if f in here]
        every = {f: {*here[f].dropna(), *known.get(f, here[f]).dropna()} for f in axes}
        axes = [f for f in axes if len(every[f]) > 1] or ["H"]
        groups = here.astype({value: float}).groupby(axes)[value]
        now = pd.DataFrame({"rows": groups.size(), "here": groups.mean()})
        if len(then):
            now["stored"] = then.astype({value: float}).groupby(axes)[value].mean()
            now["difference"] = now.here - now.stored
        if name in experiments.DANA and self.profile == "paper" and not self.variant:
            now["published"] = experiments.beside_published(name).set_index(axes).published
        cells = now.reset_index().map(lambda x: f"{x:.4g}" if isinstance(x, float) else x)
        what = f"Mean {value} of what was trained here: {name}, profile {self.profile}."
        return titled_table(what, f"tab-live-{name}", [[*cells], *cells.itertuples(index=False)])


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
    device, root = experiments.choose_device(device), store.writable_root()
    if device == "cpu" and profile == "paper":
        said = f"stored trainings only; device = 'cuda' adds its own, for {minutes:g} minutes"
        return Live(profile, variant, {}, said)
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
    for name, part in found.items():  # an earlier run may have left another variant's
        read = variant or next(iter(experiments.STUDIES[name].variants), None)
        kept = {k: row for k, row in part.items() if read in (None, getattr(row[0], "variant", 0))}
        rows[name] = kept
    devices = {result.device for part in rows.values() for _, result in part.values()}
    where = " and ".join(sorted(devices))
    said = f"{added} rows were measured now, begun within {minutes:g} minutes; all are from {where}"
    if profile == "quick":
        said += "; profile quick, a smoke test and not a result, which judges no claim"
    return Live(profile, variant, rows, said)
