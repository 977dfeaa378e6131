"""Pages and data are what the chapters recorded; every verdict can be followed to its cell."""

import csv
import json
import re
import statistics
from collections import defaultdict

import jsonschema
import nbformat
import pytest

from attnmem import papers
from attnmem.lab import experiments, laws, store
from attnmem.pages import reporting

from tools import claims, graph
from tools.chapters import BOOK, ROOT, chapters, notebook_path, text_path

RECORDED, REFERENCES = graph.recorded(), graph.read()
PAGE, EXTRA = BOOK / "claims.md", BOOK / "extra" / "book"
DATA = json.loads((EXTRA / "claims.json").read_text())


def header(key):
    """Where a claim stands."""
    return f"[{key.replace('-', '.', 1)}] in lib/attnmem/claims.toml"


def test_what_is_made_from_chapters_is_fresh():
    made = claims.products()
    stale = [name for name, text in made.items() if (ROOT / name).read_text() != text]
    assert stale == [], "`python -m tools.claims` renews these files, commit them"


def test_the_report_says_which_rows_a_gpu_made():
    text = claims.coverage("mahdavi", experiments.MAHDAVI)
    n_stored = n_on_gpu = 0
    for name, experiment in experiments.MAHDAVI.items():
        devices = [row["device"] for row in rows(name)]
        on_gpu = sum("NVIDIA" in device for device in devices)
        assert re.search(rf"\| {experiment.source} \| \d+ \| {len(devices)} \| {on_gpu} \|\n", text)
        n_stored, n_on_gpu = n_stored + len(devices), n_on_gpu + on_gpu
    assert n_on_gpu > 0
    assert f"| all | 2,052 | {n_stored:,} | {n_on_gpu:,} |\n" in text


ENTRY = re.compile(r"(?m)^::::\{dropdown\} (.*)\n:name: claim-(.*)\n:class-container: (.*)\n")


def test_every_claim_has_an_entry_with_its_verdict():
    """Before the fold."""
    entries = {key: (title, classes) for title, key, classes in ENTRY.findall(PAGE.read_text())}
    assert [*entries] == [*papers.claims()], "`python -m tools.claims` renews the page"
    for key, claim in papers.claims().items():
        title, classes = entries[key]
        judged = RECORDED.get(key)
        word = f"{judged.verdict} · {judged.grade}" if judged else graph.word_of(claim, None)
        sizes = judged.sizes or "" if judged else ""
        badge = f"[{claim.kind}]{{.claim-kind}} [{word}]{{.claim-badge}}"
        assert all(part in title for part in (claim.label, claim.says, badge, sizes))
        assert classes.split()[0] == "claim"


@pytest.mark.parametrize("claim", papers.claims().values(), ids=lambda claim: claim.key)
def test_a_claim_is_judged_or_says_what_it_needs(claim):
    judged, entry = RECORDED.get(claim.key), header(claim.key)
    assert not (claim.needs and claim.left_out), f"{entry} has `needs` and `left_out`: only one"
    if judged is None:
        remedy = f"judge it by `verdict({claim.key!r}, ...)` in a chapter and run that"
        assert claim.needs or claim.left_out, f"{remedy}, or say in {entry} what it `needs`"
    elif judged.verdict != "in part" and "--profile published" not in claim.needs:  # from a hub
        assert not claim.needs, f"it is judged: take `needs` out of {entry}"
    assert not (judged and claim.left_out), f"it is judged: take `left_out` out of {entry}"


def made_up(word, grade, instead=None, *checks):
    return graph.Recorded("a/chapter", word, grade, "T = 9", instead, [*checks])


def contradicted(recorded):
    """The rows of the table of what is contradicted."""
    page = claims.page(recorded, REFERENCES)
    table = page.split(":name: tab-contradicted\n")[1].split("\n:::")[0]
    return [row.split("\n  - ") for row in table.split("\n* - ")[2:]]


