"""Files of people through the commands: answers, and lines that run as they are printed."""

import io
import json
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from attnmem import MHAWeights, mha
from attnmem_yours import __main__ as command
from attnmem_yours.files import load

EVERY = [
    "name,height,age,group",
    "Ada,170.5,36,A",
    "Ben,,41,B",
    "Cem,181.0,NA,A",
    "Dora,166.25,29,B",
    "Eve,159.0,60,A",
    "Finn,190.0,33,B",
    "Gül,175.0,51,A",
    "Hal,168.5,44,",
    "Ina,171.5,38,B",
    "Jan,184.5,27,A",
]


def write(folder, lines, name="t.csv"):
    path = folder / name
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return path


@pytest.fixture
def call(capsys):
    def run(*words):
        status = command.main(["examine", *map(str, words), "--samples", "5"])
        return status, *capsys.readouterr()

    return run


def words_after(out):
    """The words of the command that the last line of an answer proposes."""
    return shlex.split(out.splitlines()[-1].removeprefix("next        python -m attnmem_yours "))


def answers(out):
    """What the line that `memorize` prints would print, run as it stands."""
    [line], labels = [line for line in out.splitlines() if line.startswith("load ")], []
    exec(line.removeprefix("load").strip(), {"print": labels.append})
    return labels[0]


def test_answer_has_three_lines_then_the_report(tmp_path, call):
    path = write(tmp_path, EVERY)
    chosen = path, "--columns", 'age, "height"', "--label", "group"
    status, out, _ = call(*chosen, "--details")
    data, layer, _, *report = re.split(r"\n+(?=\S)", out.strip())
    assert status == 0
    brief = " ".join(data.split())
    assert brief.startswith("data t.csv: 7 examples of 2 tokens, labels: group (classes: 2);")
    assert brief.endswith("columns left out: name (not in --columns); lines left out: 3")
    assert layer.startswith("layer       heads of width 3: ")
    assert report[0].startswith("file: t.csv: 10 rows of 4 columns between commas, example 0 in li")
    assert report[1] == "label: group (classes: 2)"
    assert report[-1].startswith("weights: ")
    short = call(*chosen)[1]
    assert out.startswith(short)
    words = words_after(short)
    assert words[:4] == ["memorize", str(path), "--label=group", '--columns=age, "height"']
    assert words[-2:] == ["--out", "weights.safetensors"]
    assert command.main([*words[:-1], str(tmp_path / "w.safetensors")]) == 0


def test_answer_with_a_picture_or_json(tmp_path, call):
    path = write(tmp_path, EVERY)
    call(path, "--heads", "1", "--picture", tmp_path / "ranks.svg")
    assert "<svg" in (tmp_path / "ranks.svg").read_text()
    out = call(path, "--json", "--labels", "age", "--label-kind", "real")[1]
    assert json.loads(out)["read"]["label"] == {"age": "numbers"}


def test_answer_for_other_files(tmp_path, call, monkeypatch):
    np.save(tmp_path / "t.npy", np.arange(6.0).reshape(2, 3))
    out = call(tmp_path / "t.npy")[1]
    assert out.startswith("data        t.npy: 2 examples of 2 tokens, labels: none")
    assert "next        labels, without which" in out
    piped = io.TextIOWrapper(io.BytesIO(b"a,b,y\n1,2,0.5\n2,3,1.5\n"))
    monkeypatch.setattr(sys, "stdin", piped)
    assert "standard input: 2 examples" in call("-")[1]
    (tmp_path / "UP.CSV").write_bytes(write(tmp_path, EVERY).read_bytes())
    assert call(tmp_path / "UP.CSV")[0] == 0


@pytest.mark.parametrize("ending", ["csv", "tsv"])
@pytest.mark.parametrize("texts", ["02110 00501 10001", "04 4 004", "3.1 3.10 3.2"])
def test_classes_come_back_as_their_texts(tmp_path, capsys, texts, ending):
    labels, mark = 4 * texts.split(), {"csv": ";", "tsv": "\t"}[ending]
    rows = [mark.join((str(i), str(i * i % 7), label)) for i, label in enumerate(labels)]
    path = write(tmp_path, [mark.join("aby"), *rows], f"t.{ending}")
    out = tmp_path / "w.safetensors"
    words = ["memorize", str(path), "--heads=4", "--label-kind=class", f"--out={out}"]
    assert command.main(words) == 0
    with safe_open(out, "pt") as file:
        assert json.loads(file.metadata()["classes"]) == sorted(texts.split())
    assert answers(capsys.readouterr().out).tolist() == labels


