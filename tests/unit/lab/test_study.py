"""The grids are the published ones, and every cell of them is one run for each seed."""

import dataclasses

import pytest
import torch

from attnmem import __main__ as cli
from attnmem.lab import data, experiments, models, study
from attnmem.lab.experiments import EXPERIMENTS, STUDIES
from attnmem.lab.store import Outcome, Run, Skewed
from attnmem.lab.study import ALL


def of(name, profile="paper"):
    return experiments.runs(name, profile)


COUNTS = {
    "dana-exp1": 11 * 7 * 5,
    "dana-exp2": 10 * 5,
    "dana-exp3": 11 * 5,
    "dana-exp5-aot": 3 * 7 * 5,
    "dana-exp5-mlp": 3 * 7 * 5,
    "dana-exp6": 6 * 20,
    "dana-dim1": 3 * 6 * 5,
    "dana-dim2": 11 * 5,
    "dana-dim5": 3 * 6 * 5,
    "dana-depth1": 3 * 6 * 5,
    "dana-depth2": 10 * 5,
    "dana-depth5": 3 * 6 * 5,
    "mahdavi-fig2a": 8 * 4 * 6,
    "mahdavi-fig2b": 8 * 4 * 6,
    "mahdavi-fig2c": 12 * 3 * 6,
    "mahdavi-fig3": 2 * 6,
    "mahdavi-fig4-heads": 8 * 6 * 6,
    "mahdavi-fig4-context": 8 * 5 * 6,
    "mahdavi-fig5-shared-heads": 8 * 5 * 6,
    "mahdavi-fig5-shared-context": 8 * 4 * 6,
    "mahdavi-fig5-random-heads": 8 * 5 * 6,
    "mahdavi-fig5-random-context": 8 * 5 * 6,
}


def test_every_published_experiment_has_every_run_once():
    assert {name: len(of(name)) for name in COUNTS} == COUNTS
    assert set(COUNTS) == {*experiments.MAHDAVI, *experiments.DANA}
    keys = [
        run.key
        for name, experiment in experiments.EXPERIMENTS.items()
        for profile in study.PROFILES
        for variant in experiment.variants
        for run in experiments.runs(name, profile, variant=variant)
    ]
    assert len(set(keys)) == len(keys) > sum(COUNTS.values())


def test_variants_differ_by_their_name_only():
    for name in ("dana-exp2", "dana-exp3", "dana-exp6", "dana-dim2"):
        for variant in experiments.EXPERIMENTS[name].variants:
            theirs = experiments.runs(name, "paper", variant=variant)
            assert {run.variant for run in theirs} == {variant}
            assert [dataclasses.replace(run, variant="code") for run in theirs] == of(name)


def test_runs_of_a_part_are_chosen_by_values():
    part = experiments.runs("dana-exp1", "paper", 2, where={"d": 10, "H": 6})
    assert [(run.d, run.H, run.seed) for run in part] == [(10, 6, 0), (10, 6, 1)]
    assert set(part) < set(of("dana-exp1"))
    chosen = experiments.runs("dana-depth-own-layers", "quick", 1, where={"width": None})
    assert {run.width for run in chosen} == {None}  # MLPs have one


@pytest.mark.parametrize(
    ("name", "published", "tables"),
    [("dana-exp5-mlp-one-table", "dana-exp5-mlp", 3), ("dana-exp6-one-table", "dana-exp6", 5)],
)
def test_seeds_share_a_table_and_nothing_else(name, published, tables):
    runs = of(name)
    back = {"experiment": published, "table": None}
    once = [dataclasses.replace(run, **back) for run in runs]
    assert {once.count(run) for run in once} == {tables}
    assert set(once) <= set(of(published))
    same_cell = [run for run in runs if (run.H, run.width) == (runs[0].H, runs[0].width)]
    drawn = {(run.table, run.seed): data.pairs_of(run) for run in same_cell}
    for (number, seed), pair in drawn.items():
        assert torch.equal(pair.table, drawn[number, 0].table)
        assert seed == 0 or not torch.equal(pair.tokens, drawn[number, 0].tokens)
        assert number == 0 or not torch.equal(pair.table, drawn[0, 0].table)
        a, b = pair.tokens.unbind(dim=1)
        assert torch.equal(pair.next_tokens, pair.table[a, b])


