"""The store loses nothing, doubles nothing, and refuses what it did not write."""

import csv
import dataclasses
import errno
import hashlib
import io
import math
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import threading
import time
import zlib

import numpy as np
import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmem.lab import store as storage
from attnmem.lab.store import (
    Check,
    DamagedResultsError,
    Finding,
    Outcome,
    Reading,
    ReadOutcome,
    Run,
    Skewed,
)

RUN = Run(
    **{"experiment": "trial", "profile": "quick", "model": "aot", "variant": "code", "N": 50},
    **{"n": 2, "T": 128, "d": 5, "d_h": 5, "H": 3, "width": None, "layers": 1, "seed": 0},
    **{"steps": 100, "task": "bigrams", "context": None, "batch": 32, "schedule": "linear"},
    **{"lr": 0.1, "lr_start": 0.1, "lr_end": 0.005},
)
OUTCOME = Outcome(0.1234567890123, 1.5e-07, 0.25, "cpu, two cores", "2.13.0", "abc123+")
CHECK = Check(
    **{"experiment": "trial", "profile": "quick", "source": "photographs", "map": "random L0"},
    **{"architecture": "vit-base", "dtype": "float64", "vectors": "queries", "T": 2000, "n": 197},
    **{"d": 768, "size": 197, "samples": 5000, "seed": 0},
)
FINDING = Finding(3, 100, 196, 197, 1.5, "cpu", "2.13.0", "abc123")
HEADER = storage.HEADERS[Run] + "\n"


OTHER = dataclasses.replace(RUN, experiment="other", seed=1)
PAPER = dataclasses.replace(RUN, profile="paper", seed=1)


def made(count, start=0):
    return [
        (dataclasses.replace(RUN, seed=seed), dataclasses.replace(OUTCOME, loss=seed + 0.1))
        for seed in range(start, start + count)
    ]


def stored(path):
    return list(storage.read(path).values())


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trial" / "quick.csv"


# --- what is written is read ----------------------------------------------------------------------

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
    ),
    st.booleans() | st.none(),
)
def test_any_outcome_is_read_as_it_was_written(tmp_path_factory, fields, early_stop):
    run = dataclasses.replace(RUN, early_stop=early_stop, context="shared")
    outcome = Outcome(**fields | {"wall_s": np.float64(fields["wall_s"])})
    root = tmp_path_factory.mktemp("store")
    lost = dataclasses.replace(outcome, accuracy=None, loss=None, diverged=17)
    written = [(run, outcome), (dataclasses.replace(run, seed=1), lost)]
    storage.append(written, root)
    assert stored(root / "trial" / "quick.csv") == written


def test_a_prior_and_an_entropy_are_kept_and_change_the_key(tmp_path, path):
    runs = [Skewed(**vars(RUN), prior=1.0), Skewed(**vars(RUN), entropy=1.0), Skewed(**vars(RUN))]
    assert len({run.key for run in runs}) == 3
    assert runs[2].key == RUN.key, "what is not said is not in the key"
    assert (RUN.prior, RUN.entropy) == (None, None)
    assert storage.append([(run, OUTCOME) for run in runs], tmp_path) == 3
    assert stored(path) == [(run, OUTCOME) for run in runs]
    with pytest.raises(ValueError, match=r"^rows: got .*; expected Skewed with Outcome"):
        storage.append([(runs[0], OUTCOME), *made(1)], tmp_path)


def test_a_reading_keeps_what_it_measured_besides(tmp_path, path):
    run = Reading(**vars(RUN))
    outcome = ReadOutcome(**vars(OUTCOME), new_loss=0.7, counted_loss=0.1, step_s=1e-3, use_s=1e-7)
    assert run.key == RUN.key
    assert storage.append([(run, outcome)], tmp_path) == 1
    assert stored(path) == [(run, outcome)]
    with pytest.raises(ValueError, match=r"^rows: got .*; expected Reading with ReadOutcome"):
        storage.append([(run, OUTCOME)], tmp_path)


def test_append_adds_a_row_once_and_the_first_counts(tmp_path, path):
    again = (RUN, dataclasses.replace(OUTCOME, loss=2.0))
    assert storage.append([*made(1), again, *made(3)], tmp_path) == 3
    assert storage.append([again, *made(2)], tmp_path) == 0
    assert stored(path) == made(3)


