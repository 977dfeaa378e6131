"""A plan has all that is missing once, what is worth most first, at the prices of the card."""

import dataclasses
import errno
import itertools
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from attnmem import __main__ as cli
from attnmem.lab import experiments, queue, training
from attnmem.lab import store as storage
from attnmem.lab.experiments import EXPERIMENTS, MAHDAVI
from attnmem.lab.store import Outcome
from attnmem.lab.study import ALL

HEADS, TOKENS, WIDTHS = "mahdavi-fig4-heads", "mahdavi-fig4-context", "mahdavi-fig2c"


def rows_of(card, seconds, wanted):
    """A store with a row of some card for each training of the published figures that is wanted."""
    return {
        name: {
            run.key: (run, Outcome(0.5, 0.1, seconds(run), card, "2", "abc"))
            for run in EXPERIMENTS[name].configs("paper")
            if wanted(run)
        }
        for name in MAHDAVI
    }


def a_step(run):
    """The more heads, the longer; on a curve as on every other."""
    return 1e-5 * run.H * run.steps


def test_a_plan_has_each_missing_training_once():
    rows = queue.stored()
    planned = [run.key for item in queue.items(rows, "NVIDIA H200") for run in item.runs]
    missing = [
        run.key for name in MAHDAVI for run in MAHDAVI[name].missing("paper", ALL, rows[name])
    ]
    assert sorted(planned) == sorted(missing)


def test_a_curve_without_a_row_comes_first_and_then_each_setting():
    """Of 30,000 examples all is known but one seed, of 50,000 one head; nothing of the others."""
    rows = rows_of("A", a_step, lambda run: run.experiment not in (HEADS, TOKENS))
    known = {(30_000, H): 5 for H in (1, 5, 10, 20, 30, 40, 50, 60)} | {(50_000, 1): 1}
    rows |= {
        HEADS: rows_of("A", a_step, lambda r: r.seed < known.get((r.T, r.H), 0))[HEADS],
        TOKENS: rows_of("A", a_step, lambda run: True)[TOKENS],
    }
    plan = queue.items(rows, "A")
    assert {item.job.name for item in plan} == {HEADS}
    stages = [[item for item in plan if item.stage == stage] for stage in range(3)]
    assert plan == [*itertools.chain(*stages)]
    first = [(item.runs[0].T, item.runs[0].H, item.runs[0].seed) for item in stages[0]]
    assert first == [(T, 1, 0) for T in (70_000, 90_000, 110_000, 130_000)], "the cheapest of each"
    of_settings = [(item.runs[0].T, item.runs[0].H) for item in stages[1]]
    curves = [50_000, 70_000, 90_000, 110_000, 130_000]
    assert of_settings == [(T, H) for T in curves for H in (5, 10, 20, 30, 40, 50, 60)]
    assert all([run.seed for run in item.runs] == [0] for item in stages[1])
    assert [run.T for item in stages[2] for run in item.runs][:8] == 8 * [30_000], "the cheapest"
    assert [run.seed for run in stages[2][0].runs] == [5]
    assert [run.seed for run in stages[2][-1].runs] == [1, 2, 3, 4, 5], "at once"
    for item in plan:
        assert item.seconds == pytest.approx(sum(map(a_step, item.runs)))


def test_prices_are_those_of_the_card_or_of_the_nearest_sizes():
    """Of Figure 2c, with 30 heads, there is no row; of Figure 2a there are some, from two cards."""
    rows = rows_of("slow", lambda run: 3 * a_step(run), lambda run: run.H == 30 and run.seed == 1)
    fast = rows_of("fast", a_step, lambda run: run.experiment != WIDTHS and run.seed == 0)
    rows = {name: (rows[name] if name != WIDTHS else {}) | fast[name] for name in MAHDAVI}
    for card, factor in (("fast", 1), ("slow", 3)):
        prices = {run: i.seconds / len(i.runs) for i in queue.items(rows, card) for run in i.runs}
        for run in EXPERIMENTS[WIDTHS].configs("paper"):
            assert prices[run] == pytest.approx(factor * a_step(run))
    assert queue.cards(rows) == ["fast", "slow"]


