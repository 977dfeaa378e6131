"""Bisection finds the edge, from rows alone, and resumes."""

import dataclasses

import pytest
import torch

from attnmem.lab import experiments, searches, training
from attnmem.lab import store as storage
from attnmem.lab.store import Outcome
from attnmem.lab.study import ALL

pytestmark = pytest.mark.usefixtures("store")

SEARCH = searches.SEARCHES["dana-capacity"]
WHOLE = Outcome(1.0, 0.1, 0.0, "cpu", "2", "abc")
ALMOST = Outcome(0.9999, 0.1, 0.0, "cpu", "2", "abc")
DIVERGED = Outcome(None, None, 0.0, "cpu", "2", "abc", diverged=3)


@pytest.mark.parametrize("edge", [0, 1, 51, 333, 2499, 2500, 10**6])
@pytest.mark.parametrize("start", [1, 50, 3000])
def test_a_bisection_ends_at_the_known_edge(edge, start):
    tried = []
    low, high = searches.bisect(lambda T: tried.append(T) or edge >= T, start, largest=2500)
    assert 1 <= min(tried) <= max(tried) <= 2500
    assert len(tried) == len(set(tried)) <= 25
    if edge >= 2500:
        assert (low, high) == (2500, None)
    else:
        assert low <= edge < high <= low + max(1, low // 50)


@pytest.fixture
def trained(monkeypatch):
    """Put a rule in place of training: the sizes and seeds of each call are noted."""

    def use(memorizes, *, nearly=ALMOST, interrupt_at=None):
        calls = []

        def train(runs, *, device, checkpoints):
            if len(calls) == interrupt_at:
                calls.append(None)
                raise KeyboardInterrupt
            calls.append([(run.H, run.T, run.seed) for run in runs])
            return [WHOLE if memorizes(run) else nearly for run in runs]

        monkeypatch.setattr(training, "train", train)
        return calls

    return use


def second_restart(run):
    return run.seed == 1 and run.T <= 10 * run.H


@pytest.mark.parametrize(("device", "at_once"), [("cpu", 1), ("cuda:0", 2)])
def test_a_search_resumes_and_its_rows_tell_all(trained, monkeypatch, device, at_once):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    calls = trained(second_restart, interrupt_at=3)
    with pytest.raises(KeyboardInterrupt):
        experiments.run("dana-capacity", "quick", device)
    rows = experiments.rows("dana-capacity", "quick")
    assert len(rows) == 3 * at_once
    assert searches.found("dana-capacity", "quick").empty, "unfinished"
    assert SEARCH.done("quick", ALL, rows) == (0, 2)
    seen = []
    added = experiments.run("dana-capacity", "quick", device, report=seen.append)
    assert added == at_once * len(seen)
    assert {p.said.rpartition(", ")[2] for p in seen} == {"memorized", "not memorized"}
    assert [len(call) for call in calls if call] == [at_once] * (3 + len(seen))
    assert experiments.run("dana-capacity", "quick", device) == 0
    table = searches.found("dana-capacity", "quick")
    assert table[["H", "memorized", "failed", "bound"]].to_numpy().tolist() == [
        [1, 10, 11, 6],
        [2, 20, 21, 9],
    ]
    rows = experiments.rows("dana-capacity", "quick")
    assert SEARCH.done("quick", ALL, rows) == (2, 2)
    assert SEARCH.done("quick", ALL, {k: r for k, r in rows.items() if r[0].H == 1}) == (1, 2)


def test_a_search_keeps_to_the_protocol_of_its_paper(trained):
    trained(second_restart)
    experiments.run("mahdavi-capacity", "quick", "cpu")
    table = searches.found("mahdavi-capacity", "quick")
    lines = table[["H", "n", "memorized", "failed", "bound"]].to_numpy().tolist()
    assert lines == [[1, 8, 10, 11, 8], [2, 8, 20, 21, 15], [4, 8, 40, 41, 29]]
    runs = [run for run, _ in experiments.rows("mahdavi-capacity", "quick").values()]
    assert {(run.task, run.batch, run.steps, run.early_stop) for run in runs} == {
        ("classes", 256, 2000, True)
    }


def test_a_cpu_tries_no_restart_after_a_success(trained):
    calls = trained(lambda run: run.T <= 10, nearly=DIVERGED)
    said = []
    experiments.run("dana-capacity", "quick", "cpu", report=lambda p: said.append(p.said))
    tried = [one for call in calls for one in call]
    assert len(tried) == len(set(tried))
    assert {seed for _, T, seed in tried if T <= 10} == {0}
    failed = {(H, T) for H, T, _ in tried if T > 10}
    assert {(*size, seed) for size in failed for seed in (0, 1)} <= set(tried)
    ends = {words.partition(", restart ")[2] for words in said}
    assert ends == {"0, memorized", "0, not memorized", "1, not memorized"}
    assert searches.found("dana-capacity", "quick").memorized.tolist() == [10, 10]


def test_weights_that_have_a_set_have_its_subsets(trained):
    """A row beyond the first size that fails is not passed over, nor is a smaller size tried."""
    calls = trained(second_restart)
    lucky = SEARCH.probe("quick", SEARCH.cells["quick"][0], 15)[0]
    storage.append([(lucky, WHOLE)])
    experiments.run("dana-capacity", "quick", "cpu")
    one, two = searches.found("dana-capacity", "quick").itertuples()
    assert (one.memorized, one.failed) == (15, 16)
    assert (two.memorized, two.failed) == (20, 21)  # another shape: its row says nothing here
    assert min(T for call in calls for H, T, _ in call if H == 1) > 15


def test_a_table_memorized_whole_has_no_failed_size(trained):
    trained(lambda run: True)
    experiments.run("dana-capacity", "quick", "cpu")
    table = searches.found("dana-capacity", "quick")
    assert table.memorized.tolist() == [100, 100]  # all pairs of ten tokens
    assert table.failed.isna().all()
    assert table[["N", "n", "d", "d_h", "steps"]].to_numpy().tolist() == [[10, 2, 3, 3, 500]] * 2
    assert table.parameters.tolist() == [2 * 10 * 3 + 2 * 3 + 4 * H * 3 * 3 for H in (1, 2)]


def test_a_search_is_asked_without_being_listed():
    search = dataclasses.replace(SEARCH, name="new", cells={"quick": SEARCH.cells["quick"][:1]})
    rows = {}
    while runs := search.missing("quick", ALL, rows):
        assert {run.experiment for run in runs} == {"new"}
        rows |= {run.key: (run, WHOLE if second_restart(run) else ALMOST) for run in runs}
    assert search.done("quick", ALL, rows) == (1, 1)
    assert search.found("quick", rows).memorized.tolist() == [10]


@pytest.mark.parametrize("arguments", [("dana-size", "paper"), ("dana-capacity", "full")])
def test_unknown_names_are_refused(arguments):
    for function in (experiments.run, searches.found):
        with pytest.raises(ValueError, match=r"^(name|profile): got '(dana-size|full)'; expected"):
            function(*arguments)
