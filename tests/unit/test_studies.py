"""Running a study is resumable, on any executor; its rows are read in one way."""

import importlib.util
import multiprocessing
import os
import random
import signal
import threading
import time
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor

import pytest
import torch

from attnmem import experiments, training
from attnmem import store as storage
from attnmem.store import Outcome
from attnmem.studies import run as running
from attnmem.studies.study import Place

pytestmark = pytest.mark.usefixtures("store")


def of(name, profile="paper", seeds=None, **chosen):
    return experiments.runs(name, profile, seeds, **chosen)


def put(runs):
    """Rows of these trainings, as ``instant`` would leave them."""
    storage.append((r, Outcome(r.seed / 10, float(r.H), 0.0, "cpu", "2", "abc")) for r in runs)


@pytest.mark.usefixtures("instant")
def test_a_run_resumes_and_reports():
    seen = []
    first = experiments.run("dana-exp6", "paper", "cpu", seeds=3, report=seen.append)
    assert first == 18
    assert [(p.done, p.units, p.rows) for p in seen] == [(i, 6, 3 * i) for i in range(1, 7)]
    assert experiments.run("dana-exp6", "paper", "cpu", seeds=3) == 0
    assert experiments.run("dana-exp6", "paper", "cpu", seeds=4) == 6
    table = experiments.table("dana-exp6", "paper")
    assert len(table) == 24
    assert (table.loss == table.H).all()


class Clock:
    """A clock that moves when a unit is trained."""

    def __init__(self, monkeypatch, seconds):
        self.now, self.units = 0.0, 0
        train = training.train

        def timed(runs, **options):
            self.now, self.units = self.now + seconds, self.units + 1
            return train(runs, **options)

        monkeypatch.setattr(training, "train", timed)
        monkeypatch.setattr(running, "monotonic", lambda: self.now)


@pytest.mark.parametrize(("minutes", "units"), [(0.5, 1), (1, 1), (1.001, 2), (2, 2), (2.5, 3)])
def test_no_unit_starts_after_the_time_limit(instant, monkeypatch, minutes, units):
    clock = Clock(monkeypatch, seconds=60)
    assert experiments.run("dana-exp2", "paper", "cpu", limit_minutes=minutes) == units
    assert clock.units == units
    assert len(experiments.rows("dana-exp2", "paper")) == units


@pytest.mark.parametrize("minutes", [0, -1, float("nan"), float("inf")])
def test_a_time_limit_in_which_nothing_can_be_done_is_refused(minutes):
    with pytest.raises(ValueError, match=rf"^limit_minutes: got {minutes}; expected a number abo"):
        experiments.run("dana-exp6", "quick", "cpu", limit_minutes=minutes)


class Held(Executor):
    """Keeps what it is given until the test lets it go."""

    def __init__(self):
        self.given, self.most = [], 0

    def submit(self, function, /, *args):
        self.given.append((Future(), function, args))
        self.most = max(self.most, len(self.given))
        return self.given[-1][0]

    def let_go(self):
        """As ``concurrent.futures.wait``: the first one given is done."""
        future, function, args = self.given.pop(0)
        try:
            future.set_result(function(*args))
        except RuntimeError as error:
            future.set_exception(error)
        return {future}, set()


@pytest.fixture
def held(monkeypatch):
    pool = Held()
    monkeypatch.setattr(running, "wait", lambda in_flight, return_when: pool.let_go())
    return pool


def test_no_more_units_are_given_out_than_there_are_workers(instant, held):
    assert experiments.run("dana-exp2", "paper", "cpu", held, seeds=1, workers=3) == 10
    assert held.most == 3
    held.most = 0
    assert experiments.run("dana-exp6", "paper", "cpu", held, seeds=1, workers=2) == 6
    assert held.most == 2


def test_units_in_flight_at_the_time_limit_are_kept_and_no_others_begin(instant, monkeypatch, held):
    clock = Clock(monkeypatch, seconds=60)
    assert experiments.run("dana-exp2", "paper", "cpu", held, workers=3, limit_minutes=1.5) == 4
    assert clock.units == 4, "three at the start, one after a minute"
    assert len(experiments.rows("dana-exp2", "paper")) == 4


