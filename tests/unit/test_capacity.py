"""Bisection finds the edge, from rows alone, and resumes."""

import pytest

from attnmem import capacity, results, training
from attnmem.results import Outcome, Run

pytestmark = pytest.mark.usefixtures("store")


@pytest.mark.parametrize("edge", [0, 1, 2, 49, 50, 51, 333, 700, 2499, 2500, 10**6])
@pytest.mark.parametrize("start", [1, 50, 3000])
def test_bisection_against_the_known_edge(edge, start):
    asked = []

    def memorizes(size):
        asked.append(size)
        return size <= edge

    low, high = capacity.bisect(memorizes, start, most=2500)
    assert low <= min(edge, 2500)
    assert min(asked) >= 1
    assert max(asked) <= 2500
    assert len(asked) == len(set(asked)) <= 25
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

    def train(runs, *, device):
        if len(calls) == 3:
            calls.append("interrupted")
            raise Interrupted
        calls.append([run.T for run in runs])
        good = [run.seed == 1 and run.T <= 10 * run.H for run in runs]
        return [Outcome(1.0 if ok else 0.9, 0.1, 0.0, device, "2", "abc") for ok in good]

    monkeypatch.setattr(training, "train", train)
    return calls


@pytest.mark.parametrize(("device", "at_once"), [("cpu", 1), ("cuda:0", 2)])
def test_a_search_resumes_and_its_rows_tell_all(instant, device, at_once):
    with pytest.raises(Interrupted):
        capacity.search("dana-capacity", "quick", device)
    assert len(results.known("dana-capacity", "quick")) == 3 * at_once
    seen = []
    added = capacity.search(
        "dana-capacity", "quick", device, report=lambda run, good: seen.append((run.T, good))
    )
    assert added == at_once * len(seen)
    trained = [call for call in instant if call != "interrupted"]
    assert 3 + len(seen) == len(trained)
    assert {len(call) for call in trained} == {at_once}
    assert capacity.search("dana-capacity", "quick", device) == 0
    table = capacity.found("dana-capacity", "quick")
    assert table[["H", "memorized", "failed", "bound"]].to_numpy().tolist() == [
        [1, 10, 11, 6],
        [2, 20, 21, 9],
    ]


def test_examples_of_mahdavi_are_searched_by_their_own_protocol(instant):
    instant.extend([None] * 4)  # past the interruption
    capacity.search("mahdavi-capacity", "quick", "cpu")
    table = capacity.found("mahdavi-capacity", "quick")
    lines = table[["H", "n", "memorized", "failed", "bound"]].to_numpy().tolist()
    assert lines == [[1, 8, 10, 11, 8], [2, 8, 20, 21, 15], [4, 8, 40, 41, 29]]
    runs = [run for run, _ in results.known("mahdavi-capacity", "quick").values()]
    assert {(run.task, run.batch, run.steps, run.early_stop) for run in runs} == {
        ("classes", 256, 2000, True)
    }
    [first, *_] = capacity.probe(
        "mahdavi-capacity", "paper", capacity.SEARCHES["mahdavi-capacity"].cells["paper"][0], 550
    )
    assert (first.H, first.n, first.d, first.T, first.steps) == (4, 32, 64, 550, 300_000)


def test_a_processor_tries_no_restart_after_one_that_got_there(monkeypatch):
    tried = []

    def train(runs, *, device):
        tried.extend((run.H, run.T, run.seed) for run in runs)
        return [Outcome(1.0 if run.T <= 10 else 0.9, 0.1, 0.0, device, "2", "abc") for run in runs]

    monkeypatch.setattr(training, "train", train)
    capacity.search("dana-capacity", "quick", "cpu")
    assert len(tried) == len(set(tried))
    assert {seed for _, T, seed in tried if T <= 10} == {0}
    failed = {(H, T) for H, T, _ in tried if T > 10}
    assert {(*size, seed) for size in failed for seed in (0, 1)} <= set(tried)
    assert capacity.found("dana-capacity", "quick").memorized.tolist() == [10, 10]


