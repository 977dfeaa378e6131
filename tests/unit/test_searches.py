"""Bisection finds the edge, from rows alone, and resumes."""

from functools import partial

import pytest
import torch

from attnmem import experiments, training
from attnmem import store as storage
from attnmem.store import Outcome, Run
from attnmem.studies import searches
from attnmem.studies.study import ALL

pytestmark = pytest.mark.usefixtures("store")


@pytest.mark.parametrize("edge", [0, 1, 2, 49, 50, 51, 333, 700, 2499, 2500, 10**6])
@pytest.mark.parametrize("start", [1, 50, 3000])
def test_bisection_against_the_known_edge(edge, start):
    asked = []

    def memorizes(size):
        asked.append(size)
        assert len(asked) <= 25
        return size <= edge

    low, high = searches.bisect(memorizes, start, most=2500)
    assert low <= min(edge, 2500)
    assert min(asked) >= 1
    assert max(asked) <= 2500
    assert len(asked) == len(set(asked))
    if edge >= 2500:
        assert (low, high) == (2500, None)
    else:
        assert low <= edge < high
        assert high - low <= max(1, low // 50)


class Interrupted(Exception):
    pass


@pytest.fixture
def instant(monkeypatch):
    """Training by decree: the second restart memorizes up to 10 H associations."""
    calls = []

    def train(runs, *, device, checkpoints):
        if len(calls) == 3:
            calls.append("interrupted")
            raise Interrupted
        calls.append([run.T for run in runs])
        good = [run.seed == 1 and run.T <= 10 * run.H for run in runs]
        return [Outcome(1.0 if ok else 0.9, 0.1, 0.0, device, "2", "abc") for ok in good]

    monkeypatch.setattr(training, "train", train)
    return calls


@pytest.mark.parametrize(("device", "at_once"), [("cpu", 1), ("cuda:0", 2)])
def test_a_search_resumes_and_its_rows_tell_all(instant, monkeypatch, device, at_once):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(Interrupted):
        experiments.run("dana-capacity", "quick", device)
    assert len(experiments.rows("dana-capacity", "quick")) == 3 * at_once
    seen = []
    added = experiments.run(
        "dana-capacity", "quick", device, report=lambda progress: seen.append(progress.said)
    )
    assert added == at_once * len(seen)
    trained = [call for call in instant if call != "interrupted"]
    assert 3 + len(seen) == len(trained)
    assert {len(call) for call in trained} == {at_once}
    assert experiments.run("dana-capacity", "quick", device) == 0
    table = searches.found("dana-capacity", "quick")
    assert table[["H", "memorized", "failed", "bound"]].to_numpy().tolist() == [
        [1, 10, 11, 6],
        [2, 20, 21, 9],
    ]


def test_examples_of_mahdavi_are_searched_by_their_own_protocol(instant):
    instant.extend([None] * 4)  # past the interruption
    experiments.run("mahdavi-capacity", "quick", "cpu")
    table = searches.found("mahdavi-capacity", "quick")
    lines = table[["H", "n", "memorized", "failed", "bound"]].to_numpy().tolist()
    assert lines == [[1, 8, 10, 11, 8], [2, 8, 20, 21, 15], [4, 8, 40, 41, 29]]
    runs = [run for run, _ in experiments.rows("mahdavi-capacity", "quick").values()]
    assert {(run.task, run.batch, run.steps, run.early_stop) for run in runs} == {
        ("classes", 256, 2000, True)
    }
    [first, *_] = searches.probe(
        "mahdavi-capacity", "paper", searches.SEARCHES["mahdavi-capacity"].cells["paper"][0], 550
    )
    assert (first.H, first.n, first.d, first.T, first.steps) == (4, 32, 64, 550, 300_000)


def test_a_processor_tries_no_restart_after_one_that_got_there(monkeypatch):
    tried = []

    def train(runs, *, device, checkpoints):
        tried.extend((run.H, run.T, run.seed) for run in runs)
        return [Outcome(1.0 if run.T <= 10 else 0.9, 0.1, 0.0, device, "2", "abc") for run in runs]

    monkeypatch.setattr(training, "train", train)
    experiments.run("dana-capacity", "quick", "cpu")
    assert len(tried) == len(set(tried))
    assert {seed for _, T, seed in tried if T <= 10} == {0}
    failed = {(H, T) for H, T, _ in tried if T > 10}
    assert {(*size, seed) for size in failed for seed in (0, 1)} <= set(tried)
    assert searches.found("dana-capacity", "quick").memorized.tolist() == [10, 10]


def test_weights_that_have_a_set_have_its_subsets(instant):
    """A row beyond the first size that fails is not passed over, nor is a smaller size tried."""
    instant.extend([None] * 4)  # past the interruption
    before = len(instant)
    cell = searches.SEARCHES["dana-capacity"].cells["quick"][0]
    lucky = searches.probe("dana-capacity", "quick", cell, 15)[0]
    storage.append([(lucky, Outcome(1.0, 0.1, 0.0, "cpu", "2", "abc"))])
    experiments.run("dana-capacity", "quick", "cpu")
    one, two = searches.found("dana-capacity", "quick").itertuples()
    assert (one.memorized, one.failed) == (15, 16)
    assert (two.memorized, two.failed) == (20, 21)  # another shape: its row says nothing here
    sizes = [size for [size] in instant[before:]]
    assert min(sizes[: sizes.index(9)]) > 15  # 9: where the second search starts


def test_an_unfinished_search_is_not_reported(instant):
    with pytest.raises(Interrupted):
        experiments.run("dana-capacity", "quick", "cpu")
    assert searches.found("dana-capacity", "quick").empty


def test_the_parameters_are_those_of_the_equations():
    """Tables, two positions, four maps a head."""
    cell = searches.SEARCHES["dana-capacity"].cells["paper"][0]
    [run] = searches.probe("dana-capacity", "paper", cell, 100)[:1]
    N, d, d_h, H = run.N, run.d, run.d_h, run.H
    assert training.parameter_count(run) == 2 * N * d + 2 * d + 4 * H * d * d_h


@pytest.mark.parametrize("arguments", [("dana-size", "paper"), ("dana-capacity", "full")])
def test_unknown_names_are_refused(arguments):
    for function in (experiments.run, searches.found):
        with pytest.raises(ValueError, match=r"^(name|profile): got '(dana-size|full)'; expected"):
            function(*arguments)


def test_a_restart_that_diverged_has_not_memorized(monkeypatch):
    """The first restart diverges at every size; the second one memorizes up to ten."""
    tried = []

    def train(runs, *, device, checkpoints):
        tried.extend((run.T, run.seed) for run in runs if run.H == 1)
        origin = (0.0, device, "2", "abc")
        return [
            Outcome(None, None, *origin, diverged=50)
            if run.seed == 0
            else Outcome(1.0 if run.T <= 10 else 0.9, 0.1, *origin)
            for run in runs
        ]

    monkeypatch.setattr(training, "train", train)
    experiments.run("dana-capacity", "quick", "cpu")
    assert searches.found("dana-capacity", "quick").memorized.tolist() == [10, 10]
    assert len(tried) == len(set(tried)), "nothing is tried again"
    assert {seed for _, seed in tried} == {0, 1}


# --- the rules, at their edges --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edge", "start", "most", "asked"),
    [
        (700, 50, 2500, [50, 100, 200, 400, 800, 600, 700, 750, 725, 712]),
        (5, 4, 100, [4, 8, 6, 5]),
        (0, 4, 100, [4, 2, 1]),
        (100, 30, 100, [30, 60, 100]),  # doubling stops at the most there is
        (99, 30, 100, [30, 60, 100, 80, 90, 95, 97, 98, 99]),
        (7, 200, 100, [100, 50, 25, 12, 6, 9, 7, 8]),
    ],
)
def test_a_bisection_doubles_and_then_halves(edge, start, most, asked):
    sizes = []
    searches.bisect(lambda size: sizes.append(size) or size <= edge, start, most)
    assert sizes == asked