def test_a_limit_on_an_executor_of_unknown_size_asks_for_its_workers(instant, held):
    with pytest.raises(ValueError, match=r"^workers: got None; expected how many units"):
        experiments.run("dana-exp6", "quick", "cpu", held, limit_minutes=1)
    assert (
        experiments.run("dana-exp6", "paper", "cpu", held, limit_minutes=1, workers=2, seeds=1) == 6
    )
    assert held.most == 2
    assert experiments.run("dana-exp2", "paper", "cpu", held, seeds=1) == 10
    assert held.most == 10, "without a limit all are given at once"


def test_only_workers_elsewhere_may_have_a_gpu_that_is_not_here(instant, held, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=r"^device: got .cuda:1.; expected a GPU that this"):
        experiments.run("dana-exp6", "quick", "cuda:1")
    with ThreadPoolExecutor(2) as pool, pytest.raises(ValueError, match=r"^device: got .cuda:1."):
        experiments.run("dana-exp6", "quick", "cuda:1", pool)
    assert experiments.run("dana-exp6", "quick", "cuda:1", held) == 6
    assert {*experiments.table("dana-exp6", "quick").device} == {"cuda:1"}


def test_an_error_in_a_unit_keeps_the_rows_of_those_in_flight(instant, monkeypatch, held):
    train = training.train

    def breaks(runs, **options):
        if runs[0].H == 1:
            raise RuntimeError("out of memory")
        return train(runs, **options)

    monkeypatch.setattr(training, "train", breaks)
    with pytest.raises(RuntimeError, match="out of memory"):
        experiments.run("dana-exp6", "paper", "cpu", held, workers=3)
    assert sorted(set(experiments.table("dana-exp6", "paper").H)) == [5, 9], "the three first"


def test_rows_that_cannot_be_stored_do_not_cost_those_of_other_units(instant, monkeypatch, held):
    append = storage.append

    def full(rows):
        if rows[0][0].H == 1:
            raise OSError("no space left")
        return append(rows)

    monkeypatch.setattr(storage, "append", full)
    with pytest.raises(OSError, match="no space left"):
        experiments.run("dana-exp6", "paper", "cpu", held, workers=3)
    assert sorted(set(experiments.table("dana-exp6", "paper").H)) == [5, 9], "the three first"


def test_a_store_that_cannot_be_written_to_is_said_before_anything_is_measured(instant, store):
    store.touch()
    with pytest.raises(OSError, match=str(store)):
        experiments.run("dana-exp6", "quick", "cpu", Held())


def test_who_is_interrupted_has_the_rows_of_the_units_in_flight(instant, monkeypatch):
    """Of three units, two have begun when the caller wants no more; the third is cancelled."""
    go, train = threading.Event(), training.train

    def slow(runs, **options):
        go.wait()
        return train(runs, **options)

    monkeypatch.setattr(training, "train", slow)

    def interrupted(in_flight, return_when):
        threading.Timer(0.2, go.set).start()
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "wait", interrupted)
    with ThreadPoolExecutor(2) as pool, pytest.raises(KeyboardInterrupt):
        experiments.run("dana-exp6", "paper", "cpu", pool, workers=3)
    assert sorted(set(experiments.table("dana-exp6", "paper").H)) == [1, 5]