def test_totals_count_words_and_grades():
    made = {
        "mahdavi-theorem-1": made_up("confirmed", "proved"),
        "mahdavi-lemma-1": made_up("confirmed", "certified"),
        "mahdavi-figure-2a": made_up("in part", "measured, 1 of 6 seeds"),
    }
    left_out = sum(bool(claim.left_out) for claim in papers.claims().values())
    said = claims.totals(made)
    assert "**2** confirmed (1 proved, 1 certified), **1** in part, **0** contradicted" in said
    assert f"**{len(papers.claims()) - 3 - left_out}** not yet, **{left_out}** left out" in said


def entry(page, key):
    """The entry of a claim on a page, without its title."""
    return page.split(f":name: claim-{key}\n")[1].split("\n::::\n")[0]


def test_what_we_contradict_names_the_strongest_check():
    """The entry has what would make it true; what is contradicted in part is not in the list."""
    checks = [
        ("agrees", reporting.certified(True)),
        ("one seed fails", reporting.measured(False, 1)),
        ("xor", reporting.disproved(True, by="prop-xor")),
    ]
    made = {
        "dana-lemma-2": made_up("contradicted", "proved", "prop-affine", *checks),
        "dana-lemma-3": made_up("in part", "certified", None, *checks),
    }
    [(statement, evidence)] = contradicted(made)
    claim = papers.claims()["dana-lemma-2"]
    assert statement.startswith("{ref}`Dana et al., Lemma 2 <claim-dana-lemma-2>`")
    assert claim.says in statement
    assert evidence == "✗ xor *(proved)*"
    told = entry(claims.page(made, REFERENCES), "dana-lemma-2")
    assert f"**True if** {claim.true_if}: {{prf:ref}}`prop-affine`" in told
    assert told.index("✗ xor") < told.index("What does hold:") < told.index("✓ agrees")


def test_what_we_contradict_is_contradicted():
    keys = [re.search(r"<claim-(.*?)>", row[0])[1] for row in contradicted(RECORDED)]
    words = {key: graph.word_of(claim, RECORDED.get(key)) for key, claim in papers.claims().items()}
    assert keys == [key for key, word in words.items() if word == "contradicted"]


def test_a_finding_against_a_claim_stands_in_its_entry(monkeypatch):
    """While it is confirmed; the list of what is contradicted does not have the claim."""
    key, said = "dana-finding-shared-subspace", "speaks against part of it"
    finding = papers.claims()[key]._replace(against="dana-experiment-2")
    monkeypatch.setattr(claims, "claims", lambda: {**papers.claims(), key: finding})
    confirmed = {key: made_up("confirmed", "certified")}
    assert f"{{ref}}`{finding.label} <claim-{key}>` {said}" in entry(
        claims.page(confirmed, REFERENCES), "dana-experiment-2"
    )
    assert contradicted(confirmed) == []
    in_part = claims.page({key: made_up("in part", "certified")}, REFERENCES)
    assert said not in entry(in_part, "dana-experiment-2")


OF_PAPERS = [claim for claim in papers.claims().values() if claim.kind != "finding"]


@pytest.mark.parametrize("claim", OF_PAPERS, ids=lambda claim: claim.key)
def test_a_verdict_says_why_and_what_would_be_true(claim):
    """Beside how the claim is read, and where it stands in the paper."""
    word, told = graph.word_of(claim, RECORDED.get(claim.key)), entry(PAGE.read_text(), claim.key)
    where = f"** ({claim.place}): " if claim.place else ":** "
    assert f"**Our reading{where}{claim.reads}\n" in told
    if any(name.endswith("/published") for name in claims.files(claim)):
        return  # rows of a hub decide the word before anybody could say why
    if word in ("contradicted", "not as stated", "not met") or word.endswith("in part"):
        assert claim.why, f"say in {header(claim.key)} `why` it is {word}"
    only = "`true_if` is for what is contradicted, and only for that"
    assert bool(claim.true_if) == (word == "contradicted"), f"{header(claim.key)}: {only}"


