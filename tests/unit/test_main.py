"""The command line: every study by one verb, errors in one sentence."""

import multiprocessing
import os
import subprocess
import sys

import pytest
import torch

import attnmem
from attnmem import __main__ as cli
from attnmem import papers
from attnmem.lab import experiments
from attnmem.lab import store as storage
from attnmem.lab.experiments import STUDIES
from attnmem.lab.store import Outcome
from attnmem.lab.study import Selection

pytestmark = pytest.mark.usefixtures("store")

QUICK = ["--profile", "quick", "--device", "cpu"]


@pytest.fixture
def command(capsys):
    """Run a command; its exit status, and what it says."""

    def run(*words):
        status = cli.main([*words])
        out, err = capsys.readouterr()
        return status, out + err

    return run


def outcome(seconds):
    return Outcome(0.5, 0.1, seconds, "cpu", "2", "abc")


def test_list_and_status_name_every_study(command):
    _, listed = command("list")
    code, status = command("status", "--profile", "paper")
    assert code == 0
    for name, study in STUDIES.items():
        assert f"{name} " in listed
        assert (f" {name} " in status) == ("paper" in study.profiles)
    assert "385 paper" in listed
    assert "10 paper, 2 quick" in listed, "of a search, the shapes"


@pytest.mark.usefixtures("instant")
def test_a_limit_of_time_takes_cheap_curves_first(command):
    """By the time that rows of the same cells took."""
    runs = experiments.runs("mahdavi-fig2a", "quick")
    known = [run for run in runs if run.seed == 1 and run.H < 8]
    storage.append((run, outcome(1000 / run.T)) for run in known)
    assert command("run", "mahdavi-fig2a", *QUICK, "--limit-minutes", "60")[0] == 0
    made = [run for run, _ in experiments.rows("mahdavi-fig2a", "quick").values()][len(known) :]
    assert [run.T for run in made] == [*4 * [1000], *4 * [500], *4 * [250], 1000, 500, 250]
    assert [run.seed for run in made] == 12 * [0] + 3 * [1]


@pytest.mark.usefixtures("instant")
def test_a_paper_in_all_its_readings_is_one_command(command):
    code, out = command("run", "dana", "--variant", "all", *QUICK)
    assert code == 0
    for name, experiment in experiments.EXPERIMENTS.items():
        for variant in experiment.variants if name.startswith("dana") else ():
            rows = experiments.rows(name, "quick")
            assert not experiment.missing("quick", Selection(variant=variant), rows)
    assert "dana-exp2, own-maps: 0 missing" in out
    assert list(cli.GROUPS) == ["all", *papers.papers()]
    assert sorted(cli.GROUPS["dana"] + cli.GROUPS["mahdavi"]) == sorted(experiments.EXPERIMENTS)


@pytest.mark.usefixtures("instant")
def test_where_takes_integers_and_fractions(command, capsys):
    words = ["run", "dana-exp5-mlp-rates", "--seeds", "1", "--device", "cpu"]
    code, out = command(*words, "--where", "lr=0.3", "d=13")
    assert code == 0
    assert out.startswith(
        "[1/1] dana-exp5-mlp-rates d=13 d_h=13 H=1 n=2 T=262144 width=520: 1 rows"
    )
    assert out.endswith("0:00:00 left\n1 rows added\ndana-exp5-mlp-rates: 0 missing\n")
    for unclear in ("lr", "=3", "lr=fast", "lr=nan", "d="):
        with pytest.raises(SystemExit):
            cli.main([*words, "--where", unclear])
        assert f"'{unclear}' is not like d=10 or lr=0.3" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main([*words, "--seed", "3"])
    assert "unrecognized arguments: --seed 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--device cuda", "device: got 'cuda'; expected a GPU that this machine has; torch"),
        ("--device tpu9", "device: got 'tpu9'; expected auto, cpu, cuda, cuda:1 or the like"),
        (
            "--where heads=3",
            "where: got the field 'heads'; expected one of N, n, T, d, d_h, H, layers, steps",
        ),
        ("--where H=5 --where H=1", "where: got 2 values of H; expected one value"),
        ("--tf32 --device cpu", "tf32: got True; expected False on a CPU"),
        (
            "--variant all-maps",
            "variant: got 'all-maps'; expected one of code, paper for dana-exp6",
        ),
    ],
)
def test_impossible_arguments_end_with_one_sentence(command, monkeypatch, words, said):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    status, error = command("run", "dana-exp6", "--profile", "quick", *words.split())
    assert status == 1
    assert error.startswith(said)
    assert error.count("\n") == 1