def test_what_stopped_early_before_is_priced_so():
    """By a CPU's rows of the same cell, where the card has none of the figure."""
    rows = rows_of("fast", a_step, lambda run: run.experiment != WIDTHS)
    half = rows_of("cpu", lambda run: 1e9, lambda run: run.experiment == WIDTHS and run.seed == 0)
    for key, (run, result) in half[WIDTHS].items():
        early = dataclasses.replace(result, accuracy=1.0, best_step=run.steps // 2)
        rows[WIDTHS][key] = run, early if run.T == 10_000 else result
    for item in queue.items(rows, "fast"):
        [T] = {run.T for run in item.runs}
        assert item.seconds == pytest.approx(sum(map(a_step, item.runs)) / (1 + (T == 10_000)))


def test_a_card_without_rows_costs_what_gpus_do():
    rows = rows_of("A", a_step, lambda run: run.seed == 0 and run.T < 30_000)
    cpu = rows_of("cpu", lambda run: 1e6, lambda run: run.seed == 1 and run.T < 30_000)
    rows = {name: rows[name] | cpu[name] for name in MAHDAVI}
    assert queue.items(rows, "new") == queue.items(rows, "A")
    assert queue.totals(queue.items(rows, "cpu"))[1] > 1e9
    with pytest.raises(ValueError, match=r"^rows: got none of new or of a GPU; expected some"):
        queue.items(cpu, "new")


FIRST, SECOND, THIRD = "603f138e4ed9", "a49177ac3fc7", "657500b1a841"  # commits of stored rows


@pytest.mark.parametrize(
    ("before", "card", "then", "count", "took"),
    [
        ([FIRST], "NVIDIA H100 80GB HBM3", SECOND, 317, 775),  # planned by rows of an H200
        ([FIRST, SECOND], "NVIDIA H200", THIRD, 86, 405),
    ],
)
def test_what_gpus_did_would_have_been_planned_within_a_factor_of_two(
    before, card, then, count, took
):
    """The seconds that eight streams took stand in benchmarks/gpu.txt."""
    rows, done, known = queue.stored(), set(), {}
    for name, of_study in rows.items():
        known[name] = {key: row for key, row in of_study.items() if row[1].commit in before}
        done |= {key for key, row in of_study.items() if row[1].commit == then}
    assert len(done) == count
    plan = []
    for item in queue.items(known, card):
        runs = [run for run in item.runs if run.key in done]
        plan.append(item._replace(runs=runs, seconds=item.seconds * len(runs) / len(item.runs)))
    planned, seconds = queue.fitted(plan, 10, 8)
    assert queue.totals(planned)[0] == count
    assert took / 2 < seconds < 2 * took


def test_what_does_not_fit_is_passed_over_for_what_does():
    def item(seconds):
        return queue.Item(0, experiments.Job(HEADS, "paper"), [], seconds)

    plan = [item(600), item(4000), item(1800), item(1300), item(1200)]
    for hours, streams, chosen, end in [
        (1, 1, [0, 2, 4], 3600),
        (1, 2, [0, 2, 3, 4], 3000),
        (2, 1, [0, 1, 2], 6400),
        (0, 8, [], 0),
        (9, 8, [0, 1, 2, 3, 4], 4000),
    ]:
        assert queue.fitted(plan, hours, streams) == ([plan[i] for i in chosen], end)
    with pytest.raises(ValueError, match=r"^at_once: got 0; expected"):
        queue.fitted(plan, 1, 0)


def test_more_streams_than_fill_a_card_gain_nothing(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert [queue.at_once(workers, "cuda") for workers in (1, 8, 16)] == [1, 8, 8]
    assert [queue.at_once(workers, "cpu") for workers in (1, 2, 8)] == [1, 2, 2]


def test_a_ratio_is_measured_on_parts_of_the_plan(monkeypatch):
    """A step of every run takes 2 ms of what its price says is 1 ms."""
    rows = rows_of("A", lambda run: 1e-3 * run.steps, lambda run: run.seed == 0)
    plan, seen = queue.items(rows, "A"), []
    monkeypatch.setattr(queue, "pace", lambda *call: seen.append(call) or 2e-3)
    assert queue.measured_ratio(plan, "cpu", 1, 9.0) == pytest.approx(2)
    assert all(device == "cpu" for _, device, _ in seen)
    assert sum(seconds for *_, seconds in seen) == pytest.approx(9), "one after the other"
    assert seen[0][0] == plan[0].runs
    assert {len(plan) // 8 * i for i in range(8)} <= {plan.index(_item(plan, s[0])) for s in seen}
    seen.clear()
    with monkeypatch.context() as threads:
        threads.setattr(experiments, "pool", lambda workers, _: ThreadPoolExecutor(workers))
        assert queue.measured_ratio(plan, "cpu", 4, 9.0) == pytest.approx(2)
    assert sum(seconds for *_, seconds in seen) == pytest.approx(4 * 9)


def _item(plan, runs):
    return next(item for item in plan if item.runs == runs)


def test_a_pace_is_that_of_steps():
    """Those of the stack are made for all runs at once, none of them from the store."""
    runs = EXPERIMENTS[HEADS].configs("quick")[:2]
    assert training.stacks(runs) == [runs]
    assert queue.pace(runs, "cpu", 0.02) > 0
    assert queue.pace(runs[:1], "cpu", 0.0) > 0, "one chunk of steps at least"


# --- the command ----------------------------------------------------------------------------------


def test_a_plan_for_a_card_that_is_not_here(capsys):
    """Every missing training in a line of its curve; their sum."""
    assert cli.main(["queue", "--plan", "--hours", "1000", "--device", "H200"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = queue.stored()
    count = sum(len(MAHDAVI[name].missing("paper", ALL, rows[name])) for name in MAHDAVI)
    assert sum(int(line.split()[4]) for line in lines if line.startswith("  ")) == count
    assert lines[-2].startswith(f"planned: {count} of {count} missing trainings, ")
    assert lines[-1].startswith("on NVIDIA H200, 8 at once: ")
    assert lines[-1].endswith(" of 1000.0 h")
    assert cli.main(["queue", "--plan", "--hours", "-1", "--device", "H200"]) == 1
    assert capsys.readouterr().err == "hours: got -1.0; expected a number, at least 0\n"


def put(*wanted):
    """Rows of some quick trainings in the store."""
    for name, seeds in wanted:
        runs = [run for run in experiments.runs(name, "quick") if run.seed < seeds]
        storage.append((run, Outcome(0.5, 0.1, 1.0, "cpu", "2", "abc")) for run in runs)


def missing():
    rows = queue.stored("quick")
    return sum(len(MAHDAVI[name].missing("quick", ALL, rows[name])) for name in MAHDAVI)


QUICK = ["queue", "--profile", "quick", "--device", "cpu"]


@pytest.mark.usefixtures("store", "instant")
def test_the_queue_trains_its_plan_in_its_order(capsys, monkeypatch):
    """On a CPU, whose name says little, its pace is measured before."""
    monkeypatch.setattr(queue, "measured_ratio", lambda plan, device, workers: 0.5)
    put((HEADS, 1), (TOKENS, 2))
    of = missing()
    assert cli.main([*QUICK, "--hours", "0"]) == 0
    assert f"planned: 0 of {of} missing" in capsys.readouterr().out
    plan = queue.items(queue.stored("quick"), "cpu", "quick")
    before = len(experiments.rows(HEADS, "quick"))
    assert cli.main([*QUICK, "--hours", "5"]) == 0
    said = capsys.readouterr().out
    assert missing() == 0
    assert said.count("no row says what trainings take on this cpu: measuring for a minute\n") == 1
    assert f"planned: {of} of {of} missing trainings, {of / 120:.1f} min of" in said
    assert f"{of} rows added" in said
    assert said.count("planned: ") == 2, "a second look finds nothing left"
    order = [run.key for item in plan for run in item.runs if item.job.name == HEADS]
    assert [*experiments.rows(HEADS, "quick")][before:] == order


@pytest.mark.usefixtures("store", "instant")
def test_a_card_without_rows_is_measured_first(monkeypatch, capsys):
    put((HEADS, 1))
    rows = [*experiments.rows(HEADS, "quick").values()]
    (storage.writable_root() / HEADS / "quick.csv").unlink()
    storage.append((run, dataclasses.replace(result, device="A")) for run, result in rows)
    monkeypatch.setattr(training, "device_name", lambda device: "new")
    monkeypatch.setattr(queue, "measured_ratio", lambda plan, device, workers: 2.5)
    assert cli.main([*QUICK, "--hours", "9", "--workers", "1", "--plan"]) == 0
    first, second, *_, total, _ = capsys.readouterr().out.splitlines()
    assert (first, second) == (
        "no row says what trainings take on this new: measuring for a minute",
        "2.50 times what stored rows took",
    )
    assert total.endswith(f", {missing() * 2.5 / 60:.1f} min of {missing() * 2.5 / 60:.1f} min")


# --- a full disk, a killed process ----------------------------------------------------------------


@pytest.mark.usefixtures("store", "instant")
def test_rows_wait_for_room_on_a_full_disk(monkeypatch, capsys):
    """Three tries later all are there; if nobody makes room, the error comes after all tries."""
    append, full = storage.append, [3]

    def fill(rows, root):
        full[0] -= 1
        if full[0] >= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return append(rows, root)

    monkeypatch.setattr(storage, "append", fill)
    monkeypatch.setattr(experiments, "AGAIN", 1 / 1024)
    monkeypatch.setattr(experiments, "PATIENCE", 10 / 1024)
    assert experiments.run("dana-exp6", "quick", "cpu", seeds=1) == 3
    said = capsys.readouterr().err
    assert said.count("the disk is full: 1 rows of dana-exp6 wait for room in ") == 3
    full[0] = 10_000
    with pytest.raises(OSError, match="No space left on device"):
        experiments.run("dana-exp6", "quick", "cpu", seeds=2)
    assert full[0] == 10_000 - 11
    full[0] = 0
    assert experiments.run("dana-exp6", "quick", "cpu", seeds=2) == 3


def test_workers_end_with_a_killed_parent():
    """They have its output, which ends with the last of them."""
    code = (
        "import time; from attnmem.lab import experiments\n"
        "if __name__ == '__main__':\n"
        "    with experiments.pool(2, 'cpu') as workers:\n"
        "        print(workers.submit(abs, -1).result(), flush=True); time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout.readline() == "1\n"
    parent.send_signal(signal.SIGKILL)
    assert parent.communicate(timeout=100) == ("", None)
