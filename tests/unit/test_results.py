"""The store loses nothing, doubles nothing, and refuses what it did not write."""

import csv
import dataclasses
import errno
import inspect
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time
import warnings
import zlib

import numpy as np
import pandas as pd
import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmem import kinds, results, rows
from attnmem.results import TESTS, TRAININGS, Check, DamagedResultsError, Finding, Outcome, Run

RUN = Run(
    experiment="trial",
    profile="quick",
    model="aot",
    variant="code",
    N=50,
    n=2,
    T=128,
    d=5,
    d_h=5,
    H=3,
    width=None,
    layers=1,
    seed=0,
    steps=100,
    task="bigrams",
    context=None,
    batch=32,
    schedule="linear",
    lr=0.1,
    lr_start=0.1,
    lr_end=0.005,
)
OUTCOME = Outcome(0.1234567890123, 1.5e-07, 0.25, "cpu, two cores", "2.13.0", "abc123+")


def made(count, start=0):
    return [
        (dataclasses.replace(RUN, seed=seed), dataclasses.replace(OUTCOME, loss=seed + 0.1))
        for seed in range(start, start + count)
    ]


@pytest.fixture
def path(tmp_path):
    return results.file_of("trial", "quick", tmp_path)


def test_rows_come_back_as_they_went(tmp_path, path):
    odd = dataclasses.replace(RUN, experiment="trial", width=7, early_stop=False, context="shared")
    written = [
        *made(3),
        (odd, dataclasses.replace(OUTCOME, accuracy=None, tf32=True, curve=(0.5, 0.0625))),
    ]
    assert results.append(written, tmp_path) == 4
    assert list(results.read(path).values()) == written
    assert results.append(written, tmp_path) == 0
    assert len(results.read(path)) == 4


CHECK = Check(
    experiment="trial",
    profile="quick",
    source="photographs",
    architecture="vit-base",
    map="random L0",
    dtype="float64",
    vectors="queries",
    T=2000,
    n=197,
    d=768,
    size=197,
    samples=5000,
    seed=0,
)
FINDING = Finding(3, 100, 196, 197, 1.5, "cpu", "2.13.0", "abc123")


def test_tests_of_assumptions_are_rows_as_trainings_are(tmp_path, path):
    bare = dataclasses.replace(FINDING, ranked=0, least_rank=None, most_rank=None)
    written = [(CHECK, FINDING), (dataclasses.replace(CHECK, size=5), bare)]
    assert results.append(written, tmp_path) == 2
    assert list(results.read(path).values()) == written
    with pytest.raises(DamagedResultsError, match="line 1: not the header of such rows"):
        results.append(made(1), tmp_path)
    assert list(results.read(path).values()) == written
    table = results.as_table(written, TESTS)
    assert table["size"].tolist() == [197, 5]
    assert list(results.as_table([], TESTS).columns) == list(table.columns)


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.array])
def test_numbers_of_numpy_make_the_same_row(kind, path, tmp_path):
    run = dataclasses.replace(RUN, early_stop=False, evaluate_every=10)
    fields = {name: value for name, value in vars(run).items() if type(value) is int}
    given = {name: kind(value) for name, value in fields.items()}
    given |= {"lr": np.float64(run.lr), "lr_start": np.float32(0.5), "early_stop": np.False_}
    same = object.__new__(Run)  # as where no annotations are enforced
    inspect.unwrap(Run.__init__)(same, **vars(run) | given)
    assert same == dataclasses.replace(run, lr_start=0.5)
    assert same.key == dataclasses.replace(run, lr_start=0.5).key
    results.append([(same, OUTCOME)], tmp_path)
    assert [*results.read(path)] == [same.key]


def test_the_key_is_the_configuration_and_nothing_else():
    assert RUN.key == dataclasses.replace(RUN).key
    changes = [{"seed": 1}, {"lr": 0.2}, {"width": 0}, {"variant": "paper"}, {"context": "shared"}]
    assert len({RUN.key, *(dataclasses.replace(RUN, **c).key for c in changes)}) == 6
    assert RUN.key == "d5d4e4b56e23ae2d"  # a changed rule would orphan every stored row


def test_rows_of_several_experiments_go_to_their_files(tmp_path):
    other = dataclasses.replace(RUN, experiment="other", profile="paper")
    results.append([(RUN, OUTCOME), (other, OUTCOME)], tmp_path)
    found = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.csv")}
    assert found == {"trial/quick.csv", "other/paper.csv"}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_results_that_are_not_finite_are_not_stored(tmp_path, path, bad):
    with pytest.raises(ValueError, match=r"^loss: got "):
        results.append([(RUN, dataclasses.replace(OUTCOME, loss=bad))], tmp_path)
    assert results.read(path) == {}


def flip_byte(data, rng):
    place = rng.randrange(len(data))
    return data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]


def cut_end(data, rng):
    inside = [i for i in range(1, len(data)) if data[i - 1 : i] != b"\n"]
    return data[: rng.choice(inside)]