FILES = {  # what a file holds, and its name
    "npz": "arrays.npz",
    "safetensors": "a b.safetensors",
    "pt": "it's.pt",
    "lists": "lists.pt",
    "nested": "nested.pt",
    "jagged": "jagged.pt",
    "half": "half.safetensors",
    "huge mask": "huge.npz",
    "shared": "shared.npz",
}


@pytest.mark.parametrize("labels", ["real", "class", "words"])
@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("mask", [False, True])
def test_printed_line_gives_labels_of_any_file(tmp_path, capsys, kind, labels, mask):
    E, e = torch.randn(8, 3, 2, generator=torch.Generator().manual_seed(0)), torch.eye(8)[:, :2]
    e = e + torch.arange(16).view(8, 2) / 7
    y = {"real": e[:, 0] ** 2, "class": torch.arange(8) % 3, "words": [*"abcaabbc"]}[labels]
    hidden = torch.arange(3) >= torch.tensor([3, 2, 2, 3, 2, 2, 3, 3])[:, None]
    ragged = [tokens[~out] if mask else tokens for tokens, out in zip(E, hidden, strict=True)]
    if kind == "lists":
        E = ragged
    elif kind in ("nested", "jagged"):
        layout = torch.strided if kind == "nested" else torch.jagged
        E = torch.nested.nested_tensor(ragged, layout=layout)
    elif kind == "shared":
        E = E[0]
    elif kind == "half":
        E, e = E.half(), e.half()
    arrays = {"E": E, "queries": e, "y": y}
    if mask and kind not in ("lists", "nested", "jagged"):
        huge = torch.where(hidden, -1e9, 0.0)[:, None, None]
        arrays["mask"] = huge if kind == "huge mask" else hidden
    path, out = tmp_path / FILES[kind], tmp_path / "w.safetensors"
    if path.suffix == ".npz":
        np.savez(path, **{name: np.asarray(x) for name, x in arrays.items()})
    elif path.suffix == ".pt":
        torch.save(arrays, path)
    elif labels == "words":
        pytest.skip("such a file holds none")
    else:
        save_file(arrays, path)
    words = [str(path), "--contexts=E", "--label=y", "--head-dim=2"]
    assert command.main(["memorize", *words, "--heads=12", "--out", str(out)]) == 0
    stored = answers(capsys.readouterr().out)
    if labels == "real":
        assert np.allclose(stored, y, atol=1e-5 * float(y.max()))
    else:
        assert [*stored] == [str(int(x)) if labels == "class" else x for x in y]


def test_printed_line_of_a_table_runs_in_a_shell(tmp_path, capsys):
    rows = [f"u{i % 2},{i},'{i * i % 7}',{i % 5},0{i % 3}" for i in range(9)]
    path = write(tmp_path, ["word,a,it's,b,y", *rows], "my t.csv")
    words = [str(path), "--columns=word,a,b", "--tokens=2", "--label=y", "--header"]
    out, labels = tmp_path / "w.safetensors", [f"0{i % 3}" for i in range(9)]
    assert command.main(["memorize", *words, "--heads=6", f"--out={out}"]) == 0
    line = capsys.readouterr().out.splitlines()[-1].removeprefix("load").strip()
    for option in ("label='y'", "columns=['word', 'a', 'b']", "tokens=2", "header=True"):
        assert option in line
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True)
    assert re.findall(r"'(.*?)'", done.stdout) == labels
    assert command.main(["examine", *words, "--samples=5", "--heads=6"]) == 0
    proposed = words_after(capsys.readouterr().out)
    assert proposed[-2:] == ["--out", "weights.safetensors"]
    assert command.main([*proposed[:-1], f"{out}.2.safetensors"]) == 0
    assert answers(capsys.readouterr().out).tolist() == labels


def test_unsure_proposal_writes_what_is_met(tmp_path, call, capsys):
    path = write(tmp_path, ["a,b,y", "1,2,a", "1,2,b", "3,4,a", "4,4,c"])
    words = words_after(call(path)[1])
    assert words[-1] == "--partial"
    words[-2] = str(tmp_path / "w.safetensors")
    assert command.main(words) == 0
    assert (answers(capsys.readouterr().out) == ["a", "b", "a", "c"]).sum() == 3


@pytest.fixture
def twenty(tmp_path):
    """The words of a command for twenty rows, and the file that it writes."""
    rng = np.random.default_rng(0)
    rows = [f"{a:.3f},{b:.3f},{c:.3f},{i % 3}" for i, (a, b, c) in enumerate(rng.random((20, 3)))]
    path, out = write(tmp_path, ["a,b,c,y", *rows]), tmp_path / "w.safetensors"
    return ["memorize", str(path), f"--out={out}", "--head-dim=2"], out


