"""The store loses nothing, doubles nothing, and refuses what it did not write."""

import dataclasses
import math
import multiprocessing
import os
import random
import signal
import time

import pandas as pd
import pytest

from attnmem import results
from attnmem.results import TESTS, Check, DamagedResultsError, Finding, Outcome, Run

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


def rows(count, start=0):
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
        *rows(3),
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
        results.append(rows(1), tmp_path)
    assert list(results.read(path).values()) == written
    table = results.as_table(written, TESTS)
    assert table["size"].tolist() == [197, 5]
    assert list(results.as_table([], TESTS).columns) == list(table.columns)


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


@pytest.mark.parametrize("damage", DAMAGES)
def test_no_damage_is_accepted_in_silence(tmp_path, path, damage):
    results.append(rows(6), tmp_path)
    sound = path.read_bytes()
    for seed in range(40):
        broken = damage(sound, random.Random(seed))
        assert broken != sound
        path.write_bytes(broken)
        with pytest.raises(DamagedResultsError, match=rf"{path}, line \d+: "):
            results.read(path)
        with pytest.raises(DamagedResultsError):
            results.append(rows(1, start=99), tmp_path)
        assert path.read_bytes() == broken  # and nothing is written to it


def test_a_file_of_another_experiment_is_refused(tmp_path, path):
    results.append(rows(2), tmp_path)
    moved = results.file_of("other", "quick", tmp_path)
    moved.parent.mkdir()
    path.rename(moved)
    with pytest.raises(DamagedResultsError, match="line 2: it belongs to trial/quick"):
        results.read(moved)


def write_slowly(root, start):
    for row in rows(40, start):
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


def test_shipped_and_new_rows_are_read_together(tmp_path, monkeypatch):
    shipped, new = tmp_path / "shipped", tmp_path / "new"
    monkeypatch.setattr(results, "SHIPPED", shipped)
    monkeypatch.setenv("ATTNMEM_MEASUREMENTS", str(new))
    results.append(rows(2), shipped)
    results.append(rows(1, start=7))
    assert results.table("trial", "quick").seed.tolist() == [0, 1, 7]
    assert (new / "trial" / "quick.csv").exists()


def test_spans_say_the_least_and_the_largest_and_refuse_holes():
    rows = pd.DataFrame({"T": [20_000, 550, 1000], "n": [7, 7, 7], "width": [1, None, 2]})
    assert results.spans(rows, "n", "T") == "n = 7, T = 550 to 20,000"
    for field in ("width", "H"):
        with pytest.raises(ValueError, match=field):
            results.spans(rows, "T", field)