@pytest.mark.parametrize(
    ("low", "high", "done"),
    [(99, 100, True), (99, 101, False), (100, 102, True), (149, 152, False), (150, 153, True)],
)
def test_a_gap_of_two_hundredths_is_small_enough(low, high, done):
    """Of what is memorized: one up to 99, two from 100 on, three from 150 on."""
    sizes = []

    def memorizes(size):
        sizes.append(size)
        return size <= low if len(sizes) < 3 else size < high

    searches.bisect(memorizes, low, high)  # asks for low; then for high, the most there is
    assert sizes[:2] == [low, high]
    assert (len(sizes) == 2) == done


WHOLE = Outcome(1.0, 0.1, 0.0, "cpu", "2", "abc")
ALMOST = Outcome(0.9999, 0.1, 0.0, "cpu", "2", "abc")
DIVERGED = Outcome(None, None, 0.0, "cpu", "2", "abc", diverged=3)


@pytest.mark.parametrize("nearly", [ALMOST, DIVERGED])
def test_only_a_set_without_an_error_is_memorized(monkeypatch, nearly):
    def train(runs, *, device, **_):
        whole = Outcome(1.0, 0.1, 0.0, device, "2", "abc")
        return [whole if run.T <= 12 else nearly for run in runs]

    monkeypatch.setattr(training, "train", train)
    experiments.run("dana-capacity", "quick", "cpu")
    assert searches.found("dana-capacity", "quick").memorized.tolist() == [12, 12]


