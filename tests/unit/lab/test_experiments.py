"""Running a study is resumable, on any executor; its rows are read in one way."""

import importlib.util
import itertools
import math
import os
import signal
import threading
from concurrent import futures
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor

import pandas as pd
import pytest
import torch

from attnmem.lab import experiments, training
from attnmem.lab import store as storage
from attnmem.lab.store import Outcome
from attnmem.lab.study import ALL, Selection

pytestmark = pytest.mark.usefixtures("store")


def of(name, profile="paper", seeds=None, **chosen):
    return experiments.runs(name, profile, seeds, **chosen)


def outcome(accuracy=0.5, loss=1.0, **more):
    return Outcome(accuracy, loss, 0.0, "cpu", "2", "abc", **more)


def put(runs):
    """Rows of these trainings, as ``instant`` would leave them."""
    storage.append((run, outcome(run.seed / 10, float(run.H))) for run in runs)


def heads(name, profile="paper"):
    return sorted(set(experiments.table(name, profile).H))


def around(monkeypatch, before):
    """Call a function with the runs before each training."""
    train = training.train

    def wrapped(runs, **options):
        before(runs)
        return train(runs, **options)

    monkeypatch.setattr(training, "train", wrapped)


@pytest.mark.usefixtures("instant")
def test_a_run_resumes_and_reports():
    seen = []
    assert experiments.run("dana-exp6", "paper", "cpu", seeds=3, report=seen.append) == 18
    assert [(p.done, p.units, p.rows) for p in seen] == [(i, 6, 3 * i) for i in range(1, 7)]
    assert experiments.run("dana-exp6", "paper", "cpu", seeds=3) == 0
    assert experiments.run("dana-exp6", "paper", "cpu", seeds=4) == 6
    table = experiments.table("dana-exp6", "paper")
    assert len(table) == 24
    assert (table.loss == table.H).all()


@pytest.fixture
def clock(monkeypatch, instant):
    """A clock that moves by a minute when a unit is trained."""
    now = [1000.0]
    around(monkeypatch, lambda runs: now.append(now[-1] + 60))
    monkeypatch.setattr(experiments, "monotonic", lambda: now[-1])
    return now


@pytest.mark.parametrize(("minutes", "units"), [(0.5, 1), (1, 1), (1.001, 2)])
def test_no_unit_starts_after_the_time_limit(clock, minutes, units):
    seen, options = [], {"limit_minutes": minutes}
    assert experiments.run("dana-exp2", "paper", "cpu", report=seen.append, **options) == units
    assert (seen[-1].seconds, len(clock)) == (60 * units, units + 1)
    assert len(experiments.rows("dana-exp2", "paper")) == units


def test_run_refuses_limits_in_which_nothing_is_done():
    for name, value in (("limit_minutes", 0), ("limit_minutes", math.nan), ("workers", 0)):
        with pytest.raises(ValueError, match=rf"^{name}: got {value}; expected "):
            experiments.run("dana-exp6", "quick", "cpu", **{name: value})


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
def held(monkeypatch, instant):
    pool = Held()
    monkeypatch.setattr(experiments.futures, "wait", lambda in_flight, return_when: pool.let_go())
    return pool


def test_units_in_flight_are_at_most_the_workers(held):
    for name, workers, units in (("dana-exp2", 3, 10), ("dana-exp6", 2, 6)):
        held.most = 0
        assert experiments.run(name, "paper", "cpu", held, seeds=1, workers=workers) == units
        assert held.most == workers
    assert experiments.run("dana-exp3", "paper", "cpu", held, seeds=1) == held.most == 11, "all"


def test_a_limit_on_an_executor_asks_for_its_workers(clock, held):
    with pytest.raises(ValueError, match=r"^workers: got None; expected how many units"):
        experiments.run("dana-exp6", "quick", "cpu", held, limit_minutes=1)
    options = {"limit_minutes": 1.5, "workers": 3}
    assert experiments.run("dana-exp2", "paper", "cpu", held, **options) == 4
    assert len(clock) - 1 == 4, "three at the start, one after a minute"


def test_only_workers_elsewhere_may_have_another_gpu(held, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=r"^device: got .cuda:1.; expected a GPU that"):
        experiments.choose_device("cuda:1")
    with ThreadPoolExecutor(2) as pool:
        for executor in (None, pool):
            with pytest.raises(ValueError, match=r"^device: got .cuda:1.; expected a GPU that"):
                experiments.run("dana-exp6", "quick", "cuda:1", executor)
    assert experiments.run("dana-exp6", "quick", "cuda:1", held) == 6
    assert {*experiments.table("dana-exp6", "quick").device} == {"cuda:1"}


