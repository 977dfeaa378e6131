"""The command line: every study by one verb, errors in one sentence."""

import os
import subprocess
import sys

import pytest

from attnmem import __main__ as cli
from attnmem import experiments, results

pytestmark = pytest.mark.usefixtures("store")


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
