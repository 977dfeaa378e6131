"""What ``status`` says that is missing, and the time that a CPU needs for it."""

import dataclasses
import math

import pytest

from attnmem import __main__ as cli
from attnmem.lab import experiments
from attnmem.lab import store as storage
from attnmem.lab.experiments import STUDIES
from attnmem.lab.store import Outcome
from attnmem.lab.study import ALL

pytestmark = pytest.mark.usefixtures("store")


def outcome(seconds, **changes):
    return dataclasses.replace(Outcome(0.5, 0.1, seconds, "cpu", "2", "abc"), **changes)


def prices_of(study, rows):
    """The price of each missing run."""
    known = {run.key: (run, found) for run, found in rows}
    left = study.missing("paper", ALL, known)
    return dict(zip(left, study.prices(left, known), strict=True))


def test_a_curve_without_rows_is_priced_by_its_steps():
    """A step takes H milliseconds here, on a GPU none of them; some stop after half of the steps.

    A cell with rows costs what they took; others are priced as if nothing stopped early.
    """
    study = STUDIES["mahdavi-fig4-heads"]
    runs = study.configs("paper")
    rows = []
    for run in runs:
        if run.T == 30_000 and run.seed < 2 and run.H < 60:
            steps = run.steps // 2 if run.H >= 30 else run.steps
            early = {"accuracy": 1.0, "best_step": steps} if run.H >= 30 else {}
            rows.append((run, outcome(1e-3 * run.H * steps, **early)))
        if run.T == 130_000 and run.seed == 0:
            rows.append((run, outcome(1.0, device="H100")))
    found = prices_of(study, rows)
    assert len(found) == len(runs) - len(rows)
    rates = [1e-3 * H for H in (1, 5, 10, 20, 30, 40, 50) for _ in range(2)]
    for run, price in found.items():
        steps = run.steps // 2 if run.T == 30_000 and 30 <= run.H < 60 else run.steps
        rate = 1e-3 * run.H if run.H < 60 else sum(rates) / len(rates)
        assert price == pytest.approx(rate * steps), run


def test_status_adds_the_prices_of_each_curve(capsys):
    """Of a cell with a row by this row, of others by the same number of heads, of none by all."""
    storage.append(
        (run, outcome(36.0 * run.H))
        for run in experiments.runs("mahdavi-fig2a", "quick")
        if run.T != 1000 and run.H < run.T / 100
    )
    assert cli.main(["status", "--profile", "quick"]) == 0
    lines = capsys.readouterr().out.splitlines()
    [at] = [i for i, line in enumerate(lines) if " mahdavi-fig2a " in line]
    said = "quick mahdavi-fig2a code 10 of 24 in part 20.4 min"
    assert " ".join(lines[at].split()) == said
    mean = (2 * (1 + 2) + 2 * (1 + 2 + 4)) / 10  # heads of the rows that there are
    minutes = [36 / 60 * 2 * heads for heads in (4 + mean, mean, 1 + 2 + 4 + mean)]
    assert [line.strip() for line in lines[at + 1 : at + 4]] == [
        f"T = 250: 4 missing {minutes[0]:.1f} min",
        f"T = 500: 2 missing {minutes[1]:.1f} min",
        f"T = 1000: 8 missing {minutes[2]:.1f} min",
    ]
    assert math.isclose(sum(minutes), 20.4)