def test_kinds_of_rows_are_not_mixed(tmp_path, path):
    bare = dataclasses.replace(FINDING, ranked=0, least_rank=None, most_rank=None)
    written = [(CHECK, FINDING), (dataclasses.replace(CHECK, size=5), bare)]
    for mixed in ([(RUN, FINDING)], [(RUN, OUTCOME), (CHECK, FINDING)]):
        with pytest.raises(ValueError, match=r"^rows: got .*; expected Run with Outcome"):
            storage.append(mixed, tmp_path)
        assert not path.exists()
    assert storage.append(written, tmp_path) == 2
    with pytest.raises(DamagedResultsError, match="line 1: not the header of such rows"):
        storage.append(made(1), tmp_path)
    assert stored(path) == written


def test_the_key_is_the_configuration_and_nothing_else():
    changes = [{"seed": 1}, {"lr": 0.2}, {"width": 0}, {"variant": "paper"}, {"context": "shared"}]
    assert len({RUN.key, *(dataclasses.replace(RUN, **c).key for c in changes)}) == 6
    assert RUN.key == "d5d4e4b56e23ae2d"  # a changed rule would orphan every stored row


@pytest.mark.parametrize(
    "file",
    ["mahdavi-fig3/quick", "dana-exp6/paper", "assumptions-vision/quick", "answer-training/paper"],
)
def test_shipped_files_are_written_byte_for_byte(tmp_path, file):
    path = storage.SHIPPED / f"{file}.csv"
    storage.append(stored(path), tmp_path)
    assert (tmp_path / f"{file}.csv").read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("run", "outcome", "name"),
    [
        ({}, {"loss": math.nan}, "loss"),
        ({}, {"curve": (0.5, math.nan)}, "curve"),
        ({}, {"wall_s": -math.inf}, "wall_s"),
        ({"lr": math.nan}, {}, "lr"),
        ({"task": ""}, {}, "task"),  # would be read as missing
        ({}, {"device": "two\nlines"}, "device"),  # would be read as two rows
        ({"n": True}, {}, "n"),  # its key would be that of another number
    ],
)
def test_nothing_is_written_that_could_not_be_read(tmp_path, path, run, outcome, name):
    bad = (dataclasses.replace(RUN, **run), dataclasses.replace(OUTCOME, **outcome))
    storage.append(made(1, start=1), tmp_path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=rf"^{name}: got "):
        storage.append([*made(1, start=2), bad], tmp_path)
    assert path.read_bytes() == before


# --- damage ---------------------------------------------------------------------------------------


def flip_byte(data, rng):
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


OTHER_SYSTEMS = {
    "some line ends": lambda data: data.replace(b"\n", b"\r\n", 2),
    "mark": lambda data: b"\xef\xbb\xbf" + data,
    "both": lambda data: b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n"),
}


@pytest.mark.parametrize("written", [bytes, OTHER_SYSTEMS["both"]])
def test_no_changed_byte_is_accepted_in_silence(tmp_path, path, written):
    storage.append(made(6), tmp_path)
    sound = path.read_bytes()
    for seed in range(80):
        broken = written(flip_byte(sound, random.Random(seed)))
        assert broken != written(sound)
        path.write_bytes(broken)
        with pytest.raises(DamagedResultsError, match=rf"{path}, line \d+: "):
            storage.read(path)
        with pytest.raises(DamagedResultsError):
            storage.append(made(1, start=99), tmp_path)
        assert path.read_bytes() == broken  # and nothing is written to it


@pytest.mark.parametrize("what", OTHER_SYSTEMS)
def test_files_of_other_systems_are_read_and_extended(tmp_path, path, what):
    storage.append(made(4), tmp_path)
    path.write_bytes(OTHER_SYSTEMS[what](path.read_bytes()))
    assert storage.append(made(6), tmp_path) == 2
    assert stored(path) == made(6)


def third(edit):
    """A damage of the third line."""
    return lambda lines: [*lines[:2], edit(lines[2]), *lines[3:]]


