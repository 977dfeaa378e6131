"""The grids are the published ones; running them is resumable, on any executor."""

import dataclasses
import importlib.util
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import pytest

from attnmem import __main__ as cli
from attnmem import experiments, results, training
from attnmem.results import Outcome

pytestmark = pytest.mark.usefixtures("store")


@pytest.fixture
def instant(monkeypatch):
    """Training that takes no time and returns what depends on the run only."""

    def train(runs, *, device, tf32):
        time.sleep(0.002)
        return [Outcome(run.seed / 10, float(run.H), 0.0, device, "2", "abc", tf32) for run in runs]

    monkeypatch.setattr(training, "train", train)


def of(name, profile="paper"):
    return experiments.runs(name, profile)


def values(name, field):
    return sorted({getattr(run, field) for run in of(name)})


COUNTS = {
    "dana-exp1": 11 * 7 * 5,
    "dana-exp2": 10 * 5,
    "dana-exp3": 11 * 5,
    "dana-exp5-aot": 3 * 7 * 5,
    "dana-exp5-mlp": 3 * 7 * 5,
    "dana-exp6": 6 * 20,
    "dana-dim1": 3 * 6 * 5,
    "dana-dim2": 11 * 5,
    "dana-dim5": 3 * 6 * 5,
    "dana-depth1": 3 * 6 * 5,
    "dana-depth2": 10 * 5,
    "dana-depth5": 3 * 6 * 5,
    "mahdavi-fig2a": 8 * 4 * 6,
    "mahdavi-fig2b": 8 * 4 * 6,
    "mahdavi-fig2c": 12 * 3 * 6,
    "mahdavi-fig3": 2 * 6,
    "mahdavi-fig4-heads": 8 * 6 * 6,
    "mahdavi-fig4-context": 8 * 5 * 6,
    "mahdavi-fig5-shared-heads": 8 * 5 * 6,
    "mahdavi-fig5-shared-context": 8 * 4 * 6,
    "mahdavi-fig5-random-heads": 8 * 5 * 6,
    "mahdavi-fig5-random-context": 8 * 5 * 6,
}


def test_every_published_experiment_has_every_run():
    assert {name: len(of(name)) for name in experiments.PUBLISHED} == COUNTS
    mahdavi = [n for n in COUNTS if n.startswith("mahdavi")]
    assert sum(len(experiments.runs(n, "paper", seeds=1)) for n in mahdavi) == 342


def test_no_two_runs_are_the_same():
    runs = [
        run
        for name, experiment in experiments.EXPERIMENTS.items()
        for profile in experiments.PROFILES
        for variant in experiment.variants
        for run in experiments.runs(name, profile, variant=variant)
    ]
    assert len({run.key for run in runs}) == len(runs)
    assert len({run.key for run in runs}) > sum(COUNTS.values())


def test_variants_differ_by_their_name_only():
    assert [run.variant for run in experiments.runs("dana-exp6", "paper", 1, variant="paper")] == (
        6 * ["paper"]
    )
    for name in ("dana-exp2", "dana-exp3", "dana-exp6", "dana-dim2"):
        for variant in experiments.EXPERIMENTS[name].variants:
            theirs = [
                dataclasses.replace(run, variant="code")
                for run in experiments.runs(name, "paper", variant=variant)
            ]
            assert theirs == of(name)


def test_a_part_of_a_grid():
    part = experiments.runs("dana-exp1", "paper", 2, where={"d": 10, "H": 6})
    assert [(run.d, run.H, run.seed) for run in part] == [(10, 6, 0), (10, 6, 1)]
    assert set(part) < set(of("dana-exp1"))


def test_the_other_trainings_of_experiment_5_change_one_thing():
    for model in ("aot", "mlp"):
        [published] = {
            dataclasses.replace(run, seed=0)
            for run in experiments.runs(f"dana-exp5-{model}", "paper", where={"d": 10})
            if (run.H, run.width) in ((21, None), (1, 400))
        }
        for change, field, expected in (
            ("rates", "lr", {0.01, 0.03, 0.3, 1.0}),
            ("longer", "steps", {65536}),
        ):
            runs = of(f"dana-exp5-{model}-{change}")
            assert {getattr(run, field) for run in runs} == expected
            back = {"experiment": published.experiment, field: getattr(published, field), "seed": 0}
            assert {dataclasses.replace(run, **back) for run in runs} == {published}