@pytest.mark.parametrize(("right", "edge"), [([], 0), ([1003], 1003), ([900, 1003, 7], 1003)])
def test_the_largest_set_that_a_row_has_right_is_the_answer(right, edge):
    """Also a size that the bisection would not ask for, where the gap may be 20; or none at all."""
    search = searches.SEARCHES["dana-capacity"]
    cell = search.cells["paper"][0]
    runs_of = partial(searches.probe, "dana-capacity", "paper", cell)
    rows = {run.key: (run, WHOLE) for size in right for run in runs_of(size)[-1:]}
    tried = []
    while needed := search.bracket("paper", cell, rows)[1]:
        tried += [run.T for run in needed]
        rows |= {run.key: (run, ALMOST) for run in needed}
    ends, _ = search.bracket("paper", cell, rows)
    assert ends.memorized == edge
    assert ends.failed == min(tried) <= edge + max(1, edge // 50)
    assert min(tried) > edge  # what a row has right is not tried again, nor are its subsets


@pytest.mark.parametrize(
    ("outcomes", "verb"),
    [([ALMOST, WHOLE], "memorized"), ([WHOLE], "memorized"), ([ALMOST, ALMOST], "not memorized")],
)
def test_one_restart_that_memorizes_is_enough(outcomes, verb):
    cell = searches.SEARCHES["dana-capacity"].cells["quick"][0]
    runs = searches.probe("dana-capacity", "quick", cell, 7)
    said = searches.SEARCHES["dana-capacity"].say([*zip(runs, outcomes, strict=False)])
    assert said.endswith(f", restart 0, {verb}")


def test_what_is_memorized_whole_has_no_size_that_fails(monkeypatch):
    def train(runs, *, device, **_):
        return [Outcome(1.0, 0.1, 0.0, device, "2", "abc") for _ in runs]

    monkeypatch.setattr(training, "train", train)
    experiments.run("dana-capacity", "quick", "cpu")
    table = searches.found("dana-capacity", "quick")
    assert table.memorized.tolist() == [100, 100]  # all pairs of ten tokens
    assert table.failed.isna().all()
    assert table.columns.tolist() == [
        *("N", "n", "d", "d_h", "H", "steps"),
        *("memorized", "failed", "bound", "parameters"),
    ]
    assert table[["N", "n", "d", "d_h", "steps"]].to_numpy().tolist() == [[10, 2, 3, 3, 500]] * 2


def test_the_sizes_that_are_searched():
    cells = searches.SEARCHES["dana-capacity"].cells["paper"]
    assert [(cell["d"], cell["d_h"], cell["H"]) for cell in cells] == [
        *((10, 10, 1), (10, 10, 2), (10, 10, 4), (10, 10, 6)),
        *((10, 1, 4), (10, 2, 4), (10, 5, 4)),
        *((5, 5, 4), (5, 5, 8), (5, 5, 16)),
    ]
    cells = searches.SEARCHES["mahdavi-capacity"].cells["paper"]
    assert [(cell["H"], cell["n"], cell["d"], cell["steps"]) for cell in cells] == [
        (4, 32, 64, 300_000),
        (8, 32, 64, 300_000),
    ]


@pytest.mark.parametrize(("name", "restarts"), [("dana-capacity", 4), ("mahdavi-capacity", 3)])
def test_a_size_is_tried_with_seeds_from_zero(name, restarts):
    cell = searches.SEARCHES[name].cells["paper"][0]
    runs = searches.probe(name, "paper", cell, 77)
    assert [run.seed for run in runs] == list(range(restarts))
    assert {(run.experiment, run.profile, run.T) for run in runs} == {(name, "paper", 77)}
    assert {run.batch for run in runs} == ({77} if name == "dana-capacity" else {256})


def test_associations_are_trained_whole_with_a_rate_that_falls_to_a_tenth():
    cell = searches.SEARCHES["dana-capacity"].cells["paper"][4]
    [run, *_] = searches.probe("dana-capacity", "paper", cell, 210)
    assert run == Run(
        **{"experiment": "dana-capacity", "profile": "paper", "model": "aot", "variant": "paper"},
        **{"N": 50, "n": 2, "T": 210, "d": 10, "d_h": 1, "H": 4, "width": None, "layers": 1},
        **{"seed": 0, "steps": 10_000, "task": "associations", "context": None, "batch": 210},
        **{"schedule": "linear", "lr": 0.003, "lr_start": 1.0, "lr_end": 0.1},
        **{"evaluate_every": 50, "early_stop": True},
    )


def test_complete_bisections_are_counted(instant):
    instant.extend([None] * 4)  # past the interruption
    search = searches.SEARCHES["dana-capacity"]
    assert search.done("quick", ALL, {}) == (0, 2)
    experiments.run("dana-capacity", "quick", "cpu")
    rows = experiments.rows("dana-capacity", "quick")
    assert search.done("quick", ALL, rows) == (2, 2)
    first = {key: row for key, row in rows.items() if row[0].H == 1}
    assert search.done("quick", ALL, first) == (1, 2)
    with pytest.raises(ValueError, match=r"^profile: got 'full'"):
        search.done("full", ALL, rows)