def cut_line_short(data, rng):
    lines = data.split(b"\n")
    place = rng.randrange(len(lines) - 1)
    lines[place] = lines[place][: rng.randrange(len(lines[place]))]
    return b"\n".join(lines)


def foreign_header(data, rng):
    header, rest = data.split(b"\n", 1)
    names = header.split(b",")
    rng.shuffle(names)
    return b",".join(names) + b"\n" + rest if names != header.split(b",") else b"a,b\n" + rest


def write_nan(data, rng):
    return _edit_cell(data, rng, lambda cell: b"nan")


def swap_columns(data, rng):
    lines = [line.split(b",") for line in data.split(b"\n")[:-1]]
    a, b = rng.choice([(7, 8), (9, 12), (23, 24), (13, 16)])
    for line in lines[1:]:
        line[a], line[b] = line[b], line[a]
    swapped = b"".join(b",".join(line) + b"\n" for line in lines)
    return swapped if swapped != data else b"\n" + data


def change_a_digit(data, rng):
    return _edit_cell(data, rng, lambda cell: cell + b"1")


def double_a_line(data, rng):
    lines = data.split(b"\n")[:-1]
    lines.append(lines[rng.randrange(1, len(lines))])
    return b"\n".join(lines) + b"\n"


def _edit_cell(data, rng, edit):
    lines = data.split(b"\n")
    line = rng.randrange(1, len(lines) - 1)
    cells = lines[line].split(b",")
    place = rng.randrange(len(cells))
    cells[place] = edit(cells[place])
    lines[line] = b",".join(cells)
    return b"\n".join(lines)


DAMAGES = [
    flip_byte,
    cut_end,
    cut_line_short,
    foreign_header,
    write_nan,
    swap_columns,
    change_a_digit,
    double_a_line,
]


def as_another_system_writes(data):
    return b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n")


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("written", [bytes, as_another_system_writes])
def test_no_damage_is_accepted_in_silence(tmp_path, path, damage, written):
    results.append(made(6), tmp_path)
    sound = path.read_bytes()
    for seed in range(40):
        broken = damage(sound, random.Random(seed))
        assert broken != sound
        broken = written(broken)
        path.write_bytes(broken)
        with pytest.raises(DamagedResultsError, match=rf"{path}, line \d+: "):
            results.read(path)
        with pytest.raises(DamagedResultsError):
            results.append(made(1, start=99), tmp_path)
        assert path.read_bytes() == broken  # and nothing is written to it


OTHER_SYSTEMS = {
    "line ends": lambda data: data.replace(b"\n", b"\r\n"),
    "some line ends": lambda data: data.replace(b"\n", b"\r\n", 2),
    "mark": lambda data: b"\xef\xbb\xbf" + data,
    "both": as_another_system_writes,
}


@pytest.mark.parametrize("what", OTHER_SYSTEMS)
@pytest.mark.parametrize("lacking", [(), ("tf32", "diverged")])
def test_what_another_system_makes_of_a_file_is_read_and_written_on(tmp_path, path, what, lacking):
    results.append(made(4), tmp_path)
    older(path, *lacking)
    path.write_bytes(OTHER_SYSTEMS[what](path.read_bytes()))
    assert list(results.read(path).values()) == made(4)
    assert results.append(made(6), tmp_path) == 2
    assert list(results.read(path).values()) == made(6)
    wide = (dataclasses.replace(RUN, seed=9), dataclasses.replace(OUTCOME, tf32=True))
    assert results.append([wide], tmp_path) == 1
    assert list(results.read(path).values()) == [*made(6), wide]


def test_files_are_written_in_the_same_bytes_on_every_system(tmp_path, path, monkeypatch):
    def translating(file, mode="r", **options):  # as where text ends its lines in another way
        if "b" not in mode:
            options.setdefault("newline", "\r\n")
        return open(file, mode, **options)

    monkeypatch.setattr(results, "open", translating, raising=False)

    def descriptor(file, *options):
        assert not str(file).endswith(".csv")  # the flag for bytes exists on those systems only
        return os_open(file, *options)

    os_open = os.open
    monkeypatch.setattr(results.os, "open", descriptor)
    results.append(made(3), tmp_path)
    assert b"\r" not in path.read_bytes()


def test_a_file_of_another_experiment_is_refused(tmp_path, path):
    results.append(made(2), tmp_path)
    moved = results.file_of("other", "quick", tmp_path)
    moved.parent.mkdir()
    path.rename(moved)
    with pytest.raises(DamagedResultsError, match="line 2: it belongs to trial/quick"):
        results.read(moved)


def write_slowly(root, start):
    for row in made(40, start):
        results.append([row], root)


def test_processes_that_write_at_once_lose_nothing(tmp_path, path):
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=write_slowly, args=(tmp_path, s)) for s in (0, 20, 40)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [w.exitcode for w in writers] == [0, 0, 0]
    seeds = sorted(run.seed for run, _ in results.read(path).values())
    assert seeds == list(range(80))  # overlapping rows stand once