def test_bad_names_and_damaged_files_are_messages(command, store):
    status, said = command("run", "dana-exp7")
    assert status == 1
    first = "name: got 'dana-exp7'; expected one of all, mahdavi, dana, mahdavi-fig2a"
    assert said.startswith(first)
    assert "dana-shapes, assumptions-bert" in said
    assert said.count("\n") == 1
    status, said = command("run", "dana-capacity", "--profile", "quick", "--seeds", "0")
    assert (status, said[:32]) == (1, "seeds: got 0; expected nothing, ")
    path = store / "dana-exp6" / "quick.csv"
    path.parent.mkdir(parents=True)
    path.write_text("not a results file\n")
    status, said = command("run", "dana-exp6", "--profile", "quick")
    assert (status, f"{path}, line 1: " in said) == (1, True)


def test_the_command_runs_from_a_source_tree_alone(store):
    """With the source on the path and only what the library depends on imported.

    The parts of scipy, half a second, are imported where one is asked for: no training asks.
    """
    blocked = ["IPython", "flint", "transformers", "dask", "distributed", "jupytext", "papermill"]
    code = (
        "import sys; sys.modules.update(dict.fromkeys({!r})); sys.argv[0] = 'attnmem';"
        "from attnmem.__main__ import main; sys.exit(main(sys.argv[1:]))"
    ).format([*blocked, "matplotlib", "scipy.optimize", "scipy.stats"])
    reading, writing = os.pipe()
    os.close(reading)
    words = [sys.executable, "-c", code, "run", "dana-exp6", "dana-exp6", *QUICK, "--seeds", "1"]
    environment = {**os.environ, "ATTNMEM_MEASUREMENTS": str(store)}
    done = subprocess.run(words, stdout=writing, stderr=-1, env=environment, check=False)
    os.close(writing)
    assert done.returncode == 0, done.stderr
    assert len(experiments.rows("dana-exp6", "quick")) == 3


def test_the_version_and_the_help_are_plain_text(capsys):
    for words, said in (("--version", f"attnmem {attnmem.__version__}\n"), ("--help", "usage: ")):
        with pytest.raises(SystemExit) as left:
            cli.main([words])
        out = capsys.readouterr().out
        assert (left.value.code, out[: len(said)]) == (0, said)
        assert "``" not in out


@pytest.mark.parametrize("command", ["list", "status"])
def test_a_reader_that_has_seen_enough_is_no_error(command):
    """As into ``head``: the other end of the pipe is closed before the first line."""
    reading, writing = os.pipe()
    os.close(reading)

    def write():
        sys.stdout = os.fdopen(writing, "w")
        done = cli.main([command])
        sys.stdout.close()  # as at the end of a process
        os._exit(done)

    process = multiprocessing.get_context("fork").Process(target=write)
    process.start()
    process.join()
    os.close(writing)
    assert process.exitcode == 0


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
    assert sum(minutes) == pytest.approx(20.4)


def test_status_says_which_curves_are_predicted(command):
    _, said = command("status", "--profile", "paper")
    lines = said.split("\n")
    curves = {}
    for line in lines:
        if line.startswith("paper"):
            name = line.split()[1]
        elif line.endswith(", predicted"):
            curves.setdefault(name, []).append(line.split()[2])
    assert curves == {
        "mahdavi-fig4-heads": ["70000:", "90000:", "110000:", "130000:"],
        "mahdavi-fig4-context": ["40000:", "50000:", "60000:"],
        "mahdavi-fig5-random-heads": ["50000:", "70000:", "90000:"],
        "mahdavi-fig5-random-context": ["50000:", "70000:", "90000:"],
    }
