"""What the rest would cost, in which order it is worth most, and a first half hour on a GPU."""

import dataclasses

import pytest

from attnmem import __main__ as cli
from attnmem import experiments, results, training
from attnmem.results import Outcome
from attnmem.studies import cost, gpu, plan
from attnmem.studies.plan import Budget, Piece, Planned
from attnmem.studies.study import WHOLE

pytestmark = pytest.mark.usefixtures("store")


def row(run, seconds, accuracy=0.5, **found):
    loss = None if "diverged" in found else 0.1
    accuracy = None if "diverged" in found else accuracy
    return run, Outcome(accuracy, loss, seconds, "cpu", "2", "abc", **found)


@pytest.fixture
def counted(monkeypatch):
    """A step of a model with ``H`` heads takes ``100 H`` operations."""
    monkeypatch.setattr(cost, "operations", lambda run: 100 * run.H)


def test_costs_follow_from_the_rows_of_the_experiment(counted):
    runs = experiments.runs("dana-exp6", "quick")  # H = 1, 5, 9 with two seeds, 128 steps
    results.append(row(run, 2.0 * run.H) for run in runs[:4])
    other = experiments.runs("dana-exp2", "quick")
    results.append(row(run, 1e6) for run in other)
    seconds, basis = cost.Paces("cpu").seconds_of(runs[4:])
    assert seconds == pytest.approx(2 * 18.0), "two runs of nine heads, two seconds a head"
    assert basis == ["its own rows"]


def test_costs_follow_from_rows_of_the_same_model_if_there_are_no_others(counted):
    results.append(row(run, 3.0 * run.H) for run in experiments.runs("dana-exp2", "quick"))
    results.append(row(run, 7.0 * run.H) for run in experiments.runs("dana-depth2", "quick"))
    results.append(row(run, 9.0) for run in experiments.runs("dana-exp5-mlp", "quick"))
    elsewhere = [
        (run, dataclasses.replace(found, device="H200"))
        for run, found in [row(run, 1e6) for run in experiments.runs("dana-exp3", "quick")]
    ]
    results.append(elsewhere)
    [run, *_] = experiments.runs("dana-exp6", "quick", where={"H": 9})
    seconds, basis = cost.Paces("cpu").seconds_of([run])
    assert (seconds, basis) == (pytest.approx(27.0), ["rows of the same model"])


def test_costs_are_timed_if_there_are_no_rows(monkeypatch, counted):
    asked = []

    def step_seconds(runs, device, seconds):
        asked.append(runs[0].H)
        return 0.01 + 0.002 * runs[0].H

    monkeypatch.setattr(cost, "step_seconds", step_seconds)
    runs = experiments.runs("dana-exp6", "quick", 1)
    seconds, basis = cost.Paces("cpu", timing=1.0).seconds_of(runs)
    assert asked == [1, 9], "the smallest and the largest"
    assert seconds == pytest.approx(128 * (3 * 0.01 + 0.002 * (1 + 5 + 9)))
    assert basis == ["steps timed now"]


def test_trainings_that_are_made_at_once_share_what_a_step_takes_whatever_its_size(counted):
    few, many = experiments.runs("dana-exp6", "quick", 2, where={"H": 1}), 128 * 0.5
    pace = cost.Pace(fixed=0.5, each=0.001, basis="")
    alone = many + 128 * 0.001 * 100
    assert [pace.seconds([run]) for run in few] == pytest.approx([alone, alone])
    assert pace.seconds(few) == pytest.approx(2 * alone - many)
    longer = dataclasses.replace(few[0], steps=256)
    assert pace.seconds([longer, few[1]]) == pytest.approx(2 * many + 0.001 * 100 * (256 + 128))


def test_a_pace_is_the_line_through_one_training_and_the_largest_stack(monkeypatch, counted):
    asked = []

    def step_seconds(runs, device, seconds):
        asked.append([run.H for run in runs])
        return 0.01 + 0.002 * sum(run.H for run in runs)

    monkeypatch.setattr(cost, "step_seconds", step_seconds)
    pace = cost.timed_pace(experiments.runs("dana-exp6", "quick", 2), "cpu", 1.0)
    assert asked == [[1], [9, 9]]
    assert (pace.fixed, pace.each) == (pytest.approx(0.01), pytest.approx(0.002 / 100))


