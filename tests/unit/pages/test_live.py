"""A chapter that trains: its rows go on where they ended, stay apart, are drawn and judged."""

import re

import matplotlib.pyplot as plt
import pytest

from attnmem.lab import experiments, store
from attnmem.pages import live, reporting

from tools.chapters import TEXT, chapters, parameters

ENDLESS = 1e6  # minutes: the trainings end by their steps, however slow the machine is
ASKED = """\
# "cpu" reads the stored trainings. "cuda", or "auto" with a GPU, makes them
# again, too. Profile "quick" trains anywhere: a smoke test, never a result.
device = "cpu"
minutes = 10  # of training, above 0; what has begun by then ends
profile = "paper"  # or "quick"
"""
JUDGES = {"dana-exp1": lambda rows: rows.accuracy.mean() > 0, "dana-exp6": lambda rows: None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("rows")


@pytest.fixture(scope="module")
def own(folder):
    """The smoke test of two experiments, and what its report shows."""
    shown = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNMEM_MEASUREMENTS", str(folder))
        patch.setattr(reporting, "_display", lambda *data: shown.append(data))
        own = live.train(["dana-exp1", "dana-exp6"], minutes=ENDLESS, profile="quick")
        own.report({"dana-exp1": JUDGES["dana-exp1"]})
    [(data, metadata)] = shown
    return own, data["text/plain"], metadata


def test_quick_rows_are_drawn_and_not_judged(own):
    own, told, metadata = own
    assert metadata == {"trained": 18}
    assert "| 3 | 3 | 1 | 2 |" in told
    assert "a smoke test and not a result, which judges no claim" in told
    assert "`dana-exp1`:" not in told
    _, ax = plt.subplots()
    own.draw(ax, "dana-exp1", "H", lambda rows: 100 * rows.accuracy, d=[99])
    [line] = ax.lines
    means = own.table("dana-exp1").groupby(["d", "H"]).accuracy.mean()
    assert sorted(line.get_ydata()) == pytest.approx(sorted(100 * means))


def test_train_says_first_for_how_long(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("ATTNMEM_MEASUREMENTS", str(tmp_path))
    monkeypatch.setattr(experiments, "run_jobs", lambda *_, **__: print("training") or 0)
    live.train(["dana-exp1"], minutes=3, profile="quick")
    said = ["profile quick is trained now on cpu, for 3 minutes at most", "training"]
    assert capsys.readouterr().out.splitlines() == said


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dana-exp1", "the claim holds on 2 of 2 whole curves trained here"),
        ("dana-exp6", "cannot be judged yet: 6 of 6 trainings"),
    ],
)
def test_whole_curves_are_judged(own, name, said):
    assert own[0]._verdict(name, JUDGES[name]).startswith(said)


def test_a_second_run_goes_on_and_rows_stay_apart(own, folder, monkeypatch):
    monkeypatch.setenv("ATTNMEM_MEASUREMENTS", str(folder))
    before = {path: path.read_bytes() for path in folder.rglob("*.csv")}
    assert {path.parents[1] for path in before} == {folder / "live"}
    assert not store.known("dana-exp1", "quick")
    again = live.train(["dana-exp1", "dana-exp6"], minutes=ENDLESS, profile="quick")
    assert again.said.startswith("0 rows")
    assert again.rows == own[0].rows
    assert {path: path.read_bytes() for path in folder.rglob("*.csv")} == before
    other = live.train(["dana-exp6"], minutes=ENDLESS, profile="quick", variant="paper")
    assert {run.variant for run, _ in other.rows["dana-exp6"].values()} == {"paper"}
    again = live.train(["dana-exp6"], minutes=ENDLESS, profile="quick")
    assert again.rows["dana-exp6"] == own[0].rows["dana-exp6"]


def test_a_claim_waits_for_a_whole_curve(own):
    own, _, _ = own
    few = dict([*own.rows["dana-exp1"].items()][:2])
    said = own._replace(rows={"dana-exp1": few})._verdict("dana-exp1", lambda rows: True)
    assert said == "cannot be judged yet: 2 of 12 trainings"


def test_by_default_nothing_is_trained(monkeypatch, capsys):
    monkeypatch.setattr(experiments, "run_jobs", None)
    own = live.train(["dana-exp1"], minutes=2)
    own.report({"dana-exp1": None})
    _, ax = plt.subplots()
    own.draw(ax, "dana-exp1", "H")
    assert not ax.lines
    assert capsys.readouterr() == ("", ""), "a reader of the book sees no line about it"


def test_who_asks_for_a_gpu_hears_that_there_is_none(monkeypatch, capsys):
    monkeypatch.setattr(experiments.torch.cuda, "is_available", lambda: False)
    assert live.train(["dana-exp1"], "auto").rows == {}
    assert capsys.readouterr().out.startswith("no GPU was found here")


@pytest.mark.parametrize(
    ("name", "value"), [("minutes", 0), ("minutes", "ten"), ("device", "gpu"), ("profile", "large")]
)
def test_what_cannot_be_is_refused_by_name(name, value, capsys):
    with pytest.raises(ValueError, match=f"^{name}: got {value!r}"):
        live.train(["dana-exp1"], **{name: value})
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    "chapter", [c for c in chapters() if "live." in (TEXT / f"{c}.md").read_text()]
)
def test_chapters_train_only_if_asked(chapter):
    """The profile says what is trained, and is no other cell's: a smoke test judges no claim."""
    given, text = parameters(chapter), (TEXT / f"{chapter}.md").read_text()
    assert (given["device"], given["minutes"], given["profile"]) == ("cpu", 10, "paper")
    assert ASKED in text
    assert len(re.findall(r"\bprofile\b", text)) == 2