def test_a_writer_killed_at_any_moment_leaves_whole_rows(tmp_path, path):
    fork, rng = multiprocessing.get_context("fork"), random.Random(0)
    for _ in range(20):
        have = results.read(path)
        writer = fork.Process(target=write_slowly, args=(tmp_path, 0))
        writer.start()
        time.sleep(rng.uniform(0.0, 0.06))
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        after = results.read(path)
        assert list(after)[: len(have)] == list(have)
    write_slowly(tmp_path, 0)
    assert [run.seed for run, _ in results.read(path).values()] == list(range(40))


def test_where_rows_go(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNMEM_MEASUREMENTS", str(tmp_path))
    assert results.writable_root() == tmp_path
    monkeypatch.delenv("ATTNMEM_MEASUREMENTS")
    assert results.writable_root() == results.SHIPPED
    monkeypatch.setattr(results, "in_checkout", lambda: False)
    assert str(results.writable_root()) == "measurements"


def test_a_folder_for_rows_may_stand_in_a_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ATTNMEM_MEASUREMENTS", "~/rows")
    assert results.writable_root() == tmp_path / "rows"
    monkeypatch.setenv("ATTNMEM_MEASUREMENTS", " ~/rows\n")
    assert results.writable_root() == tmp_path / "rows"
    monkeypatch.setenv("ATTNMEM_MEASUREMENTS", "~nobody-of-this-name/rows")
    with pytest.raises(ValueError, match="ATTNMEM_MEASUREMENTS: got '~nobody-of-this-name/rows'"):
        results.writable_root()


def test_shipped_and_new_rows_are_read_together(tmp_path, monkeypatch):
    shipped, new = tmp_path / "shipped", tmp_path / "new"
    monkeypatch.setattr(results, "SHIPPED", shipped)
    monkeypatch.setenv("ATTNMEM_MEASUREMENTS", str(new))
    results.append(made(2), shipped)
    results.append(made(1, start=7))
    assert results.table("trial", "quick").seed.tolist() == [0, 1, 7]
    assert (new / "trial" / "quick.csv").exists()


def test_spans_say_the_least_and_the_largest_and_refuse_holes():
    rows = pd.DataFrame({"T": [20_000, 550, 1000], "n": [7, 7, 7], "width": [1, None, 2]})
    assert results.spans(rows, "n", "T") == "n = 7, T = 550 to 20,000"
    for field in ("width", "H"):
        with pytest.raises(ValueError, match=field):
            results.spans(rows, "T", field)


# --- files with fewer columns ---------------------------------------------------------------------


def older(path, *lacking):
    """Rewrite a file as if some columns had not been invented yet."""
    header, *lines = path.read_text().splitlines()
    names = header.split(",")
    kept = [i for i, name in enumerate(names) if name not in lacking]
    assert len(kept) == len(names) - len(lacking)
    cells = [next(csv.reader([line])) for line in lines]
    bodies = [[line[i] for i in kept[:-1]] for line in cells]
    sums = [f"{zlib.crc32(rows.line_of(body).encode()):08x}" for body in bodies]
    text = [rows.line_of([names[i] for i in kept])]
    text += [rows.line_of([*body, crc]) for body, crc in zip(bodies, sums, strict=True)]
    path.write_text("".join(text))


LATER = ("tf32", "curve", "best_step", "saturated", "served", "serving", "diverged")
OPTIONAL = ("evaluate_every", "early_stop", *LATER)


@settings(max_examples=30)
@given(st.sets(st.sampled_from(OPTIONAL)))
def test_columns_that_a_file_lacks_have_their_defaults(tmp_path_factory, lacking):
    root = tmp_path_factory.mktemp("store")
    path = results.file_of("trial", "quick", root)
    results.append(made(3), root)
    whole = path.read_bytes()
    older(path, *lacking)
    assert list(results.read(path).values()) == made(3)
    before = path.read_bytes()
    assert results.append(made(5), root) == 2
    assert path.read_bytes().startswith(before)  # the new rows stand in the file's own columns
    assert list(results.read(path).values()) == made(5)
    full = (RUN_THAT_STOPS, dataclasses.replace(OUTCOME, curve=(0.5,), tf32=True, best_step=7))
    assert results.append([full], root) == 1
    assert list(results.read(path).values()) == [*made(5), full]
    if lacking & {"tf32", "curve", "best_step", "evaluate_every", "early_stop"}:
        assert path.read_bytes().startswith(whole)  # with every column, and checksums to them
    else:
        assert path.read_bytes().startswith(before)


RUN_THAT_STOPS = dataclasses.replace(RUN, evaluate_every=50, early_stop=False)


@pytest.mark.parametrize(("field", "value"), [("tf32", True), ("diverged", 0), ("best_step", 0)])
def test_a_value_that_is_no_default_is_never_dropped(tmp_path, path, field, value):
    results.append(made(2), tmp_path)
    older(path, *LATER)
    found = dataclasses.replace(OUTCOME, **{field: value})
    if field == "diverged":
        found = dataclasses.replace(found, accuracy=None, loss=None)
    new = (dataclasses.replace(RUN, seed=9), found)
    results.append([new], tmp_path)
    assert list(results.read(path).values()) == [*made(2), new]


def test_one_row_that_needs_a_column_is_enough(tmp_path, path):
    results.append(made(2), tmp_path)
    older(path, *LATER)
    new = made(5)[2:]
    new[1] = (new[1][0], dataclasses.replace(new[1][1], best_step=3))
    assert results.append(new, tmp_path) == 3
    assert list(results.read(path).values()) == [*made(2), *new]


@pytest.mark.parametrize("lacking", ["seed", "loss", "lr_end", "commit", "key", "checksum"])
def test_a_column_without_a_default_may_not_be_absent(tmp_path, path, lacking):
    results.append(made(2), tmp_path)
    older(path, lacking)
    with pytest.raises(DamagedResultsError, match=rf"{path}, line 1: "):
        results.read(path)


def test_columns_that_are_unknown_twice_there_or_out_of_order_are_refused(tmp_path, path):
    results.append(made(1), tmp_path)
    header, line = path.read_text().splitlines()
    names = header.split(",")
    wrong = [
        [*names[:-2], "surprise", *names[-2:]],
        [*names[:-2], "diverged", *names[-2:]],
        [*names[:-4], "diverged", "serving", *names[-2:]],
        [*names[:-2], "checksum", "key"],
        [],
    ]
    assert names[-4:-2] == ["serving", "diverged"]
    for columns in wrong:
        path.write_text(",".join(columns) + "\n" + line + "\n")
        with pytest.raises(DamagedResultsError, match=rf"{path}, line 1: "):
            results.append(made(2), tmp_path)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("at", ["write", "fsync", "replace"])
def test_an_upgrade_cut_short_leaves_the_old_file(tmp_path, path, monkeypatch, at):
    def die(*_):
        raise Killed

    results.append(made(4), tmp_path)
    older(path, *LATER)
    before = path.read_bytes()
    new = (dataclasses.replace(RUN, seed=9), dataclasses.replace(OUTCOME, tf32=True))
    with monkeypatch.context() as patch:
        if at == "write":
            patch.setattr(results, "widen", die)
        else:
            patch.setattr(results.os, at, die)
        with pytest.raises(Killed):
            results.append([new], tmp_path)
    assert path.read_bytes() == before
    assert results.append([new], tmp_path) == 1
    assert list(results.read(path).values()) == [*made(4), new]


def upgrade_at_once(root, start):
    for asked, found in made(20, start):
        results.append([(asked, dataclasses.replace(found, tf32=True))], root)


def test_a_writer_killed_while_a_file_gets_its_columns_loses_no_row(tmp_path, path):
    fork, rng = multiprocessing.get_context("fork"), random.Random(1)
    results.append(made(40), tmp_path)
    older(path, *LATER)
    sound = path.read_bytes()
    for _ in range(20):
        path.write_bytes(sound)
        writer = fork.Process(target=upgrade_at_once, args=(tmp_path, 40))
        writer.start()
        time.sleep(rng.uniform(0.0, 0.1))
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        after = list(results.read(path).values())
        assert after[:40] == made(40)
        assert [asked.seed for asked, _ in after] == list(range(len(after)))
    upgrade_at_once(tmp_path, 40)  # over whatever the last one left
    assert [asked.seed for asked, _ in results.read(path).values()] == list(range(60))


def test_processes_that_add_columns_at_once_lose_nothing(tmp_path, path):
    results.append(made(20), tmp_path)
    older(path, *LATER)
    fork = multiprocessing.get_context("fork")
    jobs = [(upgrade_at_once, 20), (write_slowly, 30), (upgrade_at_once, 70)]
    writers = [fork.Process(target=job, args=(tmp_path, start)) for job, start in jobs]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    seeds = sorted(run.seed for run, _ in results.read(path).values())
    assert seeds == list(range(90))


def test_what_is_shipped_is_written_byte_for_byte_as_today():
    """Of each header that is in use; with the columns of today, only the new ones are added."""
    for folder, profile in [("mahdavi-fig3", "quick"), ("assumptions-vision", "quick")]:
        path = results.file_of(folder, profile, results.SHIPPED)
        lines = path.read_text().splitlines(keepends=True)
        header = rows.fields_of(lines[0])
        kind = kinds.kind_of(header)
        have = list(results.read(path).values())
        assert [rows.write(row, header, kind) for row in have] == lines[1:]
        widened = [rows.widen(line, header, kind) for line in lines[1:]]
        assert [rows.parse(line, kind.columns, kind) for line in widened] == have


# --- what no row may be ---------------------------------------------------------------------------

DIVERGED = dataclasses.replace(OUTCOME, accuracy=None, loss=None, diverged=17)


def test_a_training_that_diverged_is_a_row(tmp_path, path):
    runs = [dataclasses.replace(RUN, seed=seed) for seed in range(3)]
    unmeasured = dataclasses.replace(OUTCOME, accuracy=None)
    written = list(zip(runs, (OUTCOME, DIVERGED, unmeasured), strict=True))
    results.append(written, tmp_path)
    assert list(results.read(path).values()) == written
    table = results.as_table(written)
    assert list(table.columns[-2:]) == ["serving", "diverged"]
    assert table.diverged.isna().tolist() == [True, False, True]
    assert table.diverged[1] == 17
    assert table.loss.isna().tolist() == [False, True, False]
    assert results.fewest_seeds(table) == 3
    assert results.by_seed(table, "T").isna().to_numpy().tolist() == [[False, True, True]]
    assert results.spans(table, "T") == "T = 128"


CONTRADICTIONS = [
    ({"loss": None}, "loss = None and diverged = None"),
    ({"diverged": 17, "accuracy": None}, "loss = 1.5e-07 and diverged = 17"),
    ({"diverged": 0, "accuracy": None}, "loss = 1.5e-07 and diverged = 0"),
    ({"diverged": 17, "loss": None}, "accuracy = 0.1234567890123 of a training that diverged"),
]


@pytest.mark.parametrize(("changes", "said"), CONTRADICTIONS)
def test_a_row_that_contradicts_itself_is_refused(tmp_path, path, monkeypatch, changes, said):
    row = (RUN, dataclasses.replace(OUTCOME, **changes))
    with pytest.raises(ValueError, match=rf"^rows: got .*{said}"):
        results.append([row], tmp_path)
    assert results.read(path) == {}
    with monkeypatch.context() as patch:
        patch.setattr(rows, "_check_divergence", lambda found: None)
        results.append([row], tmp_path)
    with pytest.raises(DamagedResultsError, match=f"line 2: {said}"):
        results.read(path)


@pytest.mark.parametrize(
    ("run", "outcome", "name"),
    [
        ({}, {"curve": (0.5, math.nan)}, "curve"),
        ({}, {"wall_s": -math.inf}, "wall_s"),
        ({"lr": math.nan}, {}, "lr"),
        ({"task": ""}, {}, "rows"),  # would be read as missing
        ({}, {"device": "two\nlines"}, "rows"),  # would be read as two rows
        ({"n": True}, {}, "rows"),  # its key would be that of another number
    ],
)
def test_nothing_is_written_that_could_not_be_read(tmp_path, path, run, outcome, name):
    bad = (dataclasses.replace(RUN, **run), dataclasses.replace(OUTCOME, **outcome))
    results.append(made(1, start=1), tmp_path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=rf"^{name}: got "):
        results.append([*made(1, start=2), bad], tmp_path)
    assert path.read_bytes() == before


numbers = st.floats(allow_nan=False, allow_infinity=False)
words = st.text(st.characters(codec="utf-8", exclude_characters="\n\r"), min_size=1)
shares = st.lists(st.integers(0, 10_000).map(lambda k: k / 10_000), min_size=1).map(tuple)


@settings(max_examples=50)
@given(
    st.fixed_dictionaries(
        dict.fromkeys(("device", "torch", "commit"), words)
        | dict.fromkeys(("curve", "saturated", "served", "serving"), shares | st.none())
        | {"accuracy": numbers | st.none(), "loss": numbers, "wall_s": numbers}
        | {"tf32": st.booleans(), "best_step": st.integers() | st.none()}
    )
)
def test_any_outcome_comes_back_from_its_line(fields):
    outcome = Outcome(**fields | {"wall_s": np.float64(fields["wall_s"])})
    line = rows.write((RUN, outcome), TRAININGS.columns, TRAININGS)
    assert rows.parse(line, TRAININGS.columns, TRAININGS) == (RUN, outcome)


def test_kinds_are_not_mixed(tmp_path):
    with pytest.raises(ValueError, match=r"^rows: got .*; expected Run with Outcome or Check with"):
        results.append([(RUN, FINDING)], tmp_path)
    with pytest.raises(DamagedResultsError, match="not the header of such rows"):
        results.append([(RUN, OUTCOME), (CHECK, FINDING)], tmp_path)


def test_the_first_of_two_equal_configurations_counts(tmp_path, path):
    again = (RUN, dataclasses.replace(OUTCOME, loss=2.0))
    assert results.append([(RUN, OUTCOME), again], tmp_path) == 1
    assert results.append([again], tmp_path) == 0
    assert list(results.read(path).values()) == [(RUN, OUTCOME)]


# --- lines, locks, tables -------------------------------------------------------------------------


def third(edit):
    """A damage of the third line."""
    return lambda lines: [*lines[:2], edit(lines[2]), *lines[3:]]


@pytest.mark.parametrize(
    ("damage", "line", "said"),
    [
        (third(lambda line: line[:-10] + "\n"), 3, "40 fields where 41 are expected"),
        (third(lambda line: line.replace("cpu", "gpu")), 3, "its checksum does not fit"),
        (third(lambda line: line.replace("trial", '"trial"')), 3, "not written as results are"),
        (third(lambda line: line.replace("trial", '"trial')), 3, "expected after"),
        (third(lambda line: "tri\udcffal" + line), 3, "not UTF-8 text"),
        (third(lambda line: "\udcff" + line), 3, "not UTF-8 text"),
        (lambda lines: [*lines[:4], lines[4][:-1]], 5, "cut off before its end"),
        (lambda lines: [*lines, "trial"], 6, "cut off before its end"),
        (lambda lines: [*lines, lines[3]], 6, "stands in the file twice"),
        (lambda lines: [lines[0], "\n", *lines[1:]], 2, "0 fields"),
        (lambda lines: [lines[0].replace("seed", '"seed"'), *lines[1:]], 1, "not written as"),
        (lambda lines: [], 1, "the file is empty"),
    ],
)
def test_damage_is_named_by_its_line(tmp_path, path, damage, line, said):
    results.append(made(4), tmp_path)
    broken = "".join(damage(path.read_text().splitlines(keepends=True)))
    path.write_bytes(broken.encode(errors="surrogateescape"))
    with pytest.raises(DamagedResultsError, match=rf"{path}, line {line}: .*{said}"):
        results.read(path)


def forge(path, number, **changes):
    """Change the text of a stored row as somebody would who also corrects its checksum."""
    lines = path.read_text().splitlines(keepends=True)
    header = rows.fields_of(lines[0])
    cells = dict(zip(header, rows.fields_of(lines[number - 1]), strict=True)) | changes
    body = [cells[name] for name in header[:-1]]
    lines[number - 1] = rows.line_of([*body, f"{zlib.crc32(rows.line_of(body).encode()):08x}"])
    path.write_text("".join(lines))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"key": "0" * 16}, "its key is not the hash of its configuration"),
        ({"seed": "7"}, "its key is not the hash of its configuration"),
        ({"accuracy": "nan"}, "accuracy = 'nan' cannot be read"),
        ({"wall_s": "inf"}, "wall_s = 'inf' cannot be read"),
        ({"tf32": "true"}, "tf32 = 'true' cannot be read"),
        ({"tf32": ""}, "tf32 = '' cannot be read"),
        ({"seed": ""}, "seed = '' cannot be read"),
        ({"device": ""}, "device = '' cannot be read"),
        ({"wall_s": ""}, "wall_s = '' cannot be read"),
        ({"diverged": "1.5"}, "diverged = '1.5' cannot be read"),
        ({"curve": "0.5 nan"}, "curve = '0.5 nan' cannot be read"),
        ({"loss": ""}, "loss = None and diverged = None, where one of them is expected"),
    ],
)
def test_a_forged_value_is_refused(tmp_path, path, changes, said):
    results.append(made(3), tmp_path)
    forge(path, 3, **changes)
    with pytest.raises(DamagedResultsError, match=re.escape(f"{path}, line 3: {said}")):
        results.read(path)