@pytest.mark.parametrize(("holding", "told"), [(2, ""), (3, "3 of 4 checks hold")])
def test_more_than_two_ticks_are_counted(holding, told):
    """All that fails is shown, and the strongest of what holds."""
    ticks = [(f"as {word}", reporting.tried(True)) for word in ("asked", "ever")[: holding - 1]]
    strongest = ("exactly", reporting.certified(True))
    checks = [*ticks, strongest, ("not so", reporting.tried(False))]
    shown = claims.shown(made_up("in part", "checked", None, *checks))
    assert shown.failing == checks[-1:]
    assert shown.holding == [strongest, ticks[0]]
    assert shown.count == told


def test_one_tick_stands_for_all_that_say_the_same():
    """Of other settings, with other numbers."""
    said = ["d = 3: R2 0.99 of a line", "d = 4, longer: R2 0.98 of a line", "d = 3: no line"]
    checks = [(text, reporting.tried(True)) for text in said]
    shown = claims.shown(made_up("confirmed", "checked", None, *checks))
    assert [text for text, _ in shown.holding] == [said[0], said[2]]
    assert shown.count == "3 of 3 checks hold"
    few = claims.shown(made_up("confirmed", "checked", None, *checks[:2]))
    assert [text for text, _ in few.holding] == said[:2]


def test_beside_a_proof_no_instance_is_shown():
    proof = ("all", reporting.proved(True, by="thm-x"))
    checks = [("some", reporting.tried(True)), proof, ("few", reporting.certified(True))]
    shown = claims.shown(made_up("confirmed", "proved", None, *checks))
    assert [text for text, _ in shown.holding] == ["all", "few"]
    weaker = claims.shown(made_up("confirmed", "checked", None, *checks, ("many", checks[0][1])))
    assert [text for text, _ in weaker.holding] == ["all", "few"]
    tried = [(text, reporting.tried(True)) for text in ("one", "two", "three")]
    against = made_up("contradicted", "proved", None, *tried)
    assert [text for text, _ in claims.shown(against).holding] == ["one", "two"]


def test_a_grade_is_said_where_the_badge_does_not():
    """With its seeds, without the count of curves; a proof is named in any case."""
    badge = made_up("in part", "measured, 1 of 2 curves, 3 seeds")
    three, five = reporting.measured(True, 3), reporting.measured(True, 5)
    assert claims._marked("a", three, badge) == "✓ a"
    assert claims._marked("a", five, badge) == "✓ a *(measured, 5 seeds)*"
    proof = reporting.proved(True, by="thm-x")
    assert claims._marked("a", proof, badge) == "✓ a *(proved:* {prf:ref}`thm-x`*)*"
    assert claims._marked("a", proof, made_up("confirmed", "proved")) == "✓ a ({prf:ref}`thm-x`)"


@pytest.mark.parametrize("key", sorted(RECORDED))
def test_an_entry_leads_to_its_cell_and_shows_what_fails(key):
    told, shown = entry(PAGE.read_text(), key), claims.shown(RECORDED[key])
    assert told.count(f"`{shown.count or 'Its cell'} <verdict-{key}>`") == 1
    for text, check in [*shown.failing, *shown.holding]:
        assert claims._marked(text, check, RECORDED[key]) in told
    assert len(shown.failing) == sum(check.holds is not True for _, check in RECORDED[key].checks)


ON_ROWS = [claim for claim in papers.claims().values() if claim.rows]


@pytest.mark.parametrize("claim", ON_ROWS, ids=lambda claim: claim.key)
def test_the_rows_behind_a_claim_are_read(claim):
    for name in claim.rows:
        experiment, profile = name.split("/")
        files = {path.stem for path in (store.SHIPPED / experiment).glob("*.csv")}
        profiles = files if profile == "*" else {profile}
        if profile == "published":  # which needs a hub
            profiles &= files
        assert files, f"{header(claim.key)}: {experiment} has no rows"
        assert profiles <= files, f"{header(claim.key)} names rows that are not there"
        assert {f"{experiment}/{p}" for p in profiles} <= {*claims.files(claim)}
        if claim.key in RECORDED:
            text = text_path(RECORDED[claim.key].chapter).read_text()
            every = experiment in experiments.DANA and "in experiments.DANA" in text
            if "laws.trainings()" in text and experiment in laws.CLASSES + laws.REALS:
                every = True
            named = {*experiment.split("-")} <= {*re.findall(r"[a-z0-9]+", text)}
            assert every or named, f"{RECORDED[claim.key].chapter} does not read {experiment}"