@pytest.mark.parametrize(
    ("name", "published", "change", "seeds"),
    [
        ("mahdavi-fig2a-short", "mahdavi-fig2a", {"last_batch": "short"}, 3),
        ("mahdavi-fig2a-shared", "mahdavi-fig2a", {"table": 0}, 3),
        ("mahdavi-fig3-short", "mahdavi-fig3", {"last_batch": "short"}, 6),
    ],
)
def test_the_small_print_changes_one_thing(name, published, change, seeds):
    changed = {dataclasses.replace(run, experiment=name, **change) for run in of(published)}
    assert set(of(name)) <= changed
    assert {run.seed for run in of(name)} == set(range(seeds))
    first, second = (dataclasses.replace(run, T=20) for run in of(name)[:2])
    drawn = [data.contexts_of(run) for run in (first, second)]
    for one, other in zip(*drawn, strict=True):  # seeds share their examples if these are numbered
        assert torch.equal(one, other) == ("table" in change)


@pytest.mark.parametrize(
    ("published", "cell", "epochs"),
    [
        ("dana-exp1", {"model": "aot", "N": 50, "d": 10, "H": 6}, 64),
        ("dana-exp5-aot", {"model": "aot", "N": 70, "d": 10, "H": 11}, 16),
        ("dana-exp5-mlp", {"model": "mlp", "N": 70, "d": 10, "width": 200}, 16),
    ],
)
def test_other_distributions_change_the_data_of_one_size(published, cell, epochs):
    [base, *_] = experiments.runs(published, "paper", 1, where=cell)
    steps = epochs * base.T // base.batch
    same = dataclasses.replace(base, experiment="dana-priors", steps=steps)
    theirs = [run for run in of("dana-priors") if {**cell}.items() <= vars(run).items()]
    drawn = {(run.prior, run.entropy) for run in theirs}
    priors, entropies = (0.0, 0.5, 1.0, 1.5), (0.5, 1.0, 2.0, 3.0)
    assert drawn == {*((p, None) for p in priors), *((None, h) for h in entropies)}
    assert len(theirs) == 8 * 5
    for run in theirs:
        assert type(run) is Skewed
        assert run == Skewed(
            **vars(same) | {"seed": run.seed}, prior=run.prior, entropy=run.entropy
        )
    assert len({study.name_of(run) for run in theirs}) == 8
    assert {type(run) for name in COUNTS for run in experiments.runs(name, "paper", 1)} == {Run}


def test_more_layers_change_their_number_and_the_rate():
    published = {"aot": "dana-depth1", "mlp": "dana-depth5"}
    for run in of("dana-deeper"):
        three = dataclasses.replace(run, experiment=published[run.model], layers=3)
        assert three in of(published[run.model])
    quarter = {"experiment": "dana-deeper-rates", "seed": 0, "steps": 2048}
    for run in of("dana-deeper-tuned"):
        if run.H != 14 and run.width != 168:  # the wider three layers
            assert dataclasses.replace(run, **quarter) in of("dana-deeper-rates")