def test_truth_is_read_as_it_was_written(tmp_path, path):
    pair = [
        (dataclasses.replace(RUN, early_stop=stop), dataclasses.replace(OUTCOME, tf32=not stop))
        for stop in (True, False)
    ]
    results.append(pair, tmp_path)
    found = [(run.early_stop, outcome.tf32) for run, outcome in results.read(path).values()]
    assert found == [(True, False), (False, True)]


def test_a_writer_waits_for_the_lock(tmp_path, path):
    results.append(made(1), tmp_path)
    writer = threading.Thread(target=results.append, args=(made(2), tmp_path))
    with FileLock(path.with_suffix(".lock")):
        writer.start()
        writer.join(0.2)
        assert len(results.read(path)) == 1
    writer.join()
    assert len(results.read(path)) == 2


def test_rows_reach_the_disk_before_append_returns(tmp_path, path, monkeypatch):
    sizes, descriptors, sync = [], [], os.fsync

    def fsync(descriptor):
        sizes.append(os.fstat(descriptor).st_size)
        descriptors.append(descriptor)
        sync(descriptor)

    monkeypatch.setattr(results.os, "fsync", fsync)
    results.append(made(2), tmp_path)
    assert sizes == [len(rows.line_of(TRAININGS.columns)), path.stat().st_size]
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_every_row_is_one_write(tmp_path, path, monkeypatch):
    results.append(made(1), tmp_path)
    written = []
    write = os.write
    monkeypatch.setattr(results.os, "write", lambda d, line: written.append(line) or write(d, line))
    results.append(made(4), tmp_path)
    assert written == path.read_bytes().splitlines(keepends=True)[2:]


