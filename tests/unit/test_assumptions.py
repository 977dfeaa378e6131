"""The tests of the papers' assumptions on features: what is listed, what is found, what resumes."""

import pytest
import torch

from attnmem import __main__, assumptions
from attnmem.features import Seen
from attnmem.independence import numerical_rank

NAME = "assumptions-vision"


pytestmark = pytest.mark.usefixtures("store", "no_hub")


@pytest.mark.parametrize("tier", assumptions.CASES[NAME])
def test_every_map_has_its_tests_in_both_precisions(tier):
    case = assumptions.CASES[NAME][tier]
    listed = assumptions.checks(NAME, tier)
    assert len({asked.key for asked in listed}) == len(listed)
    for dtype in ("float32", "float64"):
        for name in case.maps:
            found = {(a.vectors, a.size) for a in listed if (a.map, a.dtype) == (name, dtype)}
            assert {("queries", case.n), ("queries", case.d), ("contexts", case.n)} <= found
    relaxed = {a.map for a in listed if a.vectors == "relaxed"}
    assert relaxed == {name for name in case.maps if name.endswith("L0")}


def test_a_run_tests_what_is_missing_and_its_rows_are_the_features(monkeypatch):
    stop = assumptions.checks(NAME, "quick")[9]
    perform = assumptions.perform

    def interrupted(seen, asked):
        if asked == stop:
            raise KeyboardInterrupt
        return perform(seen, asked)

    monkeypatch.setattr(assumptions, "perform", interrupted)
    with pytest.raises(KeyboardInterrupt):
        assumptions.run(NAME, "quick")
    assert len(assumptions.missing(NAME, "quick")) == 26 - 9
    monkeypatch.setattr(assumptions, "perform", perform)
    assert assumptions.run(NAME, "quick") == 26 - 9
    assert assumptions.run(NAME, "quick") == 0
    table = assumptions.table(NAME, "quick").set_index(["map", "dtype", "vectors", "size"])
    seen = assumptions.collect(NAME, "quick", "float64")
    for name, found in seen.items():
        row = table.loc[name, "float64", "contexts", 17]
        assert row.dependent == int((found.ranks < 17).sum())
    row = table.loc["random L0", "float64", "queries", 17]
    assert (row.dependent, row.most_rank) == (200, 1), "one and the same query in every image"


def test_data_of_another_number_are_refused(monkeypatch):
    case = assumptions.CASES[NAME]["quick"]._replace(T=61)
    monkeypatch.setitem(assumptions.CASES[NAME], "quick", case)
    with pytest.raises(ValueError, match=r"^source: got 60 examples of photographs; expected 61"):
        assumptions.run(NAME, "quick")


def test_no_rows_come_from_a_model_that_did_not_learn():
    def fails(folder, seed):
        return 0.5

    encoder = assumptions._trained_here(fails, least=0.97)
    with pytest.raises(ValueError, match=r"^fails: got 0.5000 on data held out; expected at least"):
        encoder(dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("dependent", [False, True])
def test_a_test_counts_dependent_subsets_and_their_ranks(dependent):
    vectors = torch.randn(40, 12, dtype=torch.float64)
    if dependent:
        vectors[:, 5:] = 0
    seen = Seen(vectors, vectors * 2, torch.full((40,), 7))
    [asked] = [
        a
        for a in assumptions.checks(NAME, "quick")
        if (a.map, a.dtype, a.vectors, a.size) == ("random L0", "float64", "relaxed", 17)
    ]
    asked = type(asked)(**vars(asked) | {"size": 8})
    found = assumptions.perform(seen, asked)
    assert (found.dependent, found.ranked) == (200 * dependent, 20)
    assert found.most_rank == numerical_rank(vectors[:8])


def test_the_command_line_tests_and_says_what_it_needs(capsys):
    assert __main__.main(["check", NAME, "--tier", "quick", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "random L0, float32: queries, size 17: 200 of 200 dependent" in said
    assert "26 rows added, none missing" in said
    assert __main__.main(["check", NAME, "--tier", "published", "--device", "cpu"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("source 'google/vit-base-patch16-224-in21k' is no folder here")
    assert said.count("\n") == 1
    assert __main__.main(["check", NAME, "--tier", "none", "--device", "cpu"]) == 1
    assert "tier: got 'none'; expected one of published" in capsys.readouterr().err
