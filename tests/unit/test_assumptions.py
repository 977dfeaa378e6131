"""The tests of the papers' assumptions on features: what is listed, what is found, what resumes."""

import dataclasses
from functools import partial

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from attnmem import __main__
from attnmem.features import corpora, encoders, pretrained
from attnmem.features.encoders import Seen
from attnmem.lab import assumptions, experiments
from attnmem.lab.experiments import STUDIES
from attnmem.lab.study import ALL
from attnmem.theory.independence import numerical_rank

NAME = "assumptions-vision"


pytestmark = pytest.mark.usefixtures("store", "no_hub")


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_language_features_are_those_of_the_encoders(kind):
    name = f"assumptions-{kind}"
    assert experiments.run(name, "quick") == len(assumptions.checks(name, "quick"))
    rows = experiments.table(name, "quick")
    seen = assumptions.collect(name, "quick", "float64")
    assert [*seen] == ["random L0", "random L1"]
    found = assumptions.by_precision(rows, "ranks").float64
    positions = numerical_rank(seen["random L0"].positions)
    assert found["positions", "random L0"] == f"{positions} to {positions}"
    whole = 23 if kind == "bert" else 24  # a BERT's block ends with a normalization
    assert found["GP", "random L1"] == f"{whole} to {whole}"


def test_deeper_layers_are_read_by_random_heads_and_memorize_labels(monkeypatch):
    monkeypatch.setattr(assumptions, "STEPS", 300)

    def untrained(folder, seed):
        model = encoders.random_encoder(("vit", pretrained.DIGITS_VIT), depth=2, seed=seed).model
        model.save_pretrained(folder)
        return 1.0

    deeper = dataclasses.replace(
        assumptions.CASES[NAME]["deeper"],
        T=80,
        batches=lambda: corpora.digits()[0][:80].split(50),
        trained=partial(assumptions.trained_here, untrained, 0.0),
        samples=(20, 20),
        sizes=(8,),
        depth=2,
        labels=(12,),
    )
    monkeypatch.setitem(assumptions.CASES[NAME], "deeper", deeper)
    assert experiments.run(NAME, "deeper") == len(assumptions.checks(NAME, "deeper"))
    rows = experiments.table(NAME, "deeper")
    assert set(rows["map"]) == {
        f"{kind} L{at}" for kind in ("random", "trained") for at in range(3)
    }
    labels = rows[rows.test == "labels"]
    assert (labels.samples == 5).all()
    assert (labels.most_rank <= 12).all()
    assert labels.dependent.max() == 0, "fewer labels than independent inputs"
    seen = assumptions.collect(NAME, "deeper", "float64")["random L2"]
    assert seen.heads.shape == (80, 64)


@pytest.mark.parametrize("rank", [1, 12])
def test_labels_are_met_where_the_features_allow_it(rank):
    g = torch.Generator().manual_seed(0)
    left = torch.randn(60, rank, generator=g, dtype=torch.float64)
    read = left @ torch.randn(rank, 12, generator=g, dtype=torch.float64)
    [asked, *_] = [a for a in assumptions.checks(NAME, "deeper") if a.vectors == "labels"]
    few = assumptions.labels_met(read, dataclasses.replace(asked, size=13))
    many = assumptions.labels_met(read, dataclasses.replace(asked, size=60))
    assert few.shape == (asked.samples,)
    assert (few == 13).all() == (rank == 12), "a weight for each coordinate, and a bias"
    assert many.max() < 60, "chance: 2^-60 times a few thousand half-spaces"


def tiny(kind):
    if kind == "vit":  # 17 tokens of an image of the published size
        return kind, assumptions.TINY_SIZES | {"image_size": 224, "patch_size": 56}
    return kind, pretrained.language_sizes(kind, length=20, d=24, layers=2)


def local_data(kind, folder):
    random = np.random.default_rng(0)
    if kind == "vit":
        pixels = random.integers(0, 256, (40, 32, 32, 3), dtype=np.uint8)
        columns = {"image": [Image.fromarray(each) for each in pixels]}
    else:
        columns = {"text": [" ".join(map(str, random.integers(100, size=25))) for _ in range(40)]}
    datasets.Dataset.from_dict(columns).save_to_disk(folder)
    return str(folder)


@pytest.mark.parametrize("kind", ["vit", "bert", "gpt2"])
def test_the_published_tier_runs_on_folders_in_place_of_a_hub(
    kind, tmp_path, monkeypatch, save_words
):
    hub, source = str(tmp_path / "model"), local_data(kind, tmp_path / "data")
    encoders.random_encoder(tiny(kind), depth=2, seed=1).model.save_pretrained(hub)
    save_words(hub, [*map(str, range(100))], cls_token="1", sep_token="2")
    name = {"vit": NAME}.get(kind, f"assumptions-{kind}")
    if kind == "vit":
        tiers = assumptions._vision(source, hub, "vit-tiny", (17, 24), sizes=(5, 20))
    else:
        train = pretrained.library_bert
        tiers = assumptions._language(
            kind, source, hub, f"{kind}-tiny", (20, 24), (5, 23), train, least=0.0
        )
    case = dataclasses.replace(tiers["published"], T=40, samples=(50, 20), model=tiny(kind))
    monkeypatch.setitem(assumptions.CASES[name], "published", case)
    assert experiments.run(name, "published") == len(assumptions.checks(name, "published"))
    rows = experiments.table(name, "published")
    assert set(rows["map"]) >= {"random L0", "random L1", "trained L0", "trained L1"}
    assert (rows.source == source).all()
    found = assumptions.by_precision(rows, "share").float64
    assert found["A1", "trained L1"] == 1
    assert found["A2", "trained L1"] == 1
    beside = assumptions.by_tier(name, "share")["published", "float64"]
    assert beside.dropna().to_dict() == found.to_dict()
    count = len(rows)
    assert assumptions.coverage(name).loc["published"].to_list() == [count, count]
    with_paper = assumptions.beside_paper(beside.to_frame(("published", "float64")), found)
    assert [*with_paper] == [("paper", "float32"), ("published", "float64")]
    assert with_paper["paper", "float32"].replace("", None).dropna().to_dict() == found.to_dict()