@pytest.mark.parametrize("part", [0, 1, 100])
def test_of_a_row_that_the_disk_has_no_room_for_nothing_is_left(tmp_path, path, monkeypatch, part):
    results.append(made(1), tmp_path)
    room, write = [len(path.read_bytes()) - len(rows.line_of(TRAININGS.columns)) + part], os.write

    def fills(descriptor, line):
        if not room[0]:
            raise OSError(errno.ENOSPC, "full")
        written = write(descriptor, line[: room[0]])
        room[0] -= written
        return written

    with monkeypatch.context() as patch:
        patch.setattr(results.os, "write", fills)
        with pytest.raises(OSError, match=r"full|space"):
            results.append(made(4), tmp_path)
    assert [run.seed for run, _ in results.read(path).values()] == [0, 1]
    assert results.append(made(4), tmp_path) == 2


def test_a_reader_waits_for_a_row_that_is_half_written(tmp_path, path):
    results.append(made(2), tmp_path)
    whole, found = path.read_bytes(), []
    reader = threading.Thread(target=lambda: found.append(results.read(path)))
    with FileLock(path.with_suffix(".lock")):
        path.write_bytes(whole[:-7])
        reader.start()
        reader.join(0.2)
        assert not found
        path.write_bytes(whole)
    reader.join()
    assert len(found[0]) == 2