@pytest.mark.parametrize(
    ("damage", "line", "said"),
    [
        (third(lambda line: line[:-10] + "\n"), 3, "its checksum does not fit"),
        (third(lambda line: line.replace("cpu", "gpu")), 3, "its checksum does not fit"),
        (third(lambda line: "tri\udcffal" + line), 3, "surrogates not allowed"),
        (lambda lines: [*lines[:4], lines[4][:-1]], 5, "cut off before its end"),
        (lambda lines: [*lines[:4], lines[4][:7]], 5, "cut off before its end"),
        (lambda lines: [*lines, lines[3]], 6, "stands in the file twice"),
        (lambda lines: [lines[0].replace("key,", "odd,key,")], 1, "the header is not that"),
        (lambda lines: [lines[0].replace("seed,", ""), *lines[1:]], 1, "the header is not that"),
        (lambda lines: [], 1, "the header is not that"),
    ],
)
def test_damage_is_named_by_its_line(tmp_path, path, damage, line, said):
    storage.append(made(4), tmp_path)
    broken = "".join(damage(path.read_text().splitlines(keepends=True)))
    path.write_bytes(broken.encode(errors="surrogateescape"))
    for use in (storage.read, lambda _: storage.append(made(9), tmp_path)):
        with pytest.raises(DamagedResultsError, match=rf"{path}, line {line}: .*{said}"):
            use(path)


def forge(path, number, **changes):
    """Change the text of a stored row as somebody would who also corrects its checksum."""
    lines = path.read_text().splitlines(keepends=True)
    header, cells = next(csv.reader(lines[:1])), next(csv.reader([lines[number - 1]]))
    body = io.StringIO()
    changed = dict(zip(header, cells, strict=True)) | changes
    csv.writer(body, lineterminator="\n").writerow([changed[name] for name in header[:-1]])
    text = body.getvalue()
    lines[number - 1] = f"{text[:-1]},{zlib.crc32(text.encode()):08x}\n"
    path.write_text("".join(lines))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"key": "0" * 16}, "its key is not the hash of its configuration"),
        ({"experiment": "other", "key": OTHER.key}, "it belongs to other/quick"),
        ({"profile": "paper", "key": PAPER.key}, "it belongs to trial/paper"),
        ({"accuracy": "nan"}, "accuracy = 'nan' cannot be read"),
        ({"wall_s": "inf"}, "wall_s = 'inf' cannot be read"),
        ({"tf32": "true"}, "tf32 = 'true' cannot be read"),
        ({"seed": ""}, "seed = '' cannot be read"),
        ({"diverged": "1.5"}, "diverged = '1.5' cannot be read"),
        ({"curve": "0.5 nan"}, "curve = '0.5 nan' cannot be read"),
        ({"loss": ""}, "loss: got None with diverged = None"),
        ({"diverged": "0", "accuracy": ""}, "loss: got 1.1 with diverged = 0"),
        ({"diverged": "17", "loss": ""}, "accuracy: got 0.1234567890123 with diverged = 17"),
    ],
)
def test_a_forged_value_is_refused(tmp_path, path, changes, said):
    storage.append(made(3), tmp_path)
    forge(path, 3, **changes)
    with pytest.raises(DamagedResultsError, match=re.escape(f"{path}, line 3: {said}")):
        storage.read(path)


# --- whole rows or none ---------------------------------------------------------------------------


def write_slowly(root, start):
    for row in made(40, start):
        storage.append([row], root)


def test_processes_that_write_at_once_lose_nothing(tmp_path, path):
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=write_slowly, args=(tmp_path, s)) for s in (0, 20, 40)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        storage.read(path)  # which waits for nobody and meets whole files only
    for writer in writers:
        writer.join()
    assert [w.exitcode for w in writers] == [0, 0, 0]
    assert sorted(run.seed for run, _ in stored(path)) == list(range(80))  # each once


def test_a_killed_writer_leaves_whole_rows(tmp_path, path):
    fork, rng = multiprocessing.get_context("fork"), random.Random(0)
    for _ in range(20):
        have = stored(path)
        writer = fork.Process(target=write_slowly, args=(tmp_path, 0))
        writer.start()
        time.sleep(rng.uniform(0.0, 0.06))
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        assert stored(path)[: len(have)] == have
    write_slowly(tmp_path, 0)
    assert stored(path) == made(40)