@pytest.mark.parametrize("name", [n for n in COUNTS if n.startswith("dana")])
def test_the_learning_rates_are_those_of_the_sheet(name):
    last = 2.5e-3 if "depth" in name else 1e-4 if name in ("dana-exp5-mlp", "dana-dim5") else 5e-4
    for run in of(name):
        assert run.lr * run.lr_start == pytest.approx(2.5e-3 if "depth" in name else 1e-2)
        assert run.lr * run.lr_end == pytest.approx(last)
        assert run.steps == 64 * (run.T // run.batch)


def test_sizes_of_the_bigram_grids():
    assert values("dana-exp1", "H") == [1, 6, 11, 16, 21, 26, 31]
    assert all(run.d == run.d_h for run in of("dana-exp1"))
    assert values("dana-exp2", "d_h") == list(range(1, 11))
    assert values("dana-exp3", "d") == list(range(5, 16))
    assert {(r.d_h, r.H, r.N, r.batch, r.T) for r in of("dana-exp3")} == {(10, 20, 50, 256, 16384)}
    assert {(r.N, r.d) for r in of("dana-exp6")} == {(10, 2)}
    mlp = [r for r in of("dana-exp5-mlp") if r.d == 10]
    assert sorted({r.width for r in mlp}) == [0, 100, 200, 300, 400, 500, 600]
    assert {(r.N, r.batch, r.T) for r in mlp} == {(70, 1024, 1024 * 256)}
    assert sorted({r.width for r in of("dana-dim5") if r.d == 40}) == list(range(0, 801, 160))
    assert sorted({r.width for r in of("dana-depth5") if r.d == 7}) == list(range(0, 281, 56))
    assert {r.layers for r in of("dana-depth2")} == {3}
    assert values("dana-dim2", "d_h") == [1, *range(5, 51, 5)]


def test_parameters_of_experiment_5_are_equal_by_the_papers_count():
    for aot, mlp in zip(of("dana-exp5-aot"), of("dana-exp5-mlp"), strict=True):
        assert (aot.d, aot.seed) == (mlp.d, mlp.seed)
        assert 4 * aot.d**2 * aot.H == 4 * mlp.d**2 * mlp.H + 2 * mlp.d * mlp.width


def test_the_budget_is_one_number_of_parameters():
    runs = experiments.runs("dana-budget", "paper", variant="paper")
    assert {run.d_h for run in runs} == {1, 2, 5, 10}
    assert len({training.parameter_count(run) for run in runs}) == 1


def test_sizes_of_the_memorization_grids():
    for name in (n for n in COUNTS if n.startswith("mahdavi")):
        for run in of(name):
            least = 300_000 if name in ("mahdavi-fig2c", "mahdavi-fig3") else 50_000
            assert run.steps == max(500 * run.T // 256, least)
            assert (run.d, run.batch, run.lr, run.evaluate_every) == (64, 256, 1e-3, 500)
            assert run.context == ("random" if "fig4" in name or "random" in name else "shared")
            assert (run.N is None) == (run.task == "reals") == ("fig5" in name)
            assert run.early_stop == (name != "mahdavi-fig3" and "fig5" not in name)
    assert values("mahdavi-fig2a", "T") == [10_000, 20_000, 30_000, 40_000]
    assert values("mahdavi-fig2c", "d_h") == [*range(10, 61, 5), 64]
    assert {(r.H, r.T) for r in of("mahdavi-fig3")} == {(4, 550), (8, 1300)}
    assert values("mahdavi-fig4-heads", "T") == list(range(30_000, 130_001, 20_000))


# --- running --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("instant")
def test_a_run_resumes_and_reports():
    seen = []
    first = experiments.run("dana-exp6", "paper", "cpu", seeds=3, report=seen.append)
    assert first == 18
    assert [(p.done, p.units, p.rows) for p in seen] == [(i, 6, 3 * i) for i in range(1, 7)]
    assert experiments.run("dana-exp6", "paper", "cpu", seeds=3) == 0
    assert experiments.run("dana-exp6", "paper", "cpu", seeds=4) == 6
    table = results.table("dana-exp6", "paper")
    assert len(table) == 24
    assert (table.loss == table.H).all()


@pytest.mark.usefixtures("instant")
def test_a_time_limit_stops_between_units():
    assert experiments.run("dana-exp1", "quick", "cpu", limit_minutes=0) == 0
    added = experiments.run("dana-exp1", "paper", "cpu", limit_minutes=0.05 / 60)
    assert 0 < added < 385
    assert added % 5 == 0


@pytest.mark.usefixtures("instant")
def test_any_executor_gives_the_same_rows(store):
    with ThreadPoolExecutor(3) as pool:
        assert experiments.run("dana-exp2", "paper", "cpu", pool) == 50
    by_threads = {k: o for k, (_, o) in results.known("dana-exp2", "paper").items()}
    results.file_of("dana-exp2", "paper", store).unlink()
    experiments.run("dana-exp2", "paper", "cpu")
    assert {k: o for k, (_, o) in results.known("dana-exp2", "paper").items()} == by_threads


@pytest.mark.parametrize("device", ["cpu", "cuda"])  # processes, and what a GPU's streams need
def test_workers_train_what_one_process_trains(store, device):
    with cli._workers(2, device) as pool:
        assert isinstance(pool, ProcessPoolExecutor if device == "cpu" else ThreadPoolExecutor)
        assert experiments.run("dana-dim1", "quick", "cpu", pool) == 4
    elsewhere = results.table("dana-dim1", "quick").sort_values(["H", "seed"])
    results.file_of("dana-dim1", "quick", store).unlink()
    experiments.run("dana-dim1", "quick", "cpu")
    here = results.table("dana-dim1", "quick").sort_values(["H", "seed"])
    assert here.accuracy.to_numpy() == pytest.approx(elsewhere.accuracy.to_numpy(), abs=0.02)


@pytest.mark.usefixtures("instant")
def test_a_sweep_killed_at_twenty_moments_ends_with_exactly_its_rows():
    fork, rng = multiprocessing.get_context("fork"), random.Random(1)
    for _ in range(20):
        sweep = fork.Process(target=experiments.run, args=("dana-exp1", "paper", "cpu"))
        sweep.start()
        time.sleep(rng.uniform(0.0, 0.05))
        os.kill(sweep.pid, signal.SIGKILL)
        sweep.join()
    killed = len(results.known("dana-exp1", "paper"))
    assert killed < 385, "the kills came too late to test anything"
    experiments.run("dana-exp1", "paper", "cpu")
    rows = results.known("dana-exp1", "paper")
    assert sorted(rows) == sorted(run.key for run in of("dana-exp1"))
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
    assert sorted(set(results.table("dana-exp6", "paper").H)) == [1, 5]


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
def test_parameters_are_counted_for_every_row():
    experiments.run("dana-exp5-mlp", "quick", "cpu")
    table, _ = experiments.stored("dana-exp5-mlp", "quick")
    counted = experiments.with_parameters(table, "dana-exp5-mlp", "quick")
    for row in counted.itertuples():
        N, d, w = row.N, row.d, row.width or 0
        assert row.parameters == 2 * N * d + 2 * d + 4 * d * d + (2 * d * w + w + d if w else 0)
    with pytest.raises(ValueError, match=r"^table: got a row with .*expected rows of dana-exp1"):
        experiments.with_parameters(table, "dana-exp1", "quick")


@pytest.mark.usefixtures("instant")
def test_recomputing_trains_what_was_shipped_again_and_its_rows_count(monkeypatch):
    shipped = [run for run in of("dana-exp6") if run.seed < 2]
    old = Outcome(0.5, -1.0, 0.0, "cpu", "1", "old")
    results.append([(run, old) for run in shipped], results.SHIPPED)
    again = {"seeds": 2, "recompute": True}
    assert experiments.run("dana-exp6", "paper", "cpu", seeds=2) == 0
    assert experiments.run("dana-exp6", "paper", "cpu", **again) == 12
    assert experiments.run("dana-exp6", "paper", "cpu", **again) == 0
    assert (results.table("dana-exp6", "paper").loss > 0).all()
    monkeypatch.setenv("ATTNMEM_MEASUREMENTS", str(results.SHIPPED))
    with pytest.raises(ValueError, match=r"^recompute: got True; expected ATTNMEM_MEASUREMENTS"):
        experiments.run("dana-exp6", "paper", "cpu", **again)


def test_a_stored_training_can_be_repeated():
    experiments.run("dana-exp6", "quick", "cpu", seeds=1)
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
    assert sorted(results.known("dana-exp3", "quick")) == sorted(
        run.key for run in of("dana-exp3", "quick")
    )


# --- command line ---------------------------------------------------------------------------------


def test_list_and_status_name_every_experiment(capsys):
    assert cli.main(["list"]) == 0
    listed = capsys.readouterr().out
    assert cli.main(["status", "--profile", "paper"]) == 0
    status = capsys.readouterr().out
    for name in experiments.EXPERIMENTS:
        assert name in listed
        assert name in status
    assert "385 paper" in listed


@pytest.mark.usefixtures("instant")
def test_run_shows_progress_and_what_is_left(capsys):
    assert cli.main(["run", "dana-exp6", "--device", "cpu", "--seeds", "2"]) == 0
    out = capsys.readouterr().out
    assert "[6/6] dana-exp6 d=2 d_h=2 H=21 n=2 T=16384: 12 rows" in out
    assert "0:00:00 left" in out
    assert "dana-exp6: 12 rows added, 0 missing" in out


@pytest.mark.usefixtures("instant")
def test_a_paper_in_all_its_readings_is_one_command(capsys):
    command = ["run", "dana", "--variant", "all", "--profile", "quick", "--device", "cpu"]
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    for name, experiment in experiments.EXPERIMENTS.items():
        if name.startswith("dana"):
            for variant in experiment.variants:
                assert not experiments.missing(name, "quick", variant=variant)
    assert "dana-exp2, own-maps: 6 rows added, 0 missing" in out
    assert (
        cli.main(["run", "dana-exp2", "--where", "d_h=2", "--seeds", "1", "--device", "cpu"]) == 0
    )
    assert "dana-exp2: 1 rows added, 0 missing" in capsys.readouterr().out
    assert cli.main(["run", "dana-exp1", "--variant", "paper"]) == 1
    assert "variant: got 'paper'; expected one of code for dana-exp1" in capsys.readouterr().err


def test_bad_names_and_damaged_files_end_with_a_message(capsys, store):
    assert cli.main(["run", "dana-exp7"]) == 1
    assert "name: got 'dana-exp7'; expected one of mahdavi-fig2a" in capsys.readouterr().err
    path = results.file_of("dana-exp6", "quick", store)
    path.parent.mkdir(parents=True)
    path.write_text("not a results file\n")
    assert cli.main(["run", "dana-exp6", "--profile", "quick"]) == 1
    assert f"{path}, line 1: " in capsys.readouterr().err


def test_the_command_runs_from_a_source_tree_alone(store):
    """With the source on the path and only what the library depends on imported."""
    blocked = ["IPython", "flint", "transformers", "dask", "distributed", "jupytext", "papermill"]
    code = (
        "import sys; sys.modules.update(dict.fromkeys({!r})); sys.argv[0] = 'attnmem';"
        "from attnmem.__main__ import main; sys.exit(main(sys.argv[1:]))"
    ).format([*blocked, "matplotlib"])
    command = [sys.executable, "-c", code, "run", "dana-exp6", "--profile", "quick", "--seeds", "1"]
    environment = {**os.environ, "ATTNMEM_MEASUREMENTS": str(store)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "dana-exp6: 3 rows added, 0 missing" in done.stdout


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: experiments.runs("dana-exp9", "paper"), "name"),
        (lambda: experiments.runs("dana-exp1", "full"), "profile"),
        (lambda: experiments.runs("dana-exp1", "paper", seeds=0), "seeds"),
        (lambda: experiments.runs("dana-exp1", "paper", variant="paper"), "variant"),
        (lambda: experiments.runs("dana-exp1", "paper", where={"depth": 3}), "where"),
        (lambda: experiments.runs("dana-exp1", "paper", where={"d": 99}), "where"),
    ],
)
def test_bad_arguments_are_named(call, name):
    with pytest.raises(ValueError, match=rf"^{name}: got "):
        call()


def test_published_points_stand_beside_the_mean_of_the_seeds_of_the_grid(instant):
    experiments.run("dana-exp6", "paper", "cpu", seeds=23)  # three more than the grid has
    experiments.run("dana-exp6", "paper", "cpu", variant="paper")  # another model
    found = experiments.beside_published("dana-exp6")
    assert found.H.tolist() == [1, 5, 9, 13, 17, 21]
    assert found.seeds.tolist() == [20] * 6
    assert found.ours.tolist() == pytest.approx([0.95] * 6)  # mean of 0, 0.1, ..., 1.9
    published = results.published("dana-2025").query("experiment == 'exp6'").accuracy
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
    table = results.table("dana-exp6", "paper")
    assert results.fewest_seeds(table) == 2
    assert results.fewest_seeds(table[table.H == 5]) == 3


def test_stacks_hold_runs_that_differ_by_seed_only():
    for stack in experiments.stacks(of("dana-exp1")):
        assert [run.seed for run in stack] == list(range(5))
        assert len({dataclasses.replace(run, seed=0) for run in stack}) == 1