def test_weights_that_have_a_set_have_its_subsets(instant):
    """A row beyond the first size that fails is not passed over, nor is a smaller size tried."""
    instant.extend([None] * 4)  # past the interruption
    before = len(instant)
    cell = capacity.SEARCHES["dana-capacity"].cells["quick"][0]
    lucky = capacity.probe("dana-capacity", "quick", cell, 15)[0]
    results.append([(lucky, Outcome(1.0, 0.1, 0.0, "cpu", "2", "abc"))])
    capacity.search("dana-capacity", "quick", "cpu")
    one, two = capacity.found("dana-capacity", "quick").itertuples()
    assert (one.memorized, one.failed) == (15, 16)
    assert (two.memorized, two.failed) == (20, 21)  # another shape: its row says nothing here
    sizes = [size for [size] in instant[before:]]
    assert min(sizes[: sizes.index(9)]) > 15  # 9: where the second search starts


def test_an_unfinished_search_is_not_reported(instant):
    with pytest.raises(Interrupted):
        capacity.search("dana-capacity", "quick", "cpu")
    assert capacity.found("dana-capacity", "quick").empty


def test_the_parameters_are_those_of_the_equations():
    """Tables, two positions, four maps a head."""
    cell = capacity.SEARCHES["dana-capacity"].cells["paper"][0]
    [run] = capacity.probe("dana-capacity", "paper", cell, 100)[:1]
    N, d, d_h, H = run.N, run.d, run.d_h, run.H
    assert training.parameter_count(run) == 2 * N * d + 2 * d + 4 * H * d * d_h


@pytest.mark.parametrize("arguments", [("dana-size", "paper"), ("dana-capacity", "full")])
def test_unknown_names_are_refused(arguments):
    for function in (capacity.search, capacity.found):
        with pytest.raises(ValueError, match=r"^(name|profile): got '(dana-size|full)'; expected"):
            function(*arguments)


# --- the rules, at their edges --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edge", "start", "most", "asked"),
    [
        (700, 50, 2500, [50, 100, 200, 400, 800, 600, 700, 750, 725, 712]),
        (5, 4, 100, [4, 8, 6, 5]),
        (0, 4, 100, [4, 2, 1]),
        (100, 30, 100, [30, 60, 100]),  # doubling stops at the most there is
        (99, 30, 99, [30, 60, 99]),
        (99, 30, 100, [30, 60, 100, 80, 90, 95, 97, 98, 99]),
        (7, 200, 100, [100, 50, 25, 12, 6, 9, 7, 8]),
    ],
)
def test_a_bisection_doubles_and_then_halves(edge, start, most, asked):
    sizes = []
    capacity.bisect(lambda size: sizes.append(size) or size <= edge, start, most)
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

    capacity.bisect(memorizes, low, high)  # asks for low; then for high, the most there is
    assert sizes[:2] == [low, high]
    assert (len(sizes) == 2) == done


ALMOST = Outcome(0.9999, 0.1, 0.0, "cpu", "2", "abc")
DIVERGED = Outcome(None, None, 0.0, "cpu", "2", "abc", diverged=3)


@pytest.mark.parametrize("nearly", [ALMOST, DIVERGED])
def test_only_a_set_without_an_error_is_memorized(monkeypatch, nearly):
    def train(runs, *, device):
        whole = Outcome(1.0, 0.1, 0.0, device, "2", "abc")
        return [whole if run.T <= 12 else nearly for run in runs]

    monkeypatch.setattr(training, "train", train)
    capacity.search("dana-capacity", "quick", "cpu")
    assert capacity.found("dana-capacity", "quick").memorized.tolist() == [12, 12]


def test_what_is_memorized_whole_has_no_size_that_fails(monkeypatch):
    def train(runs, *, device):
        return [Outcome(1.0, 0.1, 0.0, device, "2", "abc") for _ in runs]

    monkeypatch.setattr(training, "train", train)
    capacity.search("dana-capacity", "quick", "cpu")
    table = capacity.found("dana-capacity", "quick")
    assert table.memorized.tolist() == [100, 100]  # all pairs of ten tokens
    assert table.failed.isna().all()
    assert table.columns.tolist() == [
        *("N", "n", "d", "d_h", "H", "steps"),
        *("memorized", "failed", "bound", "parameters"),
    ]
    assert table[["N", "n", "d", "d_h", "steps"]].to_numpy().tolist() == [[10, 2, 3, 3, 500]] * 2