@pytest.mark.parametrize("what", ["training", "storing"])
def test_an_error_keeps_the_rows_in_flight(monkeypatch, instant, what):
    """Of all that are given out no other is, and none is cancelled."""

    def breaks(runs):
        if runs[0].H == 1:
            raise RuntimeError("out of memory")

    wait = futures.wait
    monkeypatch.setattr(
        experiments.futures, "wait", lambda in_flight, return_when: wait([next(iter(in_flight))])
    )

    if what == "training":
        around(monkeypatch, breaks)
    else:
        append = storage.append
        monkeypatch.setattr(storage, "append", lambda r, to: breaks([r[0][0]]) or append(r, to))
    with ThreadPoolExecutor(2) as pool, pytest.raises(RuntimeError, match="out of memory"):
        experiments.run("dana-exp6", "paper", "cpu", pool, workers=3)
    assert heads("dana-exp6") == [5, 9], "the three first"


def test_run_refuses_an_unwritable_store_at_once(held, store):
    store.touch()
    with pytest.raises(OSError, match=str(store)):
        experiments.run("dana-exp6", "quick", "cpu", held)
    assert held.given == []


def test_an_interrupt_keeps_the_rows_in_flight(instant, monkeypatch):
    """Of three units, two have begun when the caller wants no more; the third is cancelled."""
    begun, go, as_completed = threading.Barrier(3), threading.Event(), futures.as_completed
    around(monkeypatch, lambda runs: (begun.wait(), go.wait()))

    def interrupted(in_flight, return_when):
        begun.wait()
        raise KeyboardInterrupt

    def all_of(waited):
        go.set()
        return as_completed(waited)

    monkeypatch.setattr(experiments.futures, "wait", interrupted)
    monkeypatch.setattr(experiments.futures, "as_completed", all_of)
    with ThreadPoolExecutor(2) as pool, pytest.raises(KeyboardInterrupt):
        experiments.run("dana-exp6", "paper", "cpu", pool, workers=3)
    assert heads("dana-exp6") == [1, 5]


