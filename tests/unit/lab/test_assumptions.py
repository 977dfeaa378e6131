"""The tests of the papers' assumptions on features: what is listed, what is found, what resumes."""

import dataclasses

import numpy as np
import pytest
import torch
from PIL import Image

from attnmem import __main__
from attnmem.features import corpora, encoders, pretrained
from attnmem.features.encoders import Seen
from attnmem.lab import assumptions, experiments
from attnmem.lab.assumptions import TESTS
from attnmem.theory.independence import numerical_rank

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


@pytest.mark.parametrize("kind", ["vision", "bert", "gpt2"])
def test_the_published_tier_runs_without_a_hub(kind, tmp_path, changed, save_words, save_data):
    random, hub = np.random.default_rng(0), str(tmp_path / "model")
    pixels = random.integers(0, 256, (40, 32, 32, 3), dtype=np.uint8)
    texts = [" ".join(map(str, random.integers(100, size=25))) for _ in range(40)]
    columns = {"image": [*map(Image.fromarray, pixels)]} if kind == "vision" else {"text": texts}
    source = save_data(tmp_path / "data", **columns)
    name, architecture = f"assumptions-{kind}", f"{kind.replace('vision', 'vit')}-tiny"
    encoders.random_encoder(architecture, depth=2, seed=1).model.save_pretrained(hub)
    save_words(hub, [*map(str, range(100))], cls_token="1", sep_token="2")
    told = {"size": 32} if kind == "vision" else {"tokenizer": hub, "length": 20}
    n = 17 if kind == "vision" else 20
    data = TESTS[name].tiers["published"].data | told | {"source": source, "count": 40}
    sizes = {"T": 40, "n": n, "d": 24, "samples": (50, 20), "sizes": (5, 23)}
    here = {"source": source, "architecture": architecture, "trained": hub}
    changed(name, "published", data=data, **sizes, **here)
    assert experiments.run(name, "published") == len(TESTS[name].configs("published"))
    rows = experiments.table(name, "published")
    assert set(rows["map"]) >= {"random L0", "random L1", "trained L0", "trained L1"}
    assert (rows.source == source).all()
    found = assumptions.by_precision(rows, "share").float64
    assert found["A1", "trained L1"] == found["A2", "trained L1"] == 1
    beside = assumptions.by_tier(name, "share")["published", "float64"]
    assert beside.dropna().to_dict() == found.to_dict()
    with_paper = assumptions.beside_paper(beside.to_frame(("published", "float64")), found)
    assert [*with_paper] == [("paper", "float32"), ("published", "float64")]
    assert with_paper["paper", "float32"].replace("", None).dropna().to_dict() == found.to_dict()


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
        (("--profile", "published"), "source 'google/vit-base-patch16-224-in21k' is no folder"),
        (("--profile", "paper"), "profile: got 'paper'; expected one of published, shipped"),
        (("--seeds", "3"), f"seeds: got 3; expected nothing, since {NAME} is tests of linear ind"),
    ]:
        done, out = said(*words)
        assert (done, out[: len(error)], out.count("\n")) == (1, error, 1)