def write_within(most, root):
    """No file may grow beyond so many bytes, as if the disk were full."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    storage.append(made(4), root)


@pytest.mark.parametrize("room", [-1, 0, 1, 100, 300])
def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, path, room):
    storage.append(made(1), tmp_path)
    before = path.read_bytes()
    limits = len(before) + room, tmp_path
    writer = multiprocessing.get_context("fork").Process(target=write_within, args=limits)
    writer.start()
    writer.join()
    assert writer.exitcode == 1
    assert path.read_bytes() == before
    assert storage.append(made(4), tmp_path) == 3
    assert stored(path) == made(4)


def test_a_writer_waits_for_the_lock(tmp_path, path):
    storage.append(made(2), tmp_path)
    writer = threading.Thread(target=storage.append, args=(made(3), tmp_path))
    with FileLock(path.with_suffix(".lock")):
        writer.start()
    writer.join()
    assert stored(path) == made(3)


def test_who_waits_for_a_lock_says_so_and_not_for_ever(tmp_path, path, monkeypatch, capfd):
    """A process that was stopped holds it; what can be read without it is read."""
    storage.append(made(2), tmp_path)
    monkeypatch.setattr(storage, "PATIENCE", (0.05, 0.1))
    monkeypatch.setenv("ATTNMEM_MEASUREMENTS", str(tmp_path))
    capfd.readouterr()
    for wait in (lambda: storage.append(made(3), tmp_path), lambda: storage.check_writable(RUN)):
        with FileLock(path.with_suffix(".lock")):
            with pytest.raises(TimeoutError, match=r"quick\.lock"):
                wait()
            assert stored(path) == made(2)
        said = capfd.readouterr().err
        assert said.startswith(f"waiting for {path.with_suffix('.lock')}, which another process")
        assert said.count("\n") == 1


def test_of_listed_rows_none_may_be_missing(tmp_path, path):
    """New rows go behind them; one of these may be taken away again."""
    storage.append(made(8), tmp_path)
    header, *rows = path.read_text().splitlines()
    digest = hashlib.sha256("\n".join(rows[:5]).encode()).hexdigest()
    text = f"another/quick.csv 1 {'0' * 64}\ntrial/quick.csv 5 {digest}\n"
    (tmp_path / "DIGESTS").write_text(text)
    assert stored(path) == made(8)
    path.write_text("\n".join([header, *rows[:6], rows[7], ""]))
    assert len(stored(path)) == 7
    for left in ([header, *rows[:4], *rows[5:]], [header, *rows[1::-1], *rows[2:]], [header]):
        path.write_text("\n".join([*left, ""]))
        for refused in (lambda: storage.read(path), lambda: storage.append(made(9), tmp_path)):
            with pytest.raises(DamagedResultsError, match="its first 5 rows are not those that"):
                refused()
        assert path.read_text().splitlines() == left
    path.unlink()
    with pytest.raises(DamagedResultsError, match="its first 5 rows are not those that"):
        storage.append(made(9), tmp_path)
    assert not path.exists()
    assert storage.read(path.with_name("paper.csv")) == {}


def test_a_row_that_was_taken_out_is_missed(tmp_path, path):
    """In a folder of one's own, until its note goes; a file that is gone begins anew."""
    storage.append(made(3), tmp_path)
    storage.append(made(4), tmp_path)
    header, *rows = path.read_text().splitlines()
    for k in range(4):
        path.write_text("\n".join([header, *rows[:k], *rows[k + 1 :], ""]))
        for use in (storage.read, lambda _: storage.append(made(9), tmp_path)):
            with pytest.raises(DamagedResultsError, match="4 rows were written, 3 are there"):
                use(path)
    path.with_suffix(".count").unlink()
    assert len(stored(path)) == 3
    assert storage.append(made(4), tmp_path) == 1
    path.unlink()
    assert storage.append(made(2), tmp_path) == 2
    assert stored(path) == made(2)


def test_rows_of_two_folders_may_be_joined_by_hand(tmp_path, path):
    storage.append(made(2), tmp_path)
    storage.append(made(2, start=2), tmp_path / "other")
    more = (tmp_path / "other" / path.relative_to(tmp_path)).read_text().split("\n", 1)[1]
    path.write_text(path.read_text() + more)
    assert len(stored(path)) == 4
    assert storage.append(made(5), tmp_path) == 1


def test_a_count_that_cannot_be_written_loses_no_row(tmp_path, path, monkeypatch):
    storage.append(made(2), tmp_path)
    replace = storage.os.replace

    def full(scratch, target):
        if target.suffix == ".count":
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(scratch, target)

    monkeypatch.setattr(storage.os, "replace", full)
    assert storage.append(made(4), tmp_path) == 2
    assert stored(path) == made(4)


