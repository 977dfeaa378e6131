"""The record of an experiment says what its rows say, in one form."""

import dataclasses

import matplotlib
import pytest

from attnmem.lab import experiments, store
from attnmem.pages import reporting
from attnmem.pages.record import record

matplotlib.use("Agg")


@pytest.fixture
def shown(monkeypatch):
    """From a record's arguments to the texts that it shows."""
    texts = []
    monkeypatch.setattr(reporting, "_display", lambda data, _: texts.append(data["text/markdown"]))

    def shown(name, axis, **options):
        record(name, axis, **options)
        return texts[-2:]

    return shown


def test_protocol_of_a_known_experiment(shown):
    [said] = shown("dana-exp1", None)
    assert said.splitlines()[:-1] == [
        "- **Source.** Dana et al. 2025, Exp. 1.",
        "- **Sizes.** $N$: 50, $n$: 2, $T$: 16,384, $d$: 3 to 13 (11 values), "
        "$d_h$: 3 to 13 (11 values), $H$: 1 to 31 (7 values).",
        "- **Data.** Random pairs of $N$ tokens, each with one fixed, uniformly random next token.",
        "- **Training.** 4,096 steps of Adam, batches of 256; the rate falls on a line from 0.01 "
        "to 0.0005.",
    ]


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("dana-exp6", "the rate"),
        ("dana-depth5", "the rate stays at 0.0025"),
        ("mahdavi-fig2a", "rises over the first 5% to 0.001"),
        ("mahdavi-fig5-random-heads", "the rate"),
    ],
)
def test_record_counts_stored_rows_and_says_rates(shown, name, rate):
    grid, rows = experiments.runs(name, "paper"), experiments.rows(name, "paper")
    [said] = shown(name, None)
    stored = f"{sum(run.key in rows for run in grid):,} of {len(grid):,} trainings"
    assert f"- **Stored.** {stored}" in said
    assert rate in said


def test_record_shows_means_and_joins_equal_sizes(shown):
    _, text = shown("dana-exp1", "H")
    rows = experiments.table("dana-exp1", "paper").query("d == 7")
    means = [f"{x:.3f}".rstrip("0") for x in rows.groupby("H").accuracy.mean()]
    assert f"| $d$ = $d_h$ = 7 | {' | '.join(means)} |" in text


def test_variants_are_not_mixed(shown):
    rows = experiments.table("dana-exp2", "paper")
    assert rows.variant.nunique() > 1
    least = rows[rows.variant == "code"].groupby("d_h").accuracy.mean().iloc[0]
    assert f"| ours | {round(least, 3)} |" in shown("dana-exp2", "d_h")[-1]


def test_record_leaves_out_curves_with_holes(shown, monkeypatch, tmp_path):
    monkeypatch.setenv("ATTNMEM_MEASUREMENTS", str(tmp_path))
    outcome = next(iter(store.known("mahdavi-fig4-context", "paper").values()))[1]
    most = {"T": 60_000}  # examples: the curve that takes longest
    outcome = dataclasses.replace(outcome, accuracy=None, loss=None, diverged=17)
    store.append([(experiments.runs("mahdavi-fig4-context", "paper", where=most)[-1], outcome)])
    said, text = shown("mahdavi-fig4-context", "n")
    rows, profile = experiments.stored("mahdavi-fig4-context", "paper", curves="T")
    assert f"; shown here: {len(rows)}, the seeds of whole curves." in said
    assert "; 1 diverged; " in said  # though it is not shown
    assert profile == "paper"
    for T, curve in rows.groupby("T"):
        means = curve.groupby("n").accuracy.mean().round(3)
        assert f"| $T$ = {T:,} | {' | '.join(map(str, means))} |" in text
    assert text.count("$T$ = ") == rows["T"].nunique()
    assert 60_000 not in set(rows["T"])


@pytest.mark.usefixtures("store")
def test_record_says_that_quick_is_a_smoke_test(shown):
    with pytest.raises(ValueError, match=r"^name: got 'dana-exp6'"):
        record("dana-exp6", "H")
    runs = experiments.runs("dana-exp6", "quick")
    outcome = store.Outcome(0.5, 0.1, 2.0, "cpu", "2", "abc")
    store.append((run, outcome) for run in runs)
    said, table = shown("dana-exp6", "H")
    cells = len({run.H for run in runs})
    assert f"{len(runs)} of {len(runs)} trainings, in {cells} of {cells} cells, up to 2" in said
    assert "so this is the profile `quick`: a smoke test, not a result." in said
    assert "profile quick." in table.splitlines()[0]
    store.append([(experiments.runs("dana-exp6", "paper")[0], outcome)])
    said, table = shown("dana-exp6", "H")
    assert "**Stored.** 1 of 120 trainings" in said
    assert "quick" not in said + table


@pytest.mark.parametrize("axis", ["width", "heads"])
def test_record_refuses_another_axis(axis):
    with pytest.raises(ValueError, match=f"^axis: got '{axis}'"):
        record("dana-exp1", axis)