def test_on_a_gpu_steps_are_timed_though_there_are_rows(monkeypatch, counted):
    runs = experiments.runs("dana-exp6", "quick", 1)
    results.append(row(run, 1e6) for run in runs)
    monkeypatch.setattr(cost, "device_name", lambda device: "cpu")  # as the rows have it
    monkeypatch.setattr(cost, "step_seconds", lambda runs, device, seconds: 0.5)
    assert cost.Paces("cuda", timing=1.0).of(runs).basis == "steps timed now"
    assert cost.Paces("cuda").of(runs).basis == "its own rows"
    assert cost.Paces("cpu", timing=1.0).of(runs).basis == "its own rows"


def test_costs_are_at_least_those_of_plain_products(monkeypatch, counted):
    monkeypatch.setattr(cost, "product_rate", lambda device: 1e3)
    runs = experiments.runs("dana-exp6", "quick", 1)
    seconds, basis = cost.Paces("cpu").seconds_of(runs)
    assert seconds == pytest.approx(128 * 100 * (1 + 5 + 9) / 1e3)
    assert basis == ["the rate of products, so at least"]


def test_trainings_that_stopped_count_with_the_steps_that_they_made():
    [run] = experiments.runs("mahdavi-fig2a", "quick", 1, where={"H": 1, "T": 250})
    assert (run.steps, run.early_stop) == (2000, True)
    for found, steps in (
        ({"best_step": 750}, 2000),
        ({"best_step": 750, "accuracy": 1.0}, 750),
        ({"diverged": 500}, 500),
    ):
        assert cost.steps_made(*row(run, 1.0, **found)) == steps


def test_a_step_is_timed_on_a_few_data():
    [run] = experiments.runs("mahdavi-fig4-heads", "quick", 1, where={"H": 1, "T": 1000})
    assert 0 < cost.step_seconds([run], "cpu", 0.01) < 1
    assert cost.product_rate("cpu", size=64, seconds=0.01) > 1e6


def test_a_step_of_trainings_that_are_made_at_once_is_timed_as_one(monkeypatch):
    """Three of different sizes; with the data cut to one size they differ by their seeds."""
    now, tried = [0.0], []

    class Six:
        """Takes six seconds for each step, whatever is in the stack."""

        done = False

        def __init__(self, runs, device, stays):
            tried.extend(runs)
            self.count = 0

        def advance(self):
            self.count += 10
            now[0] += 60.0

        def release(self):
            pass

    monkeypatch.setattr(cost, "perf_counter", lambda: now[0])
    monkeypatch.setitem(training.PROTOCOLS, "classes", Six)
    every = experiments.runs("mahdavi-fig4-heads", "quick", 1, where={"H": 1})
    runs = [dataclasses.replace(run, batch=16) for run in every[:3]]
    assert len({run.T for run in runs}) == 3
    assert cost.step_seconds(runs, "cpu", 100.0) == pytest.approx(6.0)
    assert len({run.key for run in tried}) == 3
    assert len({run.T for run in tried}) == 1


