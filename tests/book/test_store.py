"""The shipped rows: every one belongs to a grid, and grids are whole but for what is listed."""

import functools
import re

import pytest

from attnmem.lab import assumptions, experiments, fits, searches
from attnmem.lab import store as storage
from attnmem.theory import fitting

from tools import digests

EVERY = [
    (name, variant)
    for name, experiment in experiments.EXPERIMENTS.items()
    for variant in experiment.variants
]
# Of these, runs are missing; the chapters that use them say so.
INCOMPLETE = {*experiments.MAHDAVI}
CHECKED = [(name, tier) for name, study in assumptions.TESTS.items() for tier in study.tiers]


@functools.cache
def shipped(name):
    return storage.read(storage.SHIPPED / name / "paper.csv")


@pytest.mark.parametrize(("name", "variant"), EVERY)
def test_grids_are_complete_but_for_what_is_listed(name, variant):
    have = shipped(name)
    missing = [r for r in experiments.runs(name, "paper", variant=variant) if r.key not in have]
    remedy = f"{len(missing)} runs are missing: `python -m attnmem run {name}` makes them"
    assert not missing or name in INCOMPLETE or not have, remedy


@pytest.mark.parametrize("name", experiments.EXPERIMENTS)
def test_every_row_is_a_run_of_its_grid(name):
    more_seeds = 20
    wanted = {
        run.key
        for variant in experiments.EXPERIMENTS[name].variants
        for run in experiments.runs(name, "paper", more_seeds, variant=variant)
    }
    foreign = f"rows of no run in grids.toml: measure {name} again, or restore its entry"
    assert set(shipped(name)) <= wanted, foreign


def test_the_list_of_shipped_rows_is_up_to_date():
    wanted = [digests.entry(path) for path in digests.shipped()]
    assert [*digests.listed().values()] == wanted, "python -m tools.digests brings it up to date"
    assert len(wanted) > 60


def test_digests_list_all_rows_without_git(monkeypatch):
    known = digests.shipped()
    monkeypatch.setenv("PATH", "")
    assert {*known} <= {*digests.shipped()}


@pytest.mark.parametrize("name", [*experiments.EXPERIMENTS, *searches.SEARCHES])
def test_every_row_says_where_it_comes_from(name):
    for _, outcome in shipped(name).values():
        assert re.fullmatch(r"[0-9a-f]{12}", outcome.commit)
        assert outcome.device
        assert outcome.torch
        assert outcome.loss > 0
        assert outcome.accuracy is None or 0 <= outcome.accuracy <= 1


@pytest.mark.parametrize(("name", "tier"), CHECKED)
def test_tests_of_assumptions_are_complete(name, tier):
    have = storage.read(storage.SHIPPED / name / f"{tier}.csv")
    listed = assumptions.TESTS[name].configs(tier)
    assert len({asked.key for asked in listed}) == len(listed)
    missing = [asked for asked in listed if asked.key not in have]
    wanted = have or tier != "published"  # which needs a hub
    assert not (missing and wanted), f"{len(missing)} tests are missing"
    assert len(have) == len(listed) - len(missing), "rows of other tests: measure these again"
    for asked, found in have.values():
        assert 0 <= found.dependent <= asked.samples
        assert 0 < found.least_rank <= found.most_rank <= asked.size
        assert re.fullmatch(r"[0-9a-f]{12}", found.commit)
        if found.most_rank < asked.size:
            assert found.dependent > 0


@pytest.mark.parametrize("study", [fits.LAYER, fits.DEEP])
def test_fits_belong_to_their_study(study):
    have, listed = shipped(study.name), study.fittings("paper")
    assert set(have) == {asked.key for asked in listed}
    for asked, found in have.values():
        assert (found.stop == "met") == (found.error <= fitting.MET)
        assert 0 <= found.rms <= found.error
        assert 0 <= found.made <= asked.steps
        assert found.stop != "steps" or found.made == asked.steps
        assert 0 <= found.least <= found.largest
        assert re.fullmatch(r"[0-9a-f]{12}", found.commit)


@pytest.mark.parametrize("name", searches.SEARCHES)
def test_a_search_found_what_its_own_rows_show(name):
    """No stored size above the answer was memorized, and none below it is the answer."""
    table = searches.found(name, "paper")
    rows = shipped(name).values()
    cells = searches.SEARCHES[name].cells["paper"]
    assert len(table) == len(cells)
    for line in table.itertuples():
        shape = (line.d, line.d_h, line.H)
        sizes = {r.T for r, o in rows if (r.d, r.d_h, r.H) == shape and o.accuracy == 1}
        assert line.memorized == max(sizes)
        assert line.failed is None or line.failed > line.memorized
