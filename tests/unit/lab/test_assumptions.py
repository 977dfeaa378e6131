"""The tests of the papers' assumptions on features: what is listed, what is found, what resumes."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from attnmem import __main__
from attnmem.features import corpora, encoders, hub, pretrained
from attnmem.features.encoders import Seen
from attnmem.lab import assumptions, experiments, store
from attnmem.lab.assumptions import TESTS
from attnmem.theory.independence import numerical_rank

import stand_ins

NAME = "assumptions-vision"
VISION = TESTS[NAME]


pytestmark = pytest.mark.usefixtures("store", "no_hub")


@pytest.fixture
def changed(monkeypatch):
    """A function that gives a study's tier other fields."""

    def change(name, tier, **fields):
        case = dataclasses.replace(TESTS[name].tiers[tier], **fields)
        monkeypatch.setitem(TESTS[name].tiers, tier, case)
        return case

    return change


def untrained(folder, seed):
    encoders.random_encoder("vit-tiny", depth=2, seed=seed).model.save_pretrained(folder)
    return 0.5


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_language_features_are_those_of_the_encoders(kind):
    study = TESTS[f"assumptions-{kind}"]
    assert experiments.run(study.name, "quick") == len(study.configs("quick"))
    rows = experiments.table(study.name, "quick")
    seen = assumptions.features_of(study.tiers["quick"], "float64", "cpu")
    assert [*seen] == ["random L0", "random L1"]
    found = assumptions.by_precision(rows, "ranks").float64
    positions = numerical_rank(seen["random L0"].positions)
    assert found["positions", "random L0"] == f"{positions} to {positions}"
    whole = 23 if kind == "bert" else 24  # a BERT's block ends with a normalization
    assert found["GP", "random L1"] == f"{whole} to {whole}"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The published tier at the sizes of stand-ins, all of it run; the case before these sizes."""
    own = VISION.tiers["published"]
    stand_ins.use(monkeypatch, tmp_path, "vision", good=True)
    assert experiments.run(NAME, "published", "cpu") == len(VISION.configs("published"))
    return own


def test_published_rows_say_what_they_come_from(run, changed):
    rows = store.known(NAME, "published").values()
    for check, finding in rows:
        assert finding.data.startswith(f"ILSVRC/imagenet-1k@{stand_ins.COMMIT} data/train-00000-")
        assert re.search(r"parquet=[0-9a-f]{64}$", finding.data)
        if check.map.startswith("trained"):
            assert re.search(r"@[0-9a-f]{40} model.safetensors=[0-9a-f]{64}$", finding.weights)
        else:
            assert finding.weights is None
    found = assumptions.by_precision(experiments.table(NAME, "published"), "share").float64
    beside = assumptions.by_tier(NAME, "share")["published", "float64"]
    assert beside.dropna().to_dict() == found.to_dict()
    with_paper = assumptions.beside_paper(beside.to_frame(("published", "float64")), found)
    assert [*with_paper] == [("paper", "float32"), ("published", "float64")]
    assert with_paper["paper", "float32"].replace("", None).dropna().to_dict() == found.to_dict()
    said = "400 examples of ILSVRC/imagenet-1k, vision-stand-in (n = 5, d = 384)"
    assert assumptions.sizes_of(assumptions.published(NAME)) == said


def test_stand_ins_are_never_taken_for_what_is_published(run, changed, tmp_path, monkeypatch):
    assert len(assumptions.published(NAME)) == len(VISION.configs("published"))
    changed(NAME, "published", sizes=(250, 300, 350))  # so that some are missing
    stand_ins.fill(tmp_path, run, "vision", good=False)
    hub._fetched.cache_clear()
    with pytest.raises(ValueError, match=r"^rows: got some of \{'data': 'ILSVRC"):
        experiments.run(NAME, "published", "cpu")
    monkeypatch.setitem(VISION.tiers, "published", run)
    assert len(assumptions.published(NAME)) == 0, "rows of other sizes are none"
    monkeypatch.setenv("ATTNMEM_MEASUREMENTS", str(tmp_path / "empty"))
    with pytest.raises(ValueError, match=r"^source: got a model with hidden_size = 384; exp.* 768"):
        experiments.run(NAME, "published", "cpu")


def test_all_that_a_hub_has_is_fetched_before_any_computation(monkeypatch):
    asked = []

    def fetched(name, *_):
        asked.append(name)
        return hub.Fetched(name, "a commit", Path(), {})

    monkeypatch.setattr(hub, "_fetched", fetched)
    jobs = [experiments.Job(name, "published") for name in TESTS]
    assert experiments.run_jobs(jobs, "cpu", limit_minutes=1e-9) == 0
    expected = {"ILSVRC/imagenet-1k", "google/vit-base-patch16-224-in21k", "wikimedia/wikipedia"}
    assert {*asked} == expected | {"google-bert/bert-large-uncased", "openai-community/gpt2-large"}


def test_rows_of_a_run_are_what_the_features_say():
    assert experiments.run(NAME, "quick") == 26
    assert experiments.run(NAME, "quick") == 0
    table = experiments.table(NAME, "quick").set_index(["map", "dtype", "vectors", "size"])
    for name, seen in assumptions.features_of(VISION.tiers["quick"], "float64", "cpu").items():
        row = table.loc[name, "float64", "contexts", 17]
        assert row.dependent == int((seen.ranks < 17).sum())
    row = table.loc["random L0", "float64", "queries", 17]
    assert (row.dependent, row.most_rank) == (200, 1), "one and the same query in every image"


def test_tables_show_the_first_data_of_a_tier(changed, monkeypatch):
    monkeypatch.setattr(pretrained, "digits_vit", untrained)
    first = VISION.tiers["quick"]
    weights = {"random": False, "trained": "digits_vit", "least": 0.0, "curves": ()}
    data = first.data | {"count": 30}
    second = dataclasses.replace(first, source="again", T=30, data=data, **weights)
    changed(NAME, "quick", also=(second,))
    monkeypatch.setitem(VISION.tiers, "published", first)
    assert experiments.run(NAME, "quick") == len(VISION.configs("quick"))
    rows = experiments.table(NAME, "quick")
    mine = rows[rows.source == "again"]
    assert set(mine["map"]) == {"trained L0", "trained L1"}, "no random weights were asked for"
    assert set(mine["T"]) == {30}
    monkeypatch.setattr(assumptions, "TIERS", ("quick",))
    shown = assumptions.by_tier(NAME, "share").index.get_level_values("map")
    assert not shown.str.startswith("trained").any()
    beside = assumptions.by_source(NAME, "share", "quick")
    assert [*beside] == [("again", "float32"), ("again", "float64")]
    assert beside["again", "float64"]["A1", "trained L0"] == 0, "one and the same query"


def test_images_are_given_to_a_model_as_it_reads_them(changed):
    data = {"reader": "photograph_crops", "count": 2, "size": 32}
    [levels] = changed(NAME, "pretrained", architecture="vit-tiny", data=data).batches()
    [pixels] = changed(NAME, "pretrained", architecture="dinov2-small").batches()
    torch.testing.assert_close(pixels, corpora.standardized(levels))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"T": 61}, "source: got 60 examples of photographs; expected 61"),
        ({"trained": "digits_vit", "least": 0.97}, "untrained: got 0.5000 on data held out"),
        ({"n": 18}, "source: got 17 tokens of dimension 24; expected 18 of dimension 24"),
        ({"d": 23}, "source: got 17 tokens of dimension 24; expected 17 of dimension 23"),
    ],
)
def test_bad_features_give_no_rows(changed, fields, said, monkeypatch):
    monkeypatch.setattr(pretrained, "digits_vit", untrained)
    changed(NAME, "quick", **fields)
    with pytest.raises(ValueError, match=f"^{said}"):
        experiments.run(NAME, "quick")


GOOD = """
[assumptions-new]
what = "ours"
[assumptions-new.quick]
source = "photographs"
architecture = "vit-tiny"
T = 60
n = 17
d = 24
data = { reader = "photograph_crops", count = 60, size = 32 }
samples = [200, 100]
[[assumptions-new.quick.also]]
T = 30
"""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("n = 17", "n = -1", "n: got -1; expected an integer of at least 1"),
        ("[200, 100]", '["many"]', r"samples\[0\]: got 'many'; expected an integer"),
        ("d = 24", "d = 24\ndim = 24", "got an unexpected keyword argument 'dim'"),
        ("d = 24", "", "missing a required argument: 'd'"),
        ("vit-tiny", "vit-huge", "'vit-huge'"),
        ("photograph_crops", "nowhere", "'nowhere'"),
        ("d = 24", 'd = 24\ntrained = "by/nobody"', "module .* has no attribute 'by/nobody'"),
    ],
)
def test_a_bad_case_is_refused_by_its_place_and_name(old, new, said):
    study = assumptions.studies_in(GOOD)["assumptions-new"]
    assert (study.profiles, study.tiers["quick"].also[0].n) == (("quick",), 17)
    with pytest.raises(
        ValueError, match=rf"^assumptions-new.quick\S* cannot be read as .*: {said}"
    ):
        assumptions.studies_in(GOOD.replace(old, new))


def test_independence_counts_subsets_and_their_ranks():
    [asked, *_] = [a for a in VISION.configs("quick") if (a.vectors, a.size) == ("relaxed", 17)]
    for rank in (12, 5):
        vectors = torch.randn(40, 12, dtype=torch.float64)
        vectors[:, rank:] = 0
        seen = Seen(vectors, vectors * 2, torch.full((40,), 7))
        found = assumptions.independence(seen, dataclasses.replace(asked, size=8))
        assert (found.dependent, found.ranked) == (200 * (rank < 8), 20)
        assert found.most_rank == min(rank, 8)


def test_the_command_line_tests_and_says_what_it_needs(capsys):
    def said(*words):
        done = __main__.main(["run", NAME, "--device", "cpu", *words])
        return done, "".join(capsys.readouterr())

    done, out = said("--profile", "quick")
    first = f"[1/26] {NAME}, random L0, float32: queries, size 17, 200 of 200 dependent"
    assert (done, first in out, f"26 rows added\n{NAME}: 0 missing" in out) == (0, True, True)
    for words, error in [
        (("--profile", "published"), "the dataset ILSVRC/imagenet-1k is not whole in "),
        (("--profile", "paper"), "profile: got 'paper'; expected one of published, shipped"),
        (("--seeds", "3"), f"seeds: got 3; expected nothing, since {NAME} is tests of linear ind"),
    ]:
        done, out = said(*words)
        assert (done, out[: len(error)], out.count("\n")) == (1, error, 1)