@pytest.mark.parametrize("kind", ["class", "real"])
def test_weights_give_the_labels_back(twenty, kind, capsys):
    words, out = twenty
    assert command.main([*words, "--label-kind", kind, "--heads=8"]) == 0
    said = capsys.readouterr().out
    lines = re.split(r"\n(?=\S)", said)
    assert [line[:12].strip() for line in lines] == ["data", "stored", "weights", "load"]
    assert lines[1].startswith("stored      20 of 20 labels, by ")
    weights, labels = MHAWeights(**load_file(out)), [i % 3 for i in range(20)]
    for name, W in weights._asdict().items():
        assert f"{name} {tuple(W.shape)}" in " ".join(said.split())
    if kind == "real":
        assert answers(said).tolist() == pytest.approx(labels, abs=1e-5)
    else:
        assert answers(said).tolist() == [str(label) for label in labels]
        outputs = mha(weights, *load(words[1])[:2])
        assert outputs.argmax(1).tolist() == labels, "an ordinary layer's weights"
    assert command.main([*words, "--heads=8"]) == 1
    assert "w.safetensors', which exists; expected a new file" in capsys.readouterr().err


def test_too_few_heads_write_nothing_unless_asked(twenty, capsys):
    words, out = twenty
    words = [*words, "--label-kind=real", "--heads=1"]
    assert command.main(words) == 1
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("nothing written, only ")
    assert "so many heads store almost no real labels" in error
    assert not out.exists()
    assert command.main([*words, "--partial"]) == 0
    assert re.search(r"stored      1?\d of 20 labels", capsys.readouterr().out)


NOT_WRITTEN = {  # words of a command, and what is said before any work
    "memorize --heads=2 --out {}/no/w.safetensors": "No such file or directory.; exp",
    "memorize --heads=2 --out {}/t.csv/w.safetensors": "Not a directory",
    "memorize --heads=2 --out {}/w.pt": "--out: got .*w.pt'; expected a name that ends in .safe",
    "memorize --heads=2 --out {}/t.csv": "t.csv', which exists; expected a new file",
    "examine --heads=2 --picture {}/no/x.png": "--picture: got .*No such file or directory",
    "examine --heads=2 --picture {}": "expected a name that ends in .*.png",
    "examine --heads=2 --picture {}/x.doc": "--picture: got .*expected a name that ends in .*.png",
    "examine --picture {}/x.png": "--heads too",
}


@pytest.mark.parametrize("words", NOT_WRITTEN)
def test_unwritable_is_refused_before_work(tmp_path, capsys, monkeypatch, words):
    path = write(tmp_path, ["a,b,y", "1,2,0.5", "2,3,1.5", "3,3,2.5"])
    for work in ("load", "examine", "memorize"):
        monkeypatch.setattr(command, work, None)  # a call would be an error of another type
    name, *options = words.format(tmp_path).split()
    assert command.main([name, str(path), *options]) == 1
    out, error = capsys.readouterr()
    assert re.search(NOT_WRITTEN[words], error)
    assert (out, error.count("\n")) == ("", 1)
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize(
    ("words", "package"),
    [
        ("memorize --heads=2 --out {}/w.safetensors", "safetensors.torch"),
        ("examine --heads=2 --picture {}/x.png", "matplotlib.figure"),
    ],
)
def test_missing_package_is_named_before_work(tmp_path, capsys, monkeypatch, words, package):
    path = write(tmp_path, ["a,b,y", "1,2,0.5", "2,3,1.5", "3,3,2.5"])
    monkeypatch.setattr(command, "load", None)
    monkeypatch.setitem(sys.modules, package, None)
    name, *options = words.format(tmp_path).split()
    assert command.main([name, str(path), *options]) == 1
    assert capsys.readouterr().err.startswith(f"{package} is missing: pip install ")


def test_report_in_ascii_with_a_picture(tmp_path, monkeypatch):
    path = write(tmp_path, ["a,b,y", "1,2,ß", "2,3,x", "4,4,ß"])
    out = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", out)
    words = ["examine", str(path), "--samples", "5", "--heads", "1", "--details"]
    assert command.main([*words, "--picture", str(tmp_path / "x.png")]) == 0
    out.flush()
    text = out.buffer.getvalue().decode("ascii")
    assert r"\xdf" in text
    assert "weights: " in text
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