def test_a_damaged_file_is_refused_where_nothing_can_be_locked(tmp_path, path, monkeypatch):
    results.append(made(2), tmp_path)
    path.write_bytes(path.read_bytes()[:-7])

    def read_only(path):
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(results, "_lock", read_only)
    with pytest.raises(DamagedResultsError, match="line 3: cut off"):
        results.read(path)


def test_a_store_is_tried_before_anything_is_measured(tmp_path, path, store):
    results.check_writable(RUN)
    assert [*store.rglob("*.csv")] == []
    results.check_writable(RUN, tmp_path)
    assert not path.exists()
    results.append(made(1), tmp_path)
    before = path.read_bytes()
    results.check_writable(RUN, tmp_path)
    assert path.read_bytes() == before
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        results.check_writable(RUN, tmp_path / "file")
    path.unlink()
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        results.check_writable(RUN, tmp_path)


def test_the_fewest_seeds_of_any_configuration():
    sizes = [(128, 0), (128, 1), (128, 2), (256, 0), (256, 1), (512, 0), (512, 1), (512, 2)]
    trained = [(dataclasses.replace(RUN, T=T, seed=seed), OUTCOME) for T, seed in sizes]
    assert results.fewest_seeds(results.as_table(trained)) == 2
    again = [*trained, (trained[3][0], dataclasses.replace(OUTCOME, tf32=True))]
    assert results.fewest_seeds(results.as_table(again)) == 2  # a seed counts once
    assert results.fewest_seeds(results.as_table(trained[:3])) == 3