def test_status_says_what_is_missing_on_which_curve(capsys, counted):
    results.append(
        row(run, 36.0 * run.H)
        for run in experiments.runs("mahdavi-fig2a", "quick")
        if run.T != 1000 and run.H < 8
    )
    assert cli.main(["status", "--profile", "quick", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    [at] = [i for i, line in enumerate(lines) if " mahdavi-fig2a " in line]
    said = "quick mahdavi-fig2a code 12 of 24 in part 37.2 min on cpu, by its own rows"
    assert " ".join(lines[at].split()) == said
    assert [line.strip() for line in lines[at + 1 : at + 4]] == [
        "T = 250: 2 missing, 9.6 min",
        "T = 500: 2 missing, 9.6 min",
        "T = 1000: 8 missing, 18.0 min",
    ]


# --- in which order -------------------------------------------------------------------------------


def piece(figure, curve, cells, further=False):
    """Trainings of ``H`` heads that take ``H`` seconds each."""
    [run, *_] = experiments.runs("dana-exp6", "quick", 1)
    seed = 1 if further else 0
    runs = (dataclasses.replace(run, experiment=figure, H=H, T=curve, seed=seed) for H in cells)
    return Piece(figure, curve, further, tuple(runs))


def heads(run):
    return float(run.H)


def test_the_cheapest_curve_of_each_figure_comes_first_and_further_seeds_last():
    found = [
        piece("a", 10, [1, 9], further=True),
        piece("a", 20, [9, 50]),
        piece("a", 10, [8, 1]),
        piece("b", 10, [70]),
        piece("b", 20, [60]),
        piece("c", 10, [5], further=True),
    ]
    order = plan.plan(found, heads)
    assert [(each.figure, each.curve, each.further) for each in order] == [
        ("a", 10, False),
        ("b", 20, False),
        ("a", 20, False),
        ("b", 10, False),
        ("c", 10, True),
        ("a", 10, True),
    ]
    assert [run.H for run in order[0].runs] == [1, 8], "the cheapest training first"


def test_pieces_are_what_each_curve_lacks():
    experiment = experiments.EXPERIMENTS["mahdavi-fig2a"]
    runs = experiment.runs("quick")
    stored = [run for run in runs if run.H == 8 or (run.T, run.seed) == (250, 0)]
    rows = {run.key: (run, None) for run in stored}
    found = plan.pieces(experiment, "quick", WHOLE, rows)
    assert {(each.curve, each.further, len(each.runs)) for each in found} == {
        (250, True, 3),
        (500, False, 3),
        (500, True, 3),
        (1000, False, 3),
        (1000, True, 3),
    }
    assert {run.key for each in found for run in each.runs} == {run.key for run in runs} - {*rows}
    together = plan.pieces(experiment, "quick", WHOLE, rows, together=True)
    assert {(each.curve, each.further, len(each.runs)) for each in together} == {
        (250, False, 3),
        (500, False, 6),
        (1000, False, 6),
    }
    curves = plan.by_curve(found)
    assert {curve: len(runs) for curve, runs in curves.items()} == {250: 3, 500: 6, 1000: 6}


class Clock:
    """A clock that a test moves."""

    now = 100.0

    def __call__(self):
        return self.now


def test_a_budget_begins_what_it_expects_to_end():
    clock = Clock()
    budget = Budget(60, clock)
    assert budget.fits(60)
    assert not budget.fits(60.1)
    clock.now += 50
    assert budget.fits(10)
    assert not budget.fits(10.1)
    budget.learn(expected=4, taken=6)
    assert budget.slower == 1.5
    assert budget.fits(6.6)
    assert not budget.fits(6.7)
    budget.learn(expected=96, taken=4)
    assert budget.slower == 1, "never faster than expected"
    clock.now += 20
    assert (budget.left, budget.fits(0.1), budget.fits(0)) == (0, False, False)


def units(*seconds):
    runs = experiments.runs("dana-exp1", "paper", 1)
    return [("dana-exp1", [run], each) for run, each in zip(runs, seconds, strict=False)]


def test_units_that_do_not_fit_give_way_to_later_ones():
    clock = Clock()
    planned = Planned(units(30.0, 50.0, 20.0, 15.0), Budget(60, clock))
    taken = []
    while given := planned.next():
        _, [run] = given
        taken.append(planned.begun[run.key][0])
        clock.now += taken[-1]
        planned.landed([(run, None)])
    assert taken == [30, 20]
    assert clock.now <= 160


def test_a_unit_that_did_not_fit_is_begun_when_the_others_prove_faster():
    clock = Clock()
    budget = Budget(60, clock)
    budget.learn(expected=1, taken=4)
    planned = Planned(units(20.0, 5.0), budget)
    _, [short] = planned.next()
    assert planned.begun[short.key][0] == 5
    assert planned.next() is None
    clock.now += 5
    budget.learn(expected=100, taken=0)
    planned.landed([(short, None)])
    _, [long] = planned.next()
    assert planned.begun[long.key][0] == 20


def test_a_budget_is_kept_though_all_takes_twice_as_long():
    clock = Clock()
    planned = Planned(units(*[10.0] * 8), Budget(60, clock))
    count = 0
    while given := planned.next():
        count += 1
        clock.now += 20
        planned.landed([(given[1][0], None)])
    assert (count, clock.now) == (3, 160)


# --- the first half hour --------------------------------------------------------------------------


@pytest.fixture
def device(monkeypatch, counted):
    """A machine on which a training takes as many seconds as it has heads, by its own clock."""
    clock = Clock()

    def train(runs, *, device, checkpoints):
        clock.now += sum(run.H for run in runs)
        return [Outcome(0.5, 0.1, float(run.H), device, "2", "abc") for run in runs]

    def step_seconds(runs, device, seconds):
        clock.now += 0.25
        return runs[0].H / runs[0].steps

    def selfcheck(device, runs, steps):
        clock.now += 5
        return clock.failures

    clock.failures = []
    monkeypatch.setattr(training, "train", train)
    monkeypatch.setattr(training, "selfcheck", selfcheck)
    monkeypatch.setattr(cost, "step_seconds", step_seconds)
    monkeypatch.setattr(cost, "product_rate", lambda device: 1e9)
    return clock


FIGURES = (
    "dana-exp1",
    "dana-exp5-mlp",
    "mahdavi-fig2a",
    "mahdavi-fig3",
    "mahdavi-fig5-random-heads",
)


def half_hour(clock, seconds, **options):
    said = []
    options = {"profile": "quick", "say": said.append, "clock": clock} | options
    return gpu.first_half_hour("cpu", seconds / 60, **options), said


def stored():
    """The trainings that have rows, in the order in which they were made."""
    return [
        run for name in experiments.PUBLISHED for run, _ in results.known(name, "quick").values()
    ]


def test_a_first_half_hour_keeps_its_time_and_goes_on(device, monkeypatch):
    few = {name: experiments.PUBLISHED[name] for name in FIGURES}
    monkeypatch.setattr(gpu, "PUBLISHED", few)
    wanted = sum(len(experiments.runs(name, "quick")) for name in FIGURES)
    done, said = half_hour(device, 20 * len(FIGURES))
    assert done
    share = (device.now - 100) / (20 * len(FIGURES))
    assert 0.9 < share <= 1, "the time is used and kept"
    assert [line.partition(":")[0] for line in said if line[0] != " "] == [
        "self-check",
        "benchmark",
        "trainings",
    ]
    assert all(line.endswith(" s") for line in said if line[0] != " ")
    first = {run.experiment for run in stored() if run.seed == 0}
    assert first == set(FIGURES), "a curve of every figure"
    assert sum(run.seed > 0 for run in stored()) < len(stored()) / 2
    rows = len(stored())
    for _ in range(40):
        before, started = len(stored()), device.now
        half_hour(device, 120)
        assert device.now - started <= 120
        if len(stored()) == wanted:
            break
        assert len(stored()) > before
    assert len(stored()) == wanted > rows


def test_nothing_is_trained_on_a_device_that_computes_something_else(device):
    device.failures = ["mahdavi-fig2a: captured and single steps differ by up to 1.0e-03"]
    done, said = half_hour(device, 120)
    assert not done
    assert stored() == []
    assert said[0] == f"self-check: {device.failures[0]}"
    assert said[1].startswith("self-check: 8 kinds of training, 1 differences, so nothing is")


def test_the_sample_of_the_self_check_has_every_model_and_task():
    kinds = {(run.model, run.task, run.context) for [run, *_] in gpu.samples()}
    assert kinds == {
        (run.model, run.task, run.context)
        for name in experiments.EXPERIMENTS
        for run in experiments.runs(name, "quick")
    }


def test_the_command_for_a_gpu_runs_on_a_cpu(capsys, monkeypatch):
    """Everything real, but few steps of the check and of the benchmark, and one figure."""
    for table in ("PUBLISHED", "EXPERIMENTS"):
        monkeypatch.setattr(gpu, table, {"dana-exp6": experiments.PUBLISHED["dana-exp6"]})
    monkeypatch.setattr(gpu, "CHECKED_STEPS", 3)
    monkeypatch.setattr(gpu, "BENCHMARK", 1e-6)
    options = ["--device", "cpu", "--profile", "quick", "--workers", "1"]
    assert cli.main(["gpu", "--minutes", "20", *options]) == 0
    check, speed, *units, rows = capsys.readouterr().out.splitlines()
    assert check.startswith("self-check: 1 kinds of training, no difference: ")
    assert speed.startswith("benchmark: float32 products ")
    assert "; aot bigrams " in speed
    assert [line.split(":")[0] for line in units] == [
        f"  dana-exp6 d=2 d_h=2 H={H} n=2 T=2048" for H in (1, 5, 9, 1, 5, 9)
    ]
    assert rows.startswith("trainings: 6 rows added in 6 units, 0 missing: ")
    assert cli.main(["gpu", "--minutes", "-3", *options]) == 1
    assert capsys.readouterr().err == "minutes: got -3.0; expected a number above 0\n"
