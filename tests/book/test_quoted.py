"""Numbers that pages quote, computed again from the rows by the standard library alone."""

import csv
import statistics
from collections import defaultdict

import nbformat

from attnmem.lab import store

from tools.chapters import notebook_path


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


def test_what_five_tokens_give_is_the_mean_over_all_stored_seeds():
    found = [
        float(row["accuracy"])
        for row in rows("mahdavi-fig4-context")
        if (row["T"], row["n"]) == ("20000", "5")
    ]
    assert len(found) > 1
    said = quoted("training/growth")
    assert said["growth-five"] == f"{statistics.mean(found):.2f}"
    assert said["growth-five-seeds"] == f"{min(found):.2f} to {max(found):.2f}"


def test_seconds_beside_steps_are_medians_at_97_percent_of_the_ceiling():
    """The ceilings of the two shapes in closed form: own contexts, and a shared one."""
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
    said = quoted("training/capacity")
    assert said["there-newton-seconds"] == f"{statistics.median(spent['lm']):.1f}"
    assert said["there-adam-seconds"] == f"{statistics.median(spent['adam']):.0f}"


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
    assert wanted in notebook_path("dana/all-points").read_text()