def test_measurements_stand_by_seed():
    trained = [
        (
            dataclasses.replace(RUN, H=H, seed=seed),
            dataclasses.replace(OUTCOME, loss=10.0 * H + seed),
        )
        for H, seed in [(5, 1), (2, 0), (5, 0), (3, 1)]
    ]
    table = results.by_seed(results.as_table(trained), "H", "loss")
    assert (table.index.tolist(), table.columns.tolist()) == ([2, 3, 5], [0, 1])
    assert table.fillna(-1).to_numpy().tolist() == [[20, -1], [-1, 31], [50, 51]]
    accuracy = results.by_seed(results.as_table(trained), "H")
    assert accuracy.loc[5].tolist() == [OUTCOME.accuracy] * 2


def test_rows_measured_here_come_after_those_shipped_and_replace_them(store, tmp_path):
    results.append(made(2), tmp_path / "shipped")
    newer = [(asked, dataclasses.replace(found, tf32=True)) for asked, found in made(3)[1:]]
    results.append(newer)
    assert list(results.known("trial", "quick").values()) == [made(1)[0], *newer]
    table = results.table("trial", "quick")
    assert table.tf32.tolist() == [False, True, True]
    assert list(results.table("trial", "quick", TESTS).columns) == list(TESTS.hints)


def test_published_numbers():
    theirs = results.published("dana-2025").query("experiment == 'exp1' and d == 3 and H == 6")
    assert theirs.accuracy.tolist() == [0.0652]
    assert set(results.published("mahdavi-2024").table) == {1, 3}


# --- the commit -----------------------------------------------------------------------------------


commit = results.commit.__wrapped__  # asked anew each time
PROJECT = '[project]\nname = "attnmem"\n'


def git(folder, *command):
    names = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = ["git", "-C", folder, *names, *command]
    return subprocess.run(done, capture_output=True, text=True, check=True).stdout.strip()


def committed(folder):
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "a")