@pytest.mark.parametrize(("device", "at_once"), [("cpu", 1), ("cuda:0", 2)])
def test_each_training_is_reported_with_whether_one_restart_had_all(instant, device, at_once):
    instant.extend([None] * 4)  # past the interruption
    seen = []
    capacity.search(
        "dana-capacity", "quick", device, report=lambda run, good: seen.append((run, good))
    )
    rows = results.known("dana-capacity", "quick").values()
    assert len(rows) == at_once * len(seen)
    for run, good in seen:
        beside = [r for r, _ in rows if (r.H, r.T) == (run.H, run.T)]
        assert good == (run.T <= 10 * run.H and (at_once == 2 or run.seed == 1))
        assert run in beside
        assert run.seed == 0 or at_once == 1  # the first of those that are trained at once


def test_nothing_may_be_memorized(monkeypatch):
    monkeypatch.setattr(training, "train", lambda runs, *, device: [ALMOST for _ in runs])
    capacity.search("dana-capacity", "quick", "cpu")
    table = capacity.found("dana-capacity", "quick")
    assert table[["memorized", "failed"]].to_numpy().tolist() == [[0, 1], [0, 1]]


def test_the_bound_is_that_of_the_shape(instant):
    instant.extend([None] * 4)  # past the interruption
    capacity.search("dana-capacity", "paper", "cuda:0")
    table = capacity.found("dana-capacity", "paper")
    assert table.bound.tolist() == [20, 30, 50, 70, 14, 18, 30, 25, 45, 85]  # H d_h + d
    assert ((table.memorized <= 10 * table.H) & (table.failed > 10 * table.H)).all()


def test_the_sizes_that_are_searched():
    cells = capacity.SEARCHES["dana-capacity"].cells["paper"]
    assert [(cell["d"], cell["d_h"], cell["H"]) for cell in cells] == [
        *((10, 10, 1), (10, 10, 2), (10, 10, 4), (10, 10, 6)),
        *((10, 1, 4), (10, 2, 4), (10, 5, 4)),
        *((5, 5, 4), (5, 5, 8), (5, 5, 16)),
    ]
    cells = capacity.SEARCHES["mahdavi-capacity"].cells["paper"]
    assert [(cell["H"], cell["n"], cell["d"], cell["steps"]) for cell in cells] == [
        (4, 32, 64, 300_000),
        (8, 32, 64, 300_000),
    ]


@pytest.mark.parametrize(("name", "restarts"), [("dana-capacity", 4), ("mahdavi-capacity", 3)])
def test_a_size_is_tried_with_seeds_from_zero(name, restarts):
    cell = capacity.SEARCHES[name].cells["paper"][0]
    runs = capacity.probe(name, "paper", cell, 77)
    assert [run.seed for run in runs] == list(range(restarts))
    assert {(run.experiment, run.profile, run.T) for run in runs} == {(name, "paper", 77)}
    assert {run.batch for run in runs} == ({77} if name == "dana-capacity" else {256})


def test_associations_are_trained_whole_with_a_rate_that_falls_to_a_tenth():
    cell = capacity.SEARCHES["dana-capacity"].cells["paper"][4]
    [run, *_] = capacity.probe("dana-capacity", "paper", cell, 210)
    assert run == Run(
        **{"experiment": "dana-capacity", "profile": "paper", "model": "aot", "variant": "paper"},
        **{"N": 50, "n": 2, "T": 210, "d": 10, "d_h": 1, "H": 4, "width": None, "layers": 1},
        **{"seed": 0, "steps": 10_000, "task": "associations", "context": None, "batch": 210},
        **{"schedule": "linear", "lr": 0.003, "lr_start": 1.0, "lr_end": 0.1},
        **{"evaluate_every": 50, "early_stop": True},
    )