@pytest.mark.parametrize("key", sorted(RECORDED))
def test_a_verdict_follows_from_its_checks(key):
    judged, claim = RECORDED[key], papers.claims()[key]
    checks = [check for _, check in judged.checks]
    assert checks
    assert judged.verdict == reporting.word_for(claim, checks, judged.curves)
    assert judged.grade == reporting.grade_for(claim, checks, judged.curves)
    assert judged.instead or not (claim.universal and judged.verdict == "contradicted")
    if any(check.grade == "measured" for check in checks):
        assert judged.sizes
        said = claim.thresholds or claim.kind not in ("figure", "table")
        assert said, f"{header(key)}: say what decides as `thresholds`"
    assert re.match(r"(?!measured)|.*\d+ (of \d+ )?seed", judged.grade)
    assert judged.curves is None or f"of {judged.curves} curves" in judged.grade


@pytest.mark.parametrize("key", sorted(RECORDED))
def test_a_verdict_has_its_anchor(key):
    chapter = RECORDED[key].chapter
    there = f"\n(verdict-{key})=\n" in text_path(chapter).read_text()
    where = f"in book/text/{chapter}.md, above the cell that judges it"
    assert there, f"add the line `(verdict-{key})=` {where}"


@pytest.mark.parametrize("chapter", chapters())
def test_a_verdict_is_an_output_of_its_cell(chapter):
    for key in re.findall(r"^\(verdict-(.*)\)=$", text_path(chapter).read_text(), re.M):
        judged, line = RECORDED.get(key), f"`(verdict-{key})=` stands in {chapter}"
        assert key in papers.claims(), f"{line}, but there is no {header(key)}"
        assert judged or papers.claims()[key].needs, f"{line}: run `make run CHAPTER={chapter}`"
        assert not judged or judged.chapter == chapter, f"{line}, but {judged.chapter} judges it"
    for cell in nbformat.read(notebook_path(chapter), 4).cells:
        for output in cell.get("outputs", []):
            entry = output.get("metadata", {}).get(reporting.METADATA)
            assert entry is None or f'"{entry["claim"]}"' in cell.source


def test_two_verdicts_on_one_claim_are_refused(monkeypatch):
    monkeypatch.setattr(graph, "chapters", lambda: 2 * chapters())
    with pytest.raises(ValueError, match="a second time"):
        graph.recorded()