def test_a_state_is_kept_until_the_rows_are_stored(monkeypatch, store):
    """The store breaks while a training ends: the next process has its state to go on from."""
    monkeypatch.setattr("attnmem.training.checkpoints.EVERY", 0.0)
    left = store / ".checkpoints"
    with monkeypatch.context() as patch:
        patch.setattr(storage, "append", lambda rows: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            experiments.run("dana-exp6", "quick", "cpu", seeds=1, where={"H": 1})
    assert len([*left.iterdir()]) == 1
    experiments.run("dana-exp6", "quick", "cpu", seeds=1, where={"H": 1})
    assert not [*left.iterdir()]


def test_several_studies_are_one_queue(instant, held):
    jobs = [running.Job("dana-exp6", "quick"), running.Job("dana-exp2", "quick")]
    seen = []
    assert running.run_jobs(jobs, "cpu", held, report=seen.append) == 12
    assert [(p.done, p.units, p.rows) for p in seen] == [(i, 6, 2 * i) for i in range(1, 7)]
    assert seen[-1].seconds_left == 0
    assert running.run_jobs(jobs, "cpu", held) == 0


@pytest.mark.usefixtures("instant")
def test_any_executor_gives_the_same_rows(store):
    with ThreadPoolExecutor(3) as pool:
        assert experiments.run("dana-exp2", "paper", "cpu", pool) == 50
    by_threads = {k: o for k, (_, o) in experiments.rows("dana-exp2", "paper").items()}
    (store / "dana-exp2" / "paper.csv").unlink()
    experiments.run("dana-exp2", "paper", "cpu")
    assert {k: o for k, (_, o) in experiments.rows("dana-exp2", "paper").items()} == by_threads


def test_workers_train_what_one_process_trains(store):
    """Processes, and the threads that a GPU's streams need."""
    found = {}
    for device, kind in (("cpu", ProcessPoolExecutor), ("cuda", ThreadPoolExecutor), (None, None)):
        with running.pool(2 if device else 1, device or "cpu") as workers:
            assert kind is None or isinstance(workers, kind)
            assert experiments.run("dana-exp6", "quick", "cpu", workers, seeds=1) == 3
        table = experiments.table("dana-exp6", "quick").sort_values("H")
        found[device] = table.accuracy.to_numpy()
        (store / "dana-exp6" / "quick.csv").unlink()
    assert found["cpu"] == pytest.approx(found[None], abs=0.02)
    assert found["cuda"] == pytest.approx(found[None], abs=0.02)


def test_a_gpu_has_no_more_workers_than_streams():
    with running.pool(31, "cuda") as workers:
        assert isinstance(workers, ThreadPoolExecutor)
    with pytest.raises(ValueError, match=r"^workers: got 32; expected at most 31 on a GPU"):
        running.pool(32, "cuda")
    with running.pool(32, "cpu") as workers:
        assert isinstance(workers, ProcessPoolExecutor)


def test_what_is_in_flight_is_not_given_out_again_in_other_groups(monkeypatch):
    """Groups depend on the memory that is left, so they may change while some are trained."""
    size = 2

    def stacks(runs, device, workers):
        return [runs[i : i + size] for i in range(0, len(runs), size)]

    monkeypatch.setattr(training, "stacks", stacks)
    jobs, rows = [running.Job("dana-exp6", "quick")], {("dana-exp6", "quick"): {}}
    queue = running.queue(jobs, rows, Place(workers=3))
    given = [next(queue)[1] for _ in range(2)]
    size = 3
    for run in given[1]:
        rows["dana-exp6", "quick"][run.key] = run, Outcome(0.5, 0.1, 1.0, "cpu", "2", "abc")
    given += [unit for _, unit in iter(queue.__next__, None)]
    keys = [run.key for unit in given for run in unit]
    assert sorted(keys) == sorted(run.key for run in of("dana-exp6", "quick"))


@pytest.mark.usefixtures("instant")
def test_a_sweep_killed_at_twenty_moments_ends_with_exactly_its_rows():
    fork, rng = multiprocessing.get_context("fork"), random.Random(1)
    arguments, seeds = ("dana-exp1", "paper", "cpu"), {"seeds": 1}
    for _ in range(20):
        sweep = fork.Process(target=experiments.run, args=arguments, kwargs=seeds)
        sweep.start()
        time.sleep(rng.uniform(0.0, 0.05))
        os.kill(sweep.pid, signal.SIGKILL)
        sweep.join()
    killed = len(experiments.rows("dana-exp1", "paper"))
    assert killed < 77, "the kills came too late to test anything"
    experiments.run(*arguments, **seeds)
    rows = experiments.rows("dana-exp1", "paper")
    assert sorted(rows) == sorted(run.key for run in of("dana-exp1", seeds=1))
    for run, outcome in rows.values():
        assert (outcome.accuracy, outcome.loss) == (run.seed / 10, run.H)


def test_an_exception_in_a_unit_keeps_the_rows_before_it(monkeypatch, instant):
    train = training.train

    def breaks(runs, **options):
        if runs[0].H == 9:
            raise RuntimeError("out of memory")
        return train(runs, **options)

    monkeypatch.setattr(training, "train", breaks)
    with pytest.raises(RuntimeError, match="out of memory"):
        experiments.run("dana-exp6", "paper", "cpu")
    assert sorted(set(experiments.table("dana-exp6", "paper").H)) == [1, 5]


@pytest.mark.usefixtures("instant")
def test_coverage_counts_both_profiles():
    experiments.run("dana-exp6", "paper", "cpu", seeds=2)
    experiments.run("dana-exp2", "quick", "cpu")
    table = experiments.coverage(["dana-exp6", "dana-exp2"])
    assert table.loc["dana-exp6"].tolist()[1:] == [120, 12, 6, 0]
    assert table.loc["dana-exp2"].tolist()[1:] == [50, 0, 6, 6]


@pytest.mark.usefixtures("instant")
def test_missing_rows_are_said_to_be_missing(capsys):
    with pytest.raises(ValueError, match=r"^name: got 'dana-exp6'; expected an experiment with"):
        experiments.stored("dana-exp6", "paper")
    experiments.run("dana-exp6", "quick", "cpu")
    table, profile = experiments.stored("dana-exp6", "paper")
    assert (len(table), profile) == (6, "quick")
    assert "no rows of dana-exp6 in profile 'paper'; what follows is 'quick'" in said(capsys)
    experiments.run("dana-exp6", "paper", "cpu", where={"H": 5})
    table, profile = experiments.stored("dana-exp6", "paper")
    assert (len(table), profile) == (6, "quick"), "a grid with holes beside one without"
    assert "20 of 120 rows of dana-exp6 in profile 'paper'; what follows" in said(capsys)
    experiments.run("dana-exp6", "paper", "cpu", seeds=1)
    table, profile = experiments.stored("dana-exp6", "paper")
    assert (len(table), profile) == (25, "paper")
    assert "25 of 120 rows" in said(capsys)


def said(capsys):
    return capsys.readouterr().out


@pytest.mark.usefixtures("instant")
def test_a_grid_with_holes_is_better_than_none():
    experiments.run("dana-exp6", "paper", "cpu", where={"H": 5})
    table, profile = experiments.stored("dana-exp6", "quick")
    assert (len(table), profile) == (20, "paper")


@pytest.mark.usefixtures("instant")
def test_whole_curves_of_a_grid_with_holes_are_enough_if_asked_for():
    experiments.run("mahdavi-fig2a", "quick", "cpu", seeds=1)
    experiments.run("mahdavi-fig2a", "paper", "cpu", seeds=1, where={"T": 20_000})
    experiments.run("mahdavi-fig2a", "paper", "cpu", seeds=1, where={"T": 30_000, "H": 5})
    table, profile = experiments.stored("mahdavi-fig2a", "paper", curves="T")
    assert (set(table["T"]), len(table), profile) == ({20_000}, 8, "paper")
    table, profile = experiments.stored("mahdavi-fig2a", "paper")
    assert (len(table), profile) == (12, "quick")
    table, profile = experiments.stored("mahdavi-fig2a", "paper", curves="H")
    assert (len(table), profile) == (12, "quick")  # no number of heads has all its sizes
    with pytest.raises(ValueError, match=r"^curves: got 'batch'; expected one of d, "):
        experiments.stored("mahdavi-fig2a", "paper", curves="batch")


@pytest.mark.usefixtures("instant")
def test_seeds_that_are_under_way_do_not_count_on_whole_curves():
    def seeds():
        table, profile = experiments.stored("mahdavi-fig2a", "paper", curves="T")
        assert profile == "paper"
        return table.groupby("T").seed.agg(lambda found: sorted(set(found))).to_dict()

    experiments.run("mahdavi-fig2a", "paper", "cpu", seeds=1, where={"T": 10_000})
    experiments.run("mahdavi-fig2a", "paper", "cpu", seeds=3, where={"T": 10_000, "H": 5})
    experiments.run("mahdavi-fig2a", "paper", "cpu", seeds=3, where={"T": 20_000, "H": 5})
    assert seeds() == {10_000: [0]}
    experiments.run("mahdavi-fig2a", "paper", "cpu", seeds=2, where={"T": 10_000})
    assert seeds() == {10_000: [0, 1]}
    table, _ = experiments.stored("mahdavi-fig2a", "paper", 1, curves="T")
    assert set(table.seed) == {0}


@pytest.mark.usefixtures("instant")
def test_a_curve_that_no_seed_has_alone_is_that_of_all_of_them():
    wanted = of("mahdavi-fig2a", where={"T": 10_000})
    have = [run for run in wanted if run.seed == (run.H > 5)]
    put(have)
    table, _ = experiments.stored("mahdavi-fig2a", "paper", curves="T")
    assert len(table) == len(have) == 8


@pytest.mark.usefixtures("instant")
def test_parameters_are_counted_for_every_row():
    experiments.run("dana-exp5-mlp", "quick", "cpu")
    table, _ = experiments.stored("dana-exp5-mlp", "quick")
    counted = experiments.with_parameters(table, "dana-exp5-mlp", "quick")
    for row in counted.itertuples():
        N, d, w = row.N, row.d, row.width or 0
        assert row.parameters == 2 * N * d + 2 * d + 4 * d * d + (2 * d * w + w if w else 0)
    with pytest.raises(ValueError, match=r"^table: got a row with .*expected rows of dana-exp1"):
        experiments.with_parameters(table, "dana-exp1", "quick")


@pytest.mark.usefixtures("instant")
def test_recomputing_trains_what_was_shipped_again_and_its_rows_count(monkeypatch):
    shipped = [run for run in of("dana-exp6") if run.seed < 2]
    old = Outcome(0.5, -1.0, 0.0, "cpu", "1", "old")
    storage.append([(run, old) for run in shipped], storage.SHIPPED)
    again = {"seeds": 2, "recompute": True}
    assert experiments.run("dana-exp6", "paper", "cpu", seeds=2) == 0
    assert experiments.run("dana-exp6", "paper", "cpu", **again) == 12
    assert experiments.run("dana-exp6", "paper", "cpu", **again) == 0
    assert (experiments.table("dana-exp6", "paper").loss > 0).all()
    monkeypatch.setenv("ATTNMEM_MEASUREMENTS", str(storage.SHIPPED))
    with pytest.raises(ValueError, match=r"^recompute: got True; expected ATTNMEM_MEASUREMENTS"):
        experiments.run("dana-exp6", "paper", "cpu", **again)


def test_a_stored_training_can_be_repeated():
    experiments.run("dana-exp6", "quick", "cpu", seeds=1, where={"H": 5})
    now, then = experiments.repeat("dana-exp6", "quick", where={"H": 5})
    assert now == then
    now, then = experiments.repeat("dana-exp6", "quick", where={"H": 5}, epochs=3)
    assert now == then
    assert len(now) == 3
    with pytest.raises(ValueError, match=r"^where: got dana-exp6, paper, .* row is in the store"):
        experiments.repeat("dana-exp6", "quick", variant="paper")


HAS_DASK = importlib.util.find_spec("distributed") is not None


@pytest.mark.skipif(not HAS_DASK, reason="needs the extra 'cluster', which make test installs")
def test_a_dask_worker_killed_in_mid_sweep_loses_nothing(tmp_path):
    from distributed import Client, LocalCluster

    with (
        LocalCluster(2, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        killed = []

        def kill_one_worker(progress):
            if not killed:
                killed.append(client.submit(os.getpid, pure=False).result())
                os.kill(killed[0], signal.SIGKILL)

        pool = client.get_executor()
        added = experiments.run("dana-exp3", "quick", "cpu", pool, report=kill_one_worker)
    assert killed
    assert added == 6
    assert sorted(experiments.rows("dana-exp3", "quick")) == sorted(
        run.key for run in of("dana-exp3", "quick")
    )


def test_published_points_stand_beside_the_mean_of_the_seeds_of_the_grid(instant):
    put(of("dana-exp6", seeds=23))  # three more than the grid has
    put(of("dana-exp6", seeds=5, variant="paper"))  # another model
    found = experiments.beside_published("dana-exp6")
    assert found.H.tolist() == [1, 5, 9, 13, 17, 21]
    assert found.seeds.tolist() == [20] * 6
    assert found.ours.tolist() == pytest.approx([0.95] * 6)  # mean of 0, 0.1, ..., 1.9
    published = experiments.published("dana-2025").query("experiment == 'exp6'").accuracy
    assert found.difference.tolist() == pytest.approx((0.95 - published).tolist())
    assert found.error.iloc[0] == pytest.approx(0.1 * (35 / 20) ** 0.5)  # variance of 0..19 is 35


def test_published_points_of_attention_and_of_mlp_are_kept_apart(instant):
    experiments.run("dana-exp5-mlp", "paper", "cpu", where={"d": 7}, seeds=2)
    [d] = {*experiments.beside_published("dana-exp5-mlp").d}
    assert d == 7
    assert experiments.beside_published("dana-exp5-mlp").width.tolist() == [*range(0, 421, 70)]
    assert experiments.beside_published("dana-exp5-aot").empty


def test_the_fewest_seeds_of_any_training_count(instant):
    experiments.run("dana-exp6", "paper", "cpu", seeds=3, where={"H": 5})
    experiments.run("dana-exp6", "paper", "cpu", seeds=2, where={"H": 9})
    table = experiments.table("dana-exp6", "paper")
    assert experiments.fewest_seeds(table) == 2
    assert experiments.fewest_seeds(table[table.H == 5]) == 3


# --- trainings that diverged ----------------------------------------------------------------------


@pytest.fixture
def two_diverge(monkeypatch):
    """Of every unit of Exp. 6, the seeds 1 and 3 diverge at nine heads."""

    def train(runs, *, device, checkpoints):
        origin = (0.0, device, "2", "abc")
        return [
            Outcome(None, None, *origin, diverged=256)
            if run.H == 9 and run.seed in (1, 3)
            else Outcome(run.seed / 10, 1.0, *origin)
            for run in runs
        ]

    monkeypatch.setattr(training, "train", train)


def test_a_training_that_diverged_is_done_and_stays_in_tables(two_diverge, capsys):
    said_so = []
    options = {"seeds": 5, "report": lambda progress: said_so.append(progress.said)}
    assert experiments.run("dana-exp6", "paper", "cpu", **options) == 30
    assert experiments.run("dana-exp6", "paper", "cpu", seeds=5) == 0, "not trained again"
    assert experiments.missing("dana-exp6", "paper", 5) == []
    assert [line for line in said_so if "diverged" in line] == [
        "dana-exp6 d=2 d_h=2 H=9 n=2 T=16384, 2 of 5 diverged"
    ]
    capsys.readouterr()
    table, _ = experiments.stored("dana-exp6", "paper", 5)
    assert "30 of 30 rows of dana-exp6 in the store, profile 'paper'; 2 of 30 div" in said(capsys)
    assert len(table) == 30
    lost = table[table.accuracy.isna()]
    assert sorted(zip(lost.H, lost.seed, lost.diverged, strict=True)) == [(9, 1, 256), (9, 3, 256)]


def test_means_leave_out_what_diverged(two_diverge):
    experiments.run("dana-exp6", "paper", "cpu", seeds=5)
    table = experiments.beside_published("dana-exp6").set_index("H")
    assert table.seeds.to_dict() == {H: 3 if H == 9 else 5 for H in (1, 5, 9, 13, 17, 21)}
    assert table.ours[9] == pytest.approx((0 + 0.2 + 0.4) / 3)
    assert table.ours[5] == pytest.approx(0.2)


def test_a_point_of_which_all_diverged_is_left_out():
    origin = (0.0, "cpu", "2", "abc")
    runs = of("dana-exp6", seeds=2)
    lost = [(run, Outcome(None, None, *origin, diverged=256)) for run in runs if run.H == 9]
    storage.append([*lost, *((run, Outcome(0.5, 1.0, *origin)) for run in runs if run.H != 9)])
    assert experiments.beside_published("dana-exp6").H.tolist() == [1, 5, 13, 17, 21]