def test_a_state_is_kept_until_the_rows_are_stored(monkeypatch, store, tmp_path):
    """The store breaks while a training ends: the next process has its state to go on from."""
    monkeypatch.setattr(training.Checkpoint, "interval", 0.0)

    def run(root):
        experiments.run("dana-exp6", "quick", "cpu", seeds=1, where={"H": 1}, root=root)

    for root, folder in ((None, store), (tmp_path / "named", tmp_path / "named")):
        with monkeypatch.context() as patch:
            patch.setattr(storage, "append", lambda rows, root: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                run(root)
        assert len([*(folder / ".checkpoints").iterdir()]) == 1
        run(root)
        assert not [*(folder / ".checkpoints").iterdir()]
        assert len(experiments.table("dana-exp6", "quick", root=root)) == 1


def test_workers_train_what_one_process_trains(store):
    """Processes, and the threads that a GPU's streams need."""
    found = {}
    for device, kind in (("cpu", ProcessPoolExecutor), ("cuda", ThreadPoolExecutor), (None, None)):
        with experiments.pool(2 if device else 1, device or "cpu") as workers:
            assert kind is None or isinstance(workers, kind)
            assert experiments.run("dana-exp6", "quick", "cpu", workers, seeds=1) == 3
        table = experiments.table("dana-exp6", "quick").sort_values("H")
        found[device] = table.accuracy.to_numpy()
        (store / "dana-exp6" / "quick.csv").unlink()
    assert found["cpu"] == pytest.approx(found[None], abs=0.02)
    assert found["cuda"] == pytest.approx(found[None], abs=0.02)


def test_a_gpu_has_no_more_workers_than_streams():
    assert experiments.pool(31, "cuda")
    assert experiments.pool(32, "cpu")
    with pytest.raises(ValueError, match=r"^workers: got 32; expected at most 31 on a GPU"):
        experiments.pool(32, "cuda")


def test_what_is_in_flight_is_not_given_out_again(held, monkeypatch):
    """Groups depend on the rows that are there, so they may change while some are trained."""
    sizes = itertools.cycle([2, 3, 2])

    def stacks(runs):
        size = next(sizes)
        return [runs[i : i + size] for i in range(0, len(runs), size)]

    trained = []
    monkeypatch.setattr(training, "stacks", stacks)
    around(monkeypatch, trained.extend)
    assert experiments.run("dana-exp6", "paper", "cpu", held, seeds=2, workers=3) == 12
    assert len({run.key for run in trained}) == len(trained) == 12


@pytest.mark.usefixtures("instant")
def test_recompute_trains_what_was_shipped_again(monkeypatch):
    shipped = [run for run in of("dana-exp6") if run.seed < 2]
    storage.append([(run, outcome(loss=-1.0)) for run in shipped], storage.SHIPPED)
    again = {"seeds": 2, "recompute": True}
    assert experiments.run("dana-exp6", "paper", "cpu", seeds=2) == 0
    assert experiments.run("dana-exp6", "paper", "cpu", **again) == 12
    assert experiments.run("dana-exp6", "paper", "cpu", **again) == 0
    assert (experiments.table("dana-exp6", "paper").loss > 0).all()
    monkeypatch.setenv("ATTNMEM_MEASUREMENTS", str(storage.SHIPPED))
    with pytest.raises(ValueError, match=r"^recompute: got True; .* variable ATTNMEM_MEASUREMENTS"):
        experiments.run("dana-exp6", "paper", "cpu", **again)


HAS_DASK = importlib.util.find_spec("distributed") is not None


@pytest.mark.skipif(not HAS_DASK, reason="needs the extra 'cluster', which make test installs")
def test_a_dask_worker_killed_in_a_sweep_loses_nothing(tmp_path):
    from distributed import Client, LocalCluster

    with (
        LocalCluster(2, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        workers = []

        def kill_one_worker(progress):
            if not workers:
                workers.append(client.submit(os.getpid, pure=False).result())
                os.kill(workers[0], signal.SIGKILL)

        pool = client.get_executor()
        added = experiments.run("dana-exp3", "quick", "cpu", pool, report=kill_one_worker)
    assert workers
    assert added == 6
    keys = {run.key for run in of("dana-exp3", "quick")}
    assert set(experiments.rows("dana-exp3", "quick")) == keys


# --- reading --------------------------------------------------------------------------------------


@pytest.fixture
def said(capsys):
    return lambda: capsys.readouterr().out


def test_stored_says_that_another_profile_stands_in(said):
    with pytest.raises(ValueError, match=r"^name: got 'dana-exp6'; expected an experiment with"):
        experiments.stored("dana-exp6", "paper")
    put(of("dana-exp6", "quick"))
    steps = [
        ([], 6, "quick", "no rows of dana-exp6 in profile 'paper'; what follows is 'quick'"),
        (of("dana-exp6", where={"H": 5}), 6, "quick", "20 of 120 rows of dana-exp6 in profile"),
        (of("dana-exp6", seeds=1), 25, "paper", "25 of 120 rows of dana-exp6 in the store, pro"),
    ]
    for runs, rows, profile, words in steps:  # a grid with holes beside one without
        put(runs)
        table, found = experiments.stored("dana-exp6", "paper")
        assert (len(table), found) == (rows, profile)
        assert words in said()
    have = {name: experiments.rows(name, "paper") for name in ("dana-exp6", "dana-exp2")}
    done = [experiments.STUDIES[name].done("paper", ALL, rows) for name, rows in have.items()]
    assert done == [(25, 120), (0, 50)]


def test_stored_takes_whole_curves_if_asked_for():
    put(of("mahdavi-fig2a", "quick", 1))
    put(of("mahdavi-fig2a", seeds=1, where={"T": 20_000}))
    put(of("mahdavi-fig2a", seeds=1, where={"T": 30_000, "H": 5}))
    table, profile = experiments.stored("mahdavi-fig2a", "paper", curves="T")
    assert (set(table["T"]), len(table), profile) == ({20_000}, 8, "paper")
    for curves in (None, "H"):  # no number of heads has all its sizes
        table, profile = experiments.stored("mahdavi-fig2a", "paper", curves=curves)
        assert (len(table), profile) == (12, "quick")
    with pytest.raises(ValueError, match=r"^curves: got 'batch'; expected one of d, "):
        experiments.stored("mahdavi-fig2a", "paper", curves="batch")


def test_stored_leaves_seeds_under_way_out_of_curves():
    def seeds(most=None):
        table, profile = experiments.stored("mahdavi-fig2a", "paper", most, curves="T")
        assert profile == "paper"
        return table.groupby("T").seed.agg(lambda found: sorted(set(found))).to_dict()

    put(of("mahdavi-fig2a", seeds=1, where={"T": 10_000}))
    for T in (10_000, 20_000):
        put(of("mahdavi-fig2a", seeds=3, where={"T": T, "H": 5}))
    assert seeds() == {10_000: [0]}
    put(of("mahdavi-fig2a", seeds=2, where={"T": 10_000}))
    assert (seeds(), seeds(1)) == ({10_000: [0, 1]}, {10_000: [0]})
    put(run for run in of("mahdavi-fig2a", where={"T": 30_000}) if run.seed == (run.H > 5))
    assert seeds()[30_000] == [0, 1], "a curve that no seed has alone is that of all of them"


def test_a_column_without_values_is_of_floats():
    put(of("dana-exp5-aot", "quick"))
    width = experiments.stored("dana-exp5-aot", "quick")[0].width
    assert width.dtype == float
    assert width.isna().all()


def test_a_stored_training_can_be_repeated():
    experiments.run("dana-exp6", "quick", "cpu", seeds=1, where={"H": 5})
    now, then = experiments.repeat("dana-exp6", "quick", where={"H": 5})
    assert now == then
    now, then = experiments.repeat("dana-exp6", "quick", where={"H": 5}, epochs=3)
    assert now == then
    assert len(now) == 3
    with pytest.raises(ValueError, match=r"^where: got dana-exp6, paper, .* row is in the store"):
        experiments.repeat("dana-exp6", "quick", variant="paper")


def test_beside_published_takes_the_seeds_of_the_grid():
    put(of("dana-exp6", seeds=23))  # three more than the grid has
    put(of("dana-exp6", seeds=5, variant="paper"))  # another model
    found = experiments.beside_published("dana-exp6")
    assert found.H.tolist() == [1, 5, 9, 13, 17, 21]
    assert found.seeds.tolist() == [20] * 6
    assert found.ours.tolist() == pytest.approx([0.95] * 6)  # mean of 0, 0.1, ..., 1.9
    published = experiments.published("dana-2025").query("experiment == 'exp6'").accuracy
    assert found.difference.tolist() == pytest.approx((0.95 - published).tolist())
    assert found.error.iloc[0] == pytest.approx(0.1 * (35 / 20) ** 0.5)  # variance of 0..19 is 35


def test_diverged_trainings_are_rows_but_in_no_mean(monkeypatch, said):
    """At nine heads the seeds 1 and 3 diverge, at 21 all of them."""

    def train(runs, *, device, checkpoints):
        lost = [run.H == 21 or (run.H == 9 and run.seed in (1, 3)) for run in runs]
        each = zip(runs, lost, strict=True)
        gone = outcome(None, None, diverged=256)
        return [gone if is_lost else outcome(run.seed / 10) for run, is_lost in each]

    monkeypatch.setattr(training, "train", train)
    seen = []
    assert experiments.run("dana-exp6", "paper", "cpu", seeds=5, report=seen.append) == 30
    assert experiments.run("dana-exp6", "paper", "cpu", seeds=5) == 0, "not trained again"
    part = experiments.rows("dana-exp6", "paper")
    assert experiments.STUDIES["dana-exp6"].missing("paper", Selection(5), part) == []
    assert "dana-exp6 d=2 d_h=2 H=9 n=2 T=16384, 2 of 5 diverged" in [p.said for p in seen]
    table, _ = experiments.stored("dana-exp6", "paper", 5)
    assert "30 of 30 rows of dana-exp6 in the store, profile 'paper'; 7 of 30 div" in said()
    lost = table[(table.H == 9) & table.accuracy.isna()]
    assert sorted(zip(lost.seed, lost.diverged, strict=True)) == [(1, 256), (3, 256)]
    found = experiments.beside_published("dana-exp6").set_index("H")
    assert found.seeds.to_dict() == {1: 5, 5: 5, 9: 3, 13: 5, 17: 5}
    assert found.ours[9] == pytest.approx((0 + 0.2 + 0.4) / 3)
    assert found.ours[5] == pytest.approx(0.2)
    assert experiments.fewest_seeds(table) == 5, "a seed that diverged was trained"
    assert experiments.by_seed(table, "H").isna().loc[9].to_list() == [0, 1, 0, 1, 0]


def test_fewest_seeds_and_by_seed():
    put([*of("dana-exp6", seeds=3, where={"H": 5}), *of("dana-exp6", seeds=2, where={"H": 9})])
    table = experiments.table("dana-exp6", "paper")
    assert experiments.fewest_seeds(table) == 2
    assert experiments.fewest_seeds(pd.concat([table, table.assign(tf32=True)])) == 2, "once each"
    means = experiments.by_seed(table, "H", "loss").fillna(-1)
    assert means.to_numpy().tolist() == [[5, 5, 5], [9, 9, -1]]


@pytest.mark.parametrize(
    ("curve", "epochs"),
    [((0.5,), 1), ((0.1, 0.9, 1.0), 2), ((0.1, 0.89, 1.0), 3), ((0.9, 0.2, 1.0), 1), ((0, 0), 1)],
)
def test_epochs_to_nine_tenths_of_the_last_accuracy(curve, epochs):
    assert experiments.epochs_to(curve) == epochs


def test_spans_refuse_holes():
    rows = pd.DataFrame({"T": [20_000, 550, 1000], "n": [7, 7, 7], "width": [1, None, 2]})
    assert experiments.spans(rows, "n", "T") == "n = 7, T = 550 to 20,000"
    for field in ("width", "H"):
        with pytest.raises(ValueError, match=field):
            experiments.spans(rows, "T", field)