def test_data_follow_their_schema():
    schema = json.loads((EXTRA / "claims.schema.json").read_text())
    jsonschema.validate(DATA, schema)
    for spoiled in ({"verdict": "true"}, {"grade": "sure"}, {"seeds": 0}, {"note": "new"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(DATA | {"claims": [DATA["claims"][0] | spoiled]}, schema)


def test_data_have_each_claim_with_its_verdict():
    """With its seeds and curves as numbers, and its rows."""
    by_id = {entry["id"]: entry for entry in DATA["claims"]}
    assert [*by_id] == [*papers.claims()], "`python -m tools.claims` renews the file"
    for key, entry in by_id.items():
        judged = RECORDED.get(key)
        assert entry["verdict"] == graph.word_of(papers.claims()[key], judged)
        assert ("cell" in entry) == (judged is not None)
        if judged:
            assert entry["cell"] == f"notebooks/{judged.chapter}.html#verdict-{key}"
            assert len(entry["checks"]) == len(judged.checks)
        claim = papers.claims()[key]
        assert entry.get("limits", "") == claim.thresholds
        assert entry.get("history", "") == claim.history
        if entry.get("grade") == "measured":
            grade, seeds = judged.grade, judged.grade.rpartition(", ")[2]
            assert f", {entry['seeds']} " in grade
            assert f"of {entry.get('seeds_of_the_paper')} seed" in seeds or " of " not in seeds
            assert entry.get("curves_of_the_paper") == judged.curves
            if judged.curves:
                assert f", {entry['curves']} of {judged.curves} curves" in grade
        assert all((store.SHIPPED / name).exists() for name in entry.get("rows", []))


def test_a_judged_finding_has_an_entry_to_cite():
    found = [key for key in RECORDED if papers.claims()[key].kind == "finding"]
    entries = (EXTRA / "findings.bib").read_text()
    assert entries.count("@misc{") == len(found)
    assert all(f"@misc{{attnmem-{key},\n" in entries for key in found)


# --- numbers that pages quote, computed again from the rows by the standard library alone


def quoted(chapter):
    """What a chapter's run has stored for its prose, by key."""
    return {
        output.metadata["scrapbook"]["name"]: next(iter(output.data.values())).strip("'")
        for cell in nbformat.read(notebook_path(chapter), 4).cells
        for output in cell.get("outputs", [])
        if "scrapbook" in output.get("metadata", {})
    }


def rows(name):
    with (store.SHIPPED / name / "paper.csv").open() as file:
        return [*csv.DictReader(file)]


def test_luck_is_the_range_of_equal_widths():
    table = [row for row in rows("mahdavi-fig2c") if row["T"] == "20000" and int(row["d_h"]) >= 31]
    accuracies = [float(row["accuracy"]) for row in table]
    assert len(accuracies) > 1
    most = 100 * (max(accuracies) - min(accuracies))
    assert quoted("training/growth")["growth-scatter"] == f"{most:.0f}"


def test_seconds_beside_steps_are_medians():
    """At 97 per cent of the ceiling."""
    shapes = {"own": (4, 4, 8, 8), "shared": (4, 6, 8, 5)}  # H, n, d, d_h
    ceilings = {"own": 4 * (8 * (2 * 8 - 8) + 8), "shared": 4 * (5 * (5 + 8 - 5) + 5) + 1}
    spent = {"lm": [], "adam": []}
    for row in rows("answer-training"):
        sizes = tuple(int(row[field]) for field in ("H", "n", "d", "d_h"))
        asked = int(row["T"]) / ceilings[row["context"]]
        way = row["optimizer"]
        tuned = way == "lm" or (way == "adam" and row["lr"] == "0.01" and not row["batch"])
        chosen = sizes == shapes[row["context"]] and int(row["seed"]) < 3
        balanced = row["coordinates"] == "balanced"
        if tuned and chosen and balanced and abs(asked - 0.97) < 0.005:
            spent[way].append(float(row["wall_s"]))
    assert [len(each) for each in spent.values()] == [6, 6]
    numbers = quoted("training/capacity")
    assert numbers["there-newton-seconds"] == f"{statistics.median(spent['lm']):.1f}"
    assert numbers["there-adam-seconds"] == f"{statistics.median(spent['adam']):.0f}"


def test_means_on_one_table_stand_for_published_ones():
    """The mean over six cells of the squared difference from our mean, in standard errors."""
    ours, tables = defaultdict(list), defaultdict(lambda: defaultdict(list))
    for row in rows("dana-exp6"):
        if row["variant"] == "code":
            ours[row["H"]].append(float(row["accuracy"]))
    for row in rows("dana-exp6-one-table"):
        tables[row["table"]][row["H"]].append(float(row["accuracy"]))

    def square(own, other):
        apart = statistics.mean(own) - statistics.mean(other)
        return apart**2 / (2 * statistics.variance(own) / len(own))

    squares = [
        statistics.mean(square(own, cells[H]) for H, own in ours.items())
        for cells in tables.values()
    ]
    wanted = "on one table: " + ", ".join(f"{each:.1f}" for each in sorted(squares))
    assert wanted in notebook_path("dana/published-sweeps").read_text()