# --- where rows go --------------------------------------------------------------------------------


def test_writable_root_is_named_or_the_checkout(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for named, folder in [(" ~/rows\n", tmp_path / "rows"), (" ", storage.SHIPPED)]:
        monkeypatch.setenv("ATTNMEM_MEASUREMENTS", named)
        assert storage.writable_root() == folder
    monkeypatch.setenv("ATTNMEM_MEASUREMENTS", "~nobody-of-this-name/rows")
    with pytest.raises(ValueError, match="ATTNMEM_MEASUREMENTS: got '~nobody-of-this-name/rows'"):
        storage.writable_root()


def test_known_takes_new_rows_for_those_shipped(store, tmp_path):
    storage.append(made(2), tmp_path / "shipped")
    newer = [(run, dataclasses.replace(outcome, tf32=True)) for run, outcome in made(3)[1:]]
    storage.append(newer)
    assert (store / "trial" / "quick.csv").exists()
    assert list(storage.known("trial", "quick").values()) == [made(1)[0], *newer]
    assert list(storage.known("trial", "quick", recompute=True).values()) == newer
    assert list(storage.known("trial", "quick", root=tmp_path / "none").values()) == made(2)
    assert storage.known("trial", "quick", recompute=True, root=tmp_path / "none") == {}
    storage.check_writable(RUN, tmp_path / "none")
    assert (tmp_path / "none" / "trial").is_dir()


# --- the commit -----------------------------------------------------------------------------------


commit = storage.commit.__wrapped__  # without its cache
PROJECT = '[project]\nname = "attnmem"\n'


def git(folder, *command):
    names = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = [shutil.which("git") or pytest.skip("git is missing"), "-C", folder, *names, *command]
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
    committed(tmp_path / "checkout")
    return package


def head(package):
    return git(package, "rev-parse", "HEAD")[:12]


def test_commit_says_whether_the_code_has_changed(checkout, monkeypatch):
    assert commit(checkout) == head(checkout)
    (checkout / "rows.csv").write_text("2\n")
    (checkout / "new.py").write_text("2\n")
    (checkout.parent / "elsewhere.py").write_text("2\n")
    assert commit(checkout) == head(checkout)  # rows are no code, new files are not imported by it
    (checkout / "code.py").write_text("2\n")
    assert commit(checkout) == head(checkout) + "+"
    monkeypatch.setenv("ATTNMEM_COMMIT", "0123456789ab\n")  # as `$(<file)` may leave it
    assert commit(checkout) == commit(checkout.parent) == "0123456789ab"


def test_commit_ignores_the_variables_of_hooks(checkout, tmp_path, monkeypatch):
    """Git tells its hooks so which repository they belong to, and of which files."""
    own = head(checkout)
    git(tmp_path, "init", "-q", "thesis")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "thesis" / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(checkout.parent.parent))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "thesis" / ".git" / "index"))
    assert commit(checkout) == own


def no_git(package, setenv):
    setenv("PATH", "")
    return package


def no_repository(package, setenv):
    shutil.rmtree(package.parent.parent / ".git")
    return package


def installed(package, setenv):
    """In a virtual environment inside the checkout, say."""
    site = package.parent.parent / ".venv" / "lib" / "attnmem"
    shutil.copytree(package, site)
    return site


def below_another_repository(package, setenv):
    copy = copied(package / "copy")
    git(package, "add", ".")
    git(package, "commit", "-q", "-m", "b")
    return copy


def part_of_another_project(package, setenv):
    copy = copied(package / "project", '[project]\nname = "another"\n')
    committed(package / "project")
    return copy


FOREIGN = (below_another_repository, part_of_another_project)


@pytest.mark.parametrize("case", [no_git, no_repository, installed, *FOREIGN])
def test_commit_is_not_that_of_another_repository(checkout, monkeypatch, case):
    assert commit(checkout) == head(checkout)
    assert commit(case(checkout, monkeypatch.setenv)) == storage.UNKNOWN


@pytest.mark.usefixtures("store")
def test_check_writable_warns_of_rows_without_commit(monkeypatch):
    monkeypatch.setattr(storage, "commit", lambda: storage.UNKNOWN)
    with pytest.warns(UserWarning, match="ATTNMEM_COMMIT is not set"):
        storage.check_writable(RUN)