def copied(folder, project=PROJECT):
    """The library's files as they lie in a source tree; its package."""
    package = folder / "lib" / "attnmem"
    package.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(project)
    for name in ("code.py", "rows.csv"):
        (package / name).write_text("1\n")
    return package


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with one commit, as the one that the library would run from."""
    monkeypatch.delenv("ATTNMEM_COMMIT", raising=False)
    package = copied(tmp_path / "checkout")
    monkeypatch.setattr(results, "PACKAGE", package)
    committed(tmp_path / "checkout")
    return package


def head(package):
    return git(package, "rev-parse", "HEAD")[:12]


def test_rows_carry_the_commit_of_the_code_and_whether_it_has_changed_since(checkout, monkeypatch):
    assert commit() == head(checkout)
    (checkout / "rows.csv").write_text("2\n")
    (checkout / "new.py").write_text("2\n")
    (checkout.parent / "elsewhere.py").write_text("2\n")
    assert commit() == head(checkout)  # rows are no code, and new files are not imported by it
    (checkout / "code.py").write_text("2\n")
    assert commit() == head(checkout) + "+"


def test_a_second_working_tree_of_the_repository_is_a_checkout_too(checkout, tmp_path, monkeypatch):
    git(checkout, "worktree", "add", "-q", "--detach", tmp_path / "second")
    monkeypatch.setattr(results, "PACKAGE", tmp_path / "second" / "lib" / "attnmem")
    assert commit() == head(checkout)


def test_what_the_variable_says_counts_everywhere(checkout, monkeypatch):
    monkeypatch.setenv("ATTNMEM_COMMIT", "0123456789ab\n")  # as `$(<file)` may leave it
    assert commit() == "0123456789ab"
    monkeypatch.setattr(results, "PACKAGE", checkout.parent)
    assert commit() == "0123456789ab"
    monkeypatch.setattr(results, "PACKAGE", checkout)
    monkeypatch.setenv("ATTNMEM_COMMIT", "")
    assert commit() == head(checkout)


def test_variables_of_hooks_lead_to_no_other_repository(checkout, tmp_path, monkeypatch):
    """Git tells its hooks so which repository they belong to, and of which files."""
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "thesis.tex").touch()
    committed(thesis)
    own = head(checkout)
    monkeypatch.setenv("GIT_DIR", str(thesis / ".git"))
    assert commit() == own
    monkeypatch.setenv("GIT_WORK_TREE", str(checkout.parent.parent))
    monkeypatch.setenv("GIT_INDEX_FILE", str(thesis / ".git" / "index"))
    assert commit() == own


def no_git(monkeypatch, package):
    monkeypatch.setenv("PATH", "")


def no_repository(monkeypatch, package):
    shutil.rmtree(package.parent.parent / ".git")


def another_owner(monkeypatch, package):
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # as in a container
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)


def no_commit_yet(monkeypatch, package):
    no_repository(monkeypatch, package)
    git(package.parent.parent, "init", "-q")


def installed(monkeypatch, package):
    """In a virtual environment inside the checkout, say."""
    site = package.parent.parent / ".venv" / "lib"
    shutil.copytree(package, site / "attnmem")
    monkeypatch.setattr(results, "PACKAGE", site / "attnmem")


def below_another_repository(monkeypatch, package):
    monkeypatch.setattr(results, "PACKAGE", copied(package / "copy"))
    git(package, "add", ".")
    git(package, "commit", "-q", "-m", "b")


def beside_files_of_another_repository(monkeypatch, package):
    thesis = package / "thesis"
    thesis.mkdir()
    (thesis / "thesis.tex").touch()
    committed(thesis)
    monkeypatch.setattr(results, "PACKAGE", copied(thesis))


def part_of_another_project(monkeypatch, package):
    project = package / "project"
    monkeypatch.setattr(results, "PACKAGE", copied(project, '[project]\nname = "another"\n'))
    committed(project)


@pytest.mark.parametrize(
    "case",
    [
        no_git,
        no_repository,
        another_owner,
        no_commit_yet,
        installed,
        below_another_repository,
        beside_files_of_another_repository,
        part_of_another_project,
    ],
)
def test_rows_never_name_the_commit_of_another_repository(checkout, monkeypatch, case):
    assert commit() == head(checkout)
    case(monkeypatch, checkout)
    assert commit() == results.UNKNOWN


def test_that_rows_will_name_no_commit_is_said_once_before_they_are_measured(store, monkeypatch):
    monkeypatch.setattr(results, "commit", lambda: "0123456789ab")
    results._warn_of_rows_without_commit.cache_clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        results.check_writable(RUN)
        assert not said
        monkeypatch.setattr(results, "commit", lambda: results.UNKNOWN)
        results.check_writable(RUN)
        results.check_writable(RUN)
    assert ["ATTNMEM_COMMIT" in str(each.message) for each in said] == [True]


def test_a_checkout_is_a_folder_lib_beside_the_settings_of_the_library(checkout, monkeypatch):
    assert results.in_checkout()
    other = checkout.parent.rename(checkout.parent.with_name("packages")) / "attnmem"
    monkeypatch.setattr(results, "PACKAGE", other)
    assert not results.in_checkout()
    other.parent.rename(checkout.parent)
    monkeypatch.setattr(results, "PACKAGE", checkout)
    (checkout.parent.parent / "pyproject.toml").unlink()
    assert not results.in_checkout()