def test_a_run_tests_what_is_missing_and_its_rows_are_the_features(monkeypatch):
    stop = assumptions.checks(NAME, "quick")[9]
    perform = assumptions.perform

    def interrupted(seen, asked):
        if asked == stop:
            raise KeyboardInterrupt
        return perform(seen, asked)

    monkeypatch.setattr(assumptions, "perform", interrupted)
    with pytest.raises(KeyboardInterrupt):
        experiments.run(NAME, "quick")
    have = experiments.rows(NAME, "quick")
    assert STUDIES[NAME].done("quick", ALL, have) == (9, 26)
    monkeypatch.setattr(assumptions, "perform", perform)
    assert experiments.run(NAME, "quick") == 26 - 9
    assert experiments.run(NAME, "quick") == 0
    table = experiments.table(NAME, "quick").set_index(["map", "dtype", "vectors", "size"])
    seen = assumptions.collect(NAME, "quick", "float64")
    for name, found in seen.items():
        row = table.loc[name, "float64", "contexts", 17]
        assert row.dependent == int((found.ranks < 17).sum())
    row = table.loc["random L0", "float64", "queries", 17]
    assert (row.dependent, row.most_rank) == (200, 1), "one and the same query in every image"


def test_a_tier_may_have_several_data_and_the_first_is_the_one_that_tables_show(monkeypatch):
    first = assumptions.CASES[NAME]["quick"]

    def save(folder, seed):
        encoders.random_encoder(first.model, seed=seed).model.save_pretrained(folder)
        return 1.0

    second = dataclasses.replace(
        first,
        source="again",
        T=30,
        batches=lambda: corpora.photograph_crops(30, size=32, seed=1),
        model=None,
        trained=partial(assumptions.trained_here, save, 0.0),
        curves=(),
    )
    both = {"quick": dataclasses.replace(first, also=(second,)), "published": first}
    monkeypatch.setitem(assumptions.CASES, NAME, both)
    assert experiments.run(NAME, "quick") == len(assumptions.checks(NAME, "quick"))
    rows = experiments.table(NAME, "quick")
    mine = rows[rows.source == "again"]
    assert set(mine["map"]) == {"trained L0", "trained L1"}, "no random weights were asked for"
    assert set(mine["T"]) == {30}
    assert set(assumptions.collect(NAME, "quick", "float64", source="again")) == set(mine["map"])
    monkeypatch.setattr(assumptions, "TIERS", ("quick",))
    shown = assumptions.by_tier(NAME, "share").index.get_level_values("map")
    assert not shown.str.startswith("trained").any()
    beside = assumptions.by_source(NAME, "share", "quick")
    assert [*beside] == [("again", "float32"), ("again", "float64")]
    assert beside["again", "float64"]["A1", "trained L0"] == 0, "one and the same query"
    with pytest.raises(ValueError, match=r"^source: got 'other'; expected one of photographs, ag"):
        assumptions.collect(NAME, "quick", "float64", source="other")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"T": 61}, "source: got 60 examples of photographs; expected 61"),
        (
            {"trained": partial(assumptions.trained_here, lambda folder, seed: 0.5, 0.97)},
            "<lambda>: got 0.5000 on data held out",
        ),
    ],
)
def test_no_rows_come_from_other_data_or_from_a_model_that_did_not_learn(monkeypatch, change, said):
    case = dataclasses.replace(assumptions.CASES[NAME]["quick"], **change)
    monkeypatch.setitem(assumptions.CASES[NAME], "quick", case)
    with pytest.raises(ValueError, match=f"^{said}"):
        experiments.run(NAME, "quick")


@pytest.mark.parametrize(
    ("asked", "argument"),
    [
        (("vision", "quick", "float32"), "name"),
        ((NAME, "paper", "float32"), "tier"),
        ((NAME, "quick", "float16"), "dtype"),
    ],
)
def test_features_of_no_case_are_refused_by_name(asked, argument):
    with pytest.raises(ValueError, match=rf"^{argument}: got '.*'; expected one of "):
        assumptions.collect(*asked)


@pytest.mark.parametrize("dependent", [False, True])
def test_a_test_counts_dependent_subsets_and_their_ranks(dependent):
    vectors = torch.randn(40, 12, dtype=torch.float64)
    if dependent:
        vectors[:, 5:] = 0
    seen = Seen(vectors, vectors * 2, torch.full((40,), 7), vectors)
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