def test_the_learning_rates_are_those_of_the_sheet():
    for name in (n for n in COUNTS if n.startswith("dana")):
        deep, mlp = "depth" in name, name in ("dana-exp5-mlp", "dana-dim5")
        for run in of(name):
            assert run.lr * run.lr_start == pytest.approx(2.5e-3 if deep else 1e-2)
            last = 2.5e-3 if deep else 1e-4 if mlp else 5e-4
            assert run.lr * run.lr_end == pytest.approx(last)
            assert run.steps == 64 * (run.T // run.batch)


def test_compared_parameters_are_equal_in_number():
    for aot, mlp in zip(of("dana-exp5-aot"), of("dana-exp5-mlp"), strict=True):
        assert (aot.d, aot.seed) == (mlp.d, mlp.seed)
        assert 4 * aot.d**2 * aot.H == 4 * mlp.d**2 * mlp.H + 2 * mlp.d * mlp.width


def test_the_protocol_of_the_memorization_grids():
    for name in (n for n in COUNTS if n.startswith("mahdavi")):
        for run in of(name):
            least = 300_000 if name in ("mahdavi-fig2c", "mahdavi-fig3") else 50_000
            assert run.steps == max(500 * run.T // 256, least)
            assert run.context == ("random" if "fig4" in name or "random" in name else "shared")
            assert (run.N is None) == (run.task == "reals") == ("fig5" in name)
            assert run.early_stop == (name != "mahdavi-fig3" and "fig5" not in name)
    assert {run.d_h for run in of("mahdavi-fig2c")} == {*range(10, 61, 5), 64}


@pytest.mark.parametrize(
    ("name", "profile", "options", "refused"),
    [
        ("dana-exp9", "paper", {}, "name"),
        ("dana-exp1", "full", {}, "profile"),
        ("dana-exp1", "paper", {"seeds": 0}, "seeds"),
        ("dana-exp1", "paper", {"variant": "paper"}, "variant"),
        ("dana-exp1", "paper", {"where": {"depth": 3}}, "where"),
        ("dana-exp1", "paper", {"where": {"d": 99}}, "where"),
        ("dana-depth-own-layers", "quick", {"where": {"width": 1}}, "where"),
        ("dana-depth-own-layers", "quick", {"where": {"model": "mlp", "d": 4, "H": 1}}, "where"),
    ],
)
def test_bad_arguments_are_named(name, profile, options, refused):
    with pytest.raises(ValueError, match=rf"^{refused}: got "):
        experiments.runs(name, profile, **options)


@pytest.mark.parametrize(
    ("was", "now", "refused"),
    [
        ('title = "Exp. 6"', 'tittle = "Exp. 6"', "dana-exp6: got the field 'tittle'"),
        ('title = "Exp. 6"\n', "", "dana-exp6: got variants, paper, quick; expected title"),
        ('like = ["small", "exp6"]', 'like = "smal"', "dana-exp6, paper, like: got 'smal'"),
        ('["small", "exp6"]', '"exp6"', "dana-exp6, paper, model: got nothing"),
        ("d = [3, 5], H", "depth = 1, d = 3, H", "dana-exp1, quick, depth: got a field that no"),
        ("H = [1, 6, 11, 16", "H = [1.5, 6", r"dana-exp1, paper, H: got \[1.5, .*of type int"),
        ("[dana-exp1]", "[danna-exp1]", "danna-exp1: got 'danna'; expected a name with one of"),
        ('curves = "model"', 'curves = "modell"', "dana-depth-own-layers, curves: got modell"),
        ('like = "deep", seeds = 3', 'like = "deep"', "dana-depth-counts, paper, seeds: got"),
        ("H = [1, 6, 11]", "H = []", r"dana-exp1, quick, H: got \[\]"),
        ("11, 12, 13], H", "11, 12, 13], n", "dana-exp1, paper, H: got nothing"),
    ],
)
def test_a_bad_entry_is_refused_by_its_name_and_field(was, now, refused, monkeypatch, tmp_path):
    text = study.GRIDS.read_text()
    assert was in text
    (tmp_path / "grids.toml").write_text(text.replace(was, now))
    monkeypatch.setattr(study, "GRIDS", tmp_path / "grids.toml")
    with pytest.raises(ValueError, match=rf"^grids\.toml, {refused}"):
        study.from_grids(study.Experiment)


def test_a_new_family_and_experiment_are_two_entries(store, monkeypatch, capsys):
    """Nothing else has to know of them to run, read and list them."""
    monkeypatch.setitem(models.MODELS, "new", models.MODELS["aot"])
    cells = [cell | {"model": "new"} for cell in EXPERIMENTS["dana-exp6"].cells["quick"]]
    both, seeds = ({"paper": one, "quick": one} for one in (cells, 2))
    entry = study.Experiment("dana-new", "dana", "a new model", both, seeds, curves="H")
    for table in (EXPERIMENTS, STUDIES):
        monkeypatch.setitem(table, entry.name, entry)
    assert experiments.run("dana-new", "quick", "cpu") == 6
    table, profile = experiments.stored("dana-new", "quick", curves="H")
    assert (len(table), profile) == (6, "quick")
    assert cli.main(["status", "--profile", "quick"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["quick", "dana-new", "code", "6", "of", "6", "complete"] in lines


# --- prices ---------------------------------------------------------------------------------------


def outcome_in(seconds, **changes):
    return dataclasses.replace(Outcome(0.5, 0.1, seconds, "cpu", "2", "abc"), **changes)


def test_a_curve_without_rows_is_priced_by_its_steps():
    """A step takes H milliseconds here, on a GPU none of them; some stop after half of the steps.

    A cell with rows costs what they took; others are priced as if nothing stopped early.
    """
    study = STUDIES["mahdavi-fig4-heads"]
    runs = study.configs("paper")
    rows = []
    for run in runs:
        if run.T == 30_000 and run.seed < 2 and run.H < 60:
            steps = run.steps // 2 if run.H >= 30 else run.steps
            early = {"accuracy": 1.0, "best_step": steps} if run.H >= 30 else {}
            rows.append((run, outcome_in(1e-3 * run.H * steps, **early)))
        if run.T == 130_000 and run.seed == 0:
            rows.append((run, outcome_in(1.0, device="H100")))
    stored = {run.key: (run, result) for run, result in rows}
    missing = study.missing("paper", ALL, stored)
    assert len(missing) == len(runs) - len(rows)
    rates = [1e-3 * H for H in (1, 5, 10, 20, 30, 40, 50) for _ in range(2)]
    for run, price in zip(missing, study.prices(missing, stored), strict=True):
        steps = run.steps // 2 if run.T == 30_000 and 30 <= run.H < 60 else run.steps
        rate = 1e-3 * run.H if run.H < 60 else sum(rates) / len(rates)
        assert price == pytest.approx(rate * steps), run
