"""Files of people: each is read as a plain reader reads it, or refused by name; nothing else."""

import csv
import io
import itertools
import json
import random
import re
import shlex
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from attnmem import MHAWeights, mha
from attnmem_yours import __main__ as command
from attnmem_yours import examine, memorize, predict
from attnmem_yours.data import as_data, cut
from attnmem_yours.files import load

MARKS = {"tabs": "\t", "semicolons": ";", "commas": ",", "bars": "|", "spaces": " "}
EVERY = [
    "name,day,colour,member,height,age,group",
    "Ada,2024-01-02,red,yes,170.5,36,A",
    "Ben,2024-02-02,NA,no,,41,B",
    "Cem,2024-03-05,red,no,181.0,NA,A",
    "Dora,2024-03-09,blue,yes,166.25,29,B",
    "Eve,2024-04-01,NA,yes,159.0,60,A",
    "Finn,2024-05-30,blue,no,190.0,33,B",
    "Gül,2024-06-12,red,no,175.0,51,A",
    "Hal,2024-07-07,blue,yes,168.5,44,",
    "Ina,2024-08-08,NA,yes,171.5,38,B",
    "Jan,2024-09-19,red,no,184.5,27,A",
]


def write(folder, lines, name="t.csv", encoding="utf-8"):
    path = folder / name
    path.write_bytes("\n".join([*lines, ""]).encode(encoding))
    return path


def table_of(data):
    """The rows before they were cut: without the marks of places."""
    n = data.contexts.shape[1]
    return data.contexts[:, :, : data.contexts.shape[2] - n].flatten(1).numpy()


def number(cell):
    return float(cell.replace(",", "."))


def plain(path, summary):
    """What csv and float() make of the columns and lines that a summary says are used."""
    text = path.read_bytes()
    said = summary["file"]
    known = {"UTF-16": "utf-16", "Latin-1": "latin-1"}
    encoding = next((known[word] for word in known if word in said), "utf-8-sig")
    mark = next(mark for word, mark in MARKS.items() if f"between {word}" in said)
    text = io.StringIO(text.decode(encoding), newline="")
    reader, rows, line = csv.reader(text, delimiter=mark, skipinitialspace=True), {}, 1
    for row in reader:
        if any(cell.strip() for cell in row):
            rows[line] = [cell.strip() for cell in row]
        line = reader.line_num + 1
    if "no names in line" in said:
        names = [str(k + 1) for k in range(len(rows[min(rows)]))]
    else:
        names = rows.pop(min(rows))
        if {len(row) for row in rows.values()} == {len(names) + 1} and "separators at" not in said:
            names = ["", *names]
        names = [name or (f"column {k + 1}" if k else "row names") for k, name in enumerate(names)]
    if "without the separators" in said:
        assert not any(row.pop() for row in rows.values() if len(row) > len(names))
    assert {len(row) for row in rows.values()} == {len(names)}
    out = {line for lines in summary.get("lines left out", {}).values() for line in lines}
    rows = {line: row for line, row in rows.items() if line not in out}
    [label] = summary["label"]
    words = summary.get("words, coded as 0 and 1", {})
    numbers = summary.get("numbers", [])
    told = [*numbers, *words, *summary.get("columns left out", {}), label]
    assert sorted(told) == sorted(names), "each column is used, or said to be left out"
    parts = []
    for k, name in enumerate(names):
        column = [row[k] for row in rows.values()]
        if name in numbers and {cell.lower() for cell in column} <= {"true", "false"}:
            parts.append([cell.lower() == "true" for cell in column])
        elif name in numbers:
            comma = "decimal commas" in said
            parts.append([number(cell) if comma else float(cell) for cell in column])
        elif name in words:
            parts += [[cell == word for cell in column] for word in words[name]]
            assert {*column} <= {*words[name]}
    table = np.array(parts, dtype=float).T
    return table, [row[names.index(label)] for row in rows.values()]


def same_as_plain(path, **options):
    return compared(load(path, **options), path)


def compared(data, path):
    table, labels = plain(path, data.summary)
    found = table_of(data)
    assert np.array_equal(found[:, : table.shape[1]], table)
    assert not found[:, table.shape[1] :].any()
    if data.labels.dtype.kind == "f":
        assert data.labels.tolist() == [number(label) for label in labels]
    else:
        assert [*data.labels] == labels, "classes are the texts of their cells"
    return data


def test_an_everyday_table_gets_an_answer_and_its_summary_says_what_became_of_it(tmp_path):
    path = write(tmp_path, EVERY)
    data = same_as_plain(path)
    said = data.summary
    assert said["numbers"] == ["height", "age"]
    coded = {"colour": ["NA", "blue", "red"], "member": ["no", "yes"]}
    assert said["words, coded as 0 and 1"] == coded
    assert said["columns left out"] == dict.fromkeys(["name", "day"], "10 different words")
    gaps = {"with gaps in height, age": [3, 4], "without a label": [9]}
    assert said["lines left out"] == gaps
    assert data.labels.tolist() == [*"ABABABA"]


def test_options_choose_columns_labels_and_gaps(tmp_path):
    path = write(tmp_path, EVERY)
    data = same_as_plain(path, drop_missing="columns")
    assert len(data.labels) == 9
    assert data.summary["columns left out"]["height"] == "no value in 1 of 9 rows"
    data = same_as_plain(path, label="height", columns=["name", "age"])
    assert data.summary["words, coded as 0 and 1"]["name"][:2] == ["Ada", "Dora"]
    assert data.summary["label"] == {"height": "numbers"}
    assert len(data.labels) == 8
    sparse = [f"{i},{i if i % 2 else ''},{i * i},{0.5 * i}" for i in range(8)]
    path = write(tmp_path, ["a,b,c,y", *sparse])
    assert same_as_plain(path).summary["columns left out"] == {"b": "no value in 4 of 8 rows"}
    assert len(same_as_plain(path, drop_missing="rows").labels) == 4
    half = [f"{i},{'' if i < 2 else i},{0.5 * i if i < 4 else ''}" for i in range(8)]
    said = same_as_plain(write(tmp_path, ["a,b,y", *half])).summary
    assert said["columns left out"] == {"b": "no value in 2 of 4 rows"}, "of those with a label"
    just = [f"{i},{i if i % 4 else ''},{i * i},{0.5 * i}" for i in range(8)]  # a quarter goes
    assert len(same_as_plain(write(tmp_path, ["a,b,c,y", *just])).labels) == 6


def test_words_are_coded_up_to_twelve_that_come_twice(tmp_path):
    for count, rows, coded in ((12, 24, True), (13, 26, False), (12, 23, False), (1, 9, False)):
        body = [f"{i},w{i % count},{i / 7:.3f}" for i in range(rows)]
        said = same_as_plain(write(tmp_path, ["a,b,y", *body])).summary
        assert ("b" in said.get("words, coded as 0 and 1", {})) == coded
    path = write(tmp_path, ["a,b,y", *(f"{i},w{i},0.5" for i in range(1001))])
    with pytest.raises(ValueError, match=r"--columns: got 1001 words in 'b'; .* at most 1000"):
        load(path, columns=["b"])


@pytest.mark.parametrize(
    ("width", "tokens", "cut_to"),
    [(1, None, 1), (2, None, 2), (4, None, 2), (5, None, 3), (64, None, 8), (9, 4, 4), (8, 4, 4)],
)
def test_rows_of_any_width_are_cut_and_filled_up_with_zeros(tmp_path, width, tokens, cut_to):
    rows = [[f"{i + k}.5" for k in range(width + 1)] for i in range(3)]
    names = [f"c{k}" for k in range(width + 1)]
    path = write(tmp_path, [",".join(row) for row in (names, *rows)])
    data = same_as_plain(path, tokens=tokens)
    assert data.contexts.shape[1] == cut_to
    fill = -width % cut_to
    assert (f"filled up with zeros: {fill}" in data.summary["tokens"]) == (fill > 0)
    with pytest.raises(ValueError, match=f"--tokens: got {width + 1}; .* at most {width}"):
        load(tmp_path / "t.csv", tokens=width + 1)


REFUSED = {
    "a,b,c,d|1,2,3,4,5|1,7,3,4,5": "5 cells in line 2 and 4 in line 1",
    "a,b,y|1,2,3|4,5": "2 cells in line 3 and 3 in line 1",
    "a,b,a|1,2,3": "'a' as name of columns 1, 3",
    "a,b,y": "names in line 1 and no row",
    "a|1|2": "one column; expected cells between tabs, semicolons",
    'a,b,y|1,"2,3|4,5,6': "line 2: unexpected end of data",
    "country,1990,1991|DE,1,2|FR,3,4": "'1990' beside words in line 1; .*--header .*--no-header",
    "a,b,y|1,2,3|4,5,six": "--label: got 'y', where 'six' in line 3 is no number; .*--label-kind",
    "a,b,y|x1,q,3|x2,r,4": "no column to use; .*--columns.* left out: a .2 different words",
    "a,\0b,y|1,2,3": "a zero byte in line 1 of 't.csv'",
    " | ": "'t.csv', which is empty",
    "a,b,y|,2,1|3,,2": "no column to use; .* or --drop-missing.* a .no value in 1 of 2 rows.*b",
}


@pytest.mark.parametrize("lines", REFUSED)
def test_what_cannot_be_read_is_refused_by_line_column_and_option(tmp_path, lines):
    with pytest.raises(ValueError, match=REFUSED[lines]):
        load(write(tmp_path, lines.split("|")))


def test_the_last_column_with_a_value_holds_the_labels(tmp_path):
    path = write(tmp_path, ["a,b,y", "1,2,", "3,4,NA"])
    assert [*same_as_plain(path).summary["label"]] == ["b"]


WAYS = {  # another way to write it, and what the summary says of it
    "semicolons": ("a;b;y|1,5;2;0,5|2,5;3;1,25", "between semicolons, decimal commas"),
    "tabs": ("a\tb\ty|1.5\t2\t0.5|2.5\t3\t1.25", "between tabs"),
    "spaces": ("a  b y|1.5 2 0.5|2.5 3 1.25", "between spaces"),
    "ends": ("a,b,y|1.5,2,0.5,|2.5,3,1.25,", "without the separators at ends"),
    "no names": ("1.5,2,0.5|2.5,3,1.25", "no names in line 1"),
    "blanks": ("a,b,y||1.5, 2,0.5|,,|2.5,3,1.25", "example 0 in line 3"),
    "quotes": ('"a","b","y"|"1.5","2","0.5"|"2.5","3","1.25"', "2 rows of 3 columns"),
    "one name less": ("a,b,y|u,1.5,2,0.5|v,2.5,3,1.25", "4 columns"),
    "excel": ("sep=;|a;b;y|1.5;2;0.5|2.5;3;1.25", "example 0 in line 3"),
    "no first name": (",a,b,y|0,1.5,2,0.5|1,2.5,3,1.25", "4 columns"),
    "sums": ("a,b,y|+15e-1,2.0,.5|25E-1,3.,1.25", "commas"),
}


@pytest.mark.parametrize("way", WAYS)
def test_one_table_in_many_ways_is_the_same(tmp_path, way):
    lines, said = WAYS[way]
    data = load(write(tmp_path, lines.split("|")))
    assert table_of(data).tolist() == [[1.5, 2.0], [2.5, 3.0]]
    assert data.labels.tolist() == [0.5, 1.25]
    assert said in data.summary["file"]
    if "first" in way or "less" in way:
        assert [*data.summary["columns left out"]] == ["row names"]


ENCODINGS = {"utf-8": "commas,", "utf-8-sig": "commas,", "utf-16": "in UTF-16"}
ENCODINGS |= {"latin-1": "line 8 is not"}


@pytest.mark.parametrize(("encoding", "said"), ENCODINGS.items())
def test_letters_of_any_encoding(tmp_path, encoding, said):
    path = write(tmp_path, EVERY, encoding=encoding)
    assert said in same_as_plain(path).summary["file"]
    names = same_as_plain(path, columns=["name"]).summary["words, coded as 0 and 1"]["name"]
    assert "Gül" in names


def test_columns_of_ids_truths_and_odd_cells(tmp_path):
    body = ["9007199254740993,True,1,1e999,0.0,1", "9007199254740992,FALSE,x,2,-2e-999,2"]
    data = load(write(tmp_path, ["id,ok,odd,far,near,y", *body, "1,true,3,4,0e5,3"]))
    assert data.summary["numbers"] == ["ok"]
    assert table_of(data)[:, 0].tolist() == [1.0, 0.0, 1.0]
    out = data.summary["columns left out"]
    assert out["id"] == "'9007199254740993' in line 2 is no number that float64 holds"
    assert out["odd"] == "no value in 1 of 3 rows, as 'x' in line 3 is no number"
    assert out["far"] == "'1e999' in line 2 is no number that float64 holds"
    assert out["near"] == "'-2e-999' in line 3 is no number that float64 holds"
    big = load(tmp_path / "t.csv", columns=["id"])
    words = ["1", "9007199254740992", "9007199254740993"]
    assert [*big.summary["words, coded as 0 and 1"]["id"]] == words
    ids = load(tmp_path / "t.csv", label="id")
    assert len({*ids.labels}) == 3, "as classes they stay apart"
    with pytest.raises(ValueError, match="--label-kind: got real; expected class, as '900"):
        load(tmp_path / "t.csv", label="id", label_kind="real")
    exact = load(write(tmp_path, ["a,b,y", "9007199254740994,1,2", "9007199254740992,1,2"]))
    assert exact.summary["numbers"] == ["a", "b"]
    either = load(write(tmp_path, ["a;b;y", "1,234;2;3", "5,678;3;4"]))
    assert either.summary["columns left out"]["a"] == "'1,234' in line 2 is no number"


def test_lines_are_counted_as_an_editor_counts_them(tmp_path):
    lines = ['a,"b', 'c",y', "1,2,0.5", "", '3,"4', '",1.5', "5,,2.5", "7,8,"]
    data = same_as_plain(write(tmp_path, lines), drop_missing="rows")
    assert [*data.summary["lines left out"].values()] == [[8], [7]]
    assert "example 0 in line 3" in data.summary["file"]


def test_a_class_may_be_called_NA(tmp_path):
    path = write(tmp_path, ["a,b,y", "1,2,NA", "2,3,DE", "3,4,None", "5,5,null", "6,7,"])
    data = same_as_plain(path)
    assert data.labels.tolist() == ["NA", "DE", "None", "null"]
    assert data.summary["lines left out"] == {"without a label": [6]}
    whole = write(tmp_path, ["a,b,y", "1,2,NA", "2,3,4", "3,4,5"])
    assert load(whole).labels.tolist() == ["4", "5"], "still integers, hence classes"
    assert load(whole, label_kind="real").labels.dtype == np.float64
    decimals = write(tmp_path, ["a,y", "1,0.5", "2,4"])
    assert load(decimals, label_kind="class").labels.tolist() == ["0.5", "4"]


def test_arrays_are_named_and_none_is_used_silently(tmp_path):
    gen = torch.Generator().manual_seed(0)
    arrays = {"E": torch.randn(4, 3, 2, generator=gen), "queries": torch.randn(4, 2, generator=gen)}
    arrays["y"] = torch.arange(4)
    arrays["hot"] = torch.eye(4, dtype=torch.int64)
    np.savez(tmp_path / "a.npz", **{name: value.numpy() for name, value in arrays.items()})
    torch.save(arrays, tmp_path / "a.pt")
    save_file(arrays, tmp_path / "a.safetensors")
    for path in sorted(tmp_path.iterdir()):
        data = load(path, contexts="E")
        assert data.labels is None
        assert "--label takes an array" in data.summary["labels"]
        assert load(path, contexts="E", label="y").labels.dtype.kind == "i"
        assert load(path, contexts="E", label="y", label_kind="real").labels.dtype.kind == "f"
        assert load(path, contexts="E", label="hot").summary["labels"].endswith("(4, 4), numbers")
        for wrong, said in (
            ({"contexts": None}, r"--contexts: got no array 'contexts' .*one of .*E"),
            ({"label": "hot", "label_kind": "class"}, "one-hot rows"),
            ({"mask": "m"}, "--mask: got no array 'm'"),
            ({"label": "y", "label_kind": "words"}, "--label-kind: got 'words'; expected real or"),
        ):
            with pytest.raises(ValueError, match=said):
                load(path, **{"contexts": "E"} | wrong)


def test_a_table_of_npy_is_filled_up_and_its_gaps_are_named(tmp_path):
    table = np.arange(15.0).reshape(3, 5)
    np.save(tmp_path / "t.npy", table.astype(np.float32))
    data = load(tmp_path / "t.npy")
    assert np.array_equal(table_of(data), np.pad(table, ((0, 0), (0, 1))))
    assert data.labels is None
    table[2, 3] = np.nan
    np.save(tmp_path / "t.npy", table)
    with pytest.raises(ValueError, match="table: got no finite number in row 2, column 3"):
        load(tmp_path / "t.npy")
    with pytest.raises(ValueError, match="table: got no finite number in row 2, column 'd'"):
        cut(pd.DataFrame(table, columns=[*"abcde"]), 1)
    for shape in ((3,), (2, 3, 4), (0, 4), (4, 0)):
        np.save(tmp_path / "t.npy", np.ones(shape))
        with pytest.raises(ValueError, match="table: got shape"):
            load(tmp_path / "t.npy")


IGNORED = {  # an option, and one that such a file takes
    ("t.npy", "label"): "--tokens",
    ("t.csv", "contexts"): "--label",
    ("t.csv", "mask"): "--label",
    ("t.npz", "tokens"): "--label",
    ("t.pt", "columns"): "--mask",
    ("t.safetensors", "drop_missing"): "--mask",
}


@pytest.mark.parametrize(("name", "option"), IGNORED)
def test_an_option_that_would_be_ignored_is_refused(tmp_path, name, option):
    (tmp_path / name).touch()
    said = f"--{option.replace('_', '-')}: got .* only .*{IGNORED[name, option]}"
    with pytest.raises(ValueError, match=said):
        load(tmp_path / name, **{option: "a"})


def test_pt_needs_a_torch_that_runs_nothing(tmp_path, monkeypatch):
    torch.save({"contexts": torch.ones(2, 2, 2), "queries": torch.ones(2, 2)}, tmp_path / "a.pt")
    for version, fine in (("2.9.1", False), ("2.10.0+cpu", True), ("3.0", True)):
        monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
        if fine:
            assert load(tmp_path / "a.pt").contexts.shape == (2, 2, 2)
        else:
            with pytest.raises(ValueError, match=r"torch 2\.10 or later, or a \.safetensors"):
                load(tmp_path / "a.pt")


def test_masks_of_both_conventions_are_read_or_refused():
    gen = torch.Generator().manual_seed(0)
    E, e = torch.randn(3, 4, 2, generator=gen), torch.randn(3, 2, generator=gen)
    pad = torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1], [0, 0, 0, 0]]).bool()
    low = torch.finfo(torch.float16).min
    given = [pad, pad.numpy(), pad.tolist(), pd.DataFrame(pad.numpy())]
    given += [torch.where(pad, x, 0.0) for x in (-torch.inf, torch.finfo().min, -1e9, low, -1e4)]
    given += [torch.where(pad, -1e9, 0.0)[:, None, None], pad[:, None, None].numpy()]
    given += [torch.where(pad, -1e9, 0.0).bfloat16()]
    for mask in given:
        assert torch.equal(as_data(E, e, mask=mask).mask, pad)
    attention = (~pad).long()
    wrong = [attention, attention.numpy(), attention.tolist(), attention.float()]
    wrong += [torch.where(pad, -9999.0, 0.0), torch.where(pad, torch.nan, 0)]
    for mask in wrong:
        with pytest.raises(ValueError, match=r"mask: got .* True for padding.* mask == 0"):
            examine(E, e, mask=mask)
    built = memorize(E, e, [1.0, 2.0, 3.0], heads=2, head_dim=2, mask=pad)
    assert np.allclose(built.predict(E, e, attention == 0), [1, 2, 3], atol=1e-5)
    with pytest.raises(ValueError, match="mask == 0"):
        built.predict(E, e, mask=attention)


BIG = 2**53 + 1


@pytest.mark.parametrize(
    "value",
    [
        np.array([[BIG, 0], [BIG - 1, 0]]),
        np.array([[BIG - 1, BIG], [0, 1]]),
        np.array([[BIG, 0], [BIG, 0]], np.uint64),
        np.array([[-BIG, 0.5], [1, 2]], object),
        torch.tensor([[BIG, 0], [BIG - 1, 0]]),
        [[BIG, 0.5], [1, 2]],
        [torch.tensor([-BIG, 0]), torch.tensor([BIG - 1, 0])],
        [np.array([BIG, 0]), np.array([BIG - 1, 0])],
        pd.DataFrame({"id": [BIG, BIG - 1], "x": [0.5, 1.5]}),
        pd.DataFrame({"id": pd.array([BIG, BIG - 1], "Int64"), "x": [0.5, 1.5]}),
    ],
)
def test_integers_that_float64_merges_are_refused(value):
    for call in (lambda: as_data(torch.ones(2, 3, 2), value), lambda: cut(value, 2)):
        with pytest.raises(ValueError, match=f"{BIG if not hasattr(value, 'columns') else 'id'}"):
            call()
    most = [[2**53, 0], [-(2**53), 0]]
    for held in (most, np.array(most), torch.tensor(most)):
        assert as_data(torch.ones(2, 3, 2), held).queries[0, 0] == 2**53


def test_tables_of_several_precisions_keep_theirs():
    """A coarse table does not round the others that stand beside it."""
    fine, coarse = np.full((2, 2), 1 + 1e-9), np.ones((1, 2), np.float32)
    data = as_data([fine, coarse], np.ones((2, 2)))
    assert data.contexts[0, 0, 0] == 1 + 1e-9
    assert data.precision == torch.float32


@pytest.fixture
def call(capsys):
    def run(*words):
        status = command.main(["examine", *map(str, words), "--samples", "5"])
        return status, *capsys.readouterr()

    return run


def test_each_answer_begins_with_what_was_read(tmp_path, call, monkeypatch):
    path = write(tmp_path, EVERY)
    chosen = path, "--columns", 'age, "height"', "--label", "group"
    status, out, _ = call(*chosen, "--details")
    data, layer, after, *report = re.split(r"\n+(?=\S)", out.strip())
    assert status == 0
    words = " ".join(data.split())
    assert words.startswith("data t.csv: 7 examples of 2 tokens, labels: group (classes: 2);")
    left = [f"{name} (not in --columns)" for name in ("name", "day", "colour", "member")]
    assert words.endswith(f"(classes: 2); columns left out: {', '.join(left)}; lines left out: 3")
    assert layer.startswith("layer       heads of width 3: ")
    words = shlex.split(after.removeprefix("next        python -m attnmem_yours memorize"))
    assert words[:3] == [str(path), "--label=group", '--columns=age, "height"']
    assert words[-2:] == ["--out", "weights.safetensors"]
    assert report[0].startswith("file: t.csv: 10 rows of 7 columns between commas, example 0 in li")
    assert report[1] == "label: group (classes: 2)"
    assert report[-1].startswith("weights: ")
    assert call(*chosen)[1] == out[: len(call(*chosen)[1])], (
        "three lines, and the report after them"
    )
    assert command.main(["memorize", *words[:-1], str(tmp_path / "w.safetensors")]) == 0
    call(path, "--heads", "1", "--picture", tmp_path / "found.svg")
    assert "<svg" in (tmp_path / "found.svg").read_text()
    status, out, _ = call(path, "--json", "--labels", "age", "--label-kind", "real")
    assert json.loads(out)["read"]["label"] == {"age": "numbers"}
    np.save(tmp_path / "t.npy", np.arange(6.0).reshape(2, 3))
    assert call(tmp_path / "t.npy")[1].startswith(
        "data        t.npy: 2 examples of 2 tokens, labels: none"
    )
    piped = io.TextIOWrapper(io.BytesIO(b"a,b,y\n1,2,0.5\n2,3,1.5\n"))
    monkeypatch.setattr(sys, "stdin", piped)
    assert "standard input: 2 examples" in call("-")[1]
    (tmp_path / "UP.CSV").write_bytes(path.read_bytes())
    assert call(tmp_path / "UP.CSV")[0] == 0


def answers(out):
    """What the line that `memorize` prints would print, run as it stands."""
    [line], found = [line for line in out.splitlines() if line.startswith("load ")], []
    exec(line.removeprefix("load").strip(), {"print": found.append})
    return found[0]


CELLS = {  # texts of labels that numbers or truths would merge
    "zip": "02110 00501 10001",
    "zeros": "04 4 004",
    "signs": "+1 1 -0 0 -1 \u22121",
    "truths": "TRUE true False",
    "ids": "00000000000000000001 1 12345678901234567890 12345678901234567891",
    "versions": "3.1 3.10 3.2",
    "commas": "1,0 1,00",
    "powers": "1E3 1000.0 1000",
    "words": "01x 1x x",
}


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("end", ["csv", "tsv"])
def test_a_class_is_the_text_of_its_cell(tmp_path, capsys, kind, end):
    texts, mark = CELLS[kind].split(), {"csv": ";", "tsv": "\t"}[end]
    labels = [texts[i % len(texts)] for i in range(12)]
    rows = [mark.join((str(i), str(i * i % 7), label)) for i, label in enumerate(labels)]
    path = write(tmp_path, [mark.join("aby"), *rows], f"t.{end}")
    out = tmp_path / "w.safetensors"
    words = ["memorize", str(path), "--heads", "4", "--out", str(out)]
    decimals = kind in ("versions", "commas", "powers")
    assert command.main(words + ["--label-kind=class"] * decimals) == 0
    said = capsys.readouterr().out
    assert f"classes: {len(texts)}" in " ".join(said.split())
    with safe_open(out, "pt") as file:
        assert json.loads(file.metadata()["classes"]) == sorted(texts)
    assert answers(said).tolist() == labels
    data = load(path, label_kind="class" if decimals else None)
    assert compared(data, path).labels.tolist() == labels
    assert examine(*data[:3], samples=5).labels.startswith(f"{len(texts)} class")
    said = data.summary["label"]["y"]
    assert (" are two" in said) == (kind not in ("zip", "ids", "words"))
    assert kind != "zeros" or "'04' and '4' are two" in said
    if decimals:
        assert load(path).labels.dtype == np.float64, "real labels stay real"
        assert " are one" in load(path).summary["label"]["y"]


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
def test_the_line_that_memorize_prints_gives_the_labels_of_any_file(
    tmp_path, capsys, kind, labels, mask
):
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
        return  # such a file holds none
    else:
        save_file(arrays, path)
    words = [str(path), "--contexts=E", "--label=y", "--head-dim=2"]
    assert command.main(["memorize", *words, "--heads=12", "--out", str(out)]) == 0
    found = answers(capsys.readouterr().out)
    if labels == "real":
        assert np.allclose(found, y, atol=1e-5 * float(y.max()))
    else:
        assert [*found] == [str(int(x)) if labels == "class" else x for x in y]


def test_the_line_of_a_table_has_the_same_options_and_runs_in_a_shell(tmp_path, capsys):
    rows = [f"u{i % 2},{i},'{i * i % 7}',{i % 5},0{i % 3}" for i in range(9)]
    path = write(tmp_path, ["word,a,it's,b,y", *rows], "my t.csv")
    words = [str(path), "--columns=word,a,b", "--tokens=2", "--label=y", "--header"]
    out = str(tmp_path / "w.safetensors")
    assert command.main(["memorize", *words, "--heads=6", "--out", out]) == 0
    line = capsys.readouterr().out.splitlines()[-1].removeprefix("load").strip()
    for option in ("label='y'", "columns=['word', 'a', 'b']", "tokens=2", "header=True"):
        assert option in line
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True)
    assert re.findall(r"'(.*?)'", done.stdout) == [f"0{i % 3}" for i in range(9)]
    status = command.main(["examine", *words, "--samples=5", "--heads=6"])
    after = (
        capsys.readouterr()
        .out.splitlines()[-1]
        .removeprefix("next        python -m attnmem_yours ")
    )
    more = shlex.split(after)
    assert (status, more[-2:]) == (0, ["--out", "weights.safetensors"])
    assert command.main([*more[:-1], f"{out}.2.safetensors"]) == 0
    assert answers(capsys.readouterr().out).tolist() == [f"0{i % 3}" for i in range(9)]


def test_a_suggestion_that_may_not_do_writes_what_is_met(tmp_path, call, capsys):
    same = ["1,2,a", "1,2,b", "3,4,a", "4,4,c"]
    _, out, _ = call(write(tmp_path, ["a,b,y", *same]))
    words = shlex.split(out.splitlines()[-1].removeprefix("next        python -m attnmem_yours "))
    assert words[-1] == "--partial"
    words[-2] = str(tmp_path / "w.safetensors")
    assert command.main(words) == 0
    assert (answers(capsys.readouterr().out) == ["a", "b", "a", "c"]).sum() == 3
    np.save(tmp_path / "t.npy", np.arange(6.0).reshape(3, 2))
    assert "next        labels, without which" in call(tmp_path / "t.npy")[1]


@pytest.mark.parametrize("kind", ["class", "real"])
def test_weights_are_written_that_give_the_labels_back(tmp_path, kind, capsys):
    rng = np.random.default_rng(0)
    rows = [f"{a:.3f},{b:.3f},{c:.3f},{i % 3}" for i, (a, b, c) in enumerate(rng.random((20, 3)))]
    path, out = write(tmp_path, ["a,b,c,y", *rows]), tmp_path / "w.safetensors"
    words = ["memorize", str(path), "--label-kind", kind, "--out", str(out), "--head-dim", "2"]
    if kind == "real":
        assert command.main([*words, "--heads", "1"]) == 1
        said = capsys.readouterr()
        assert said.err.splitlines()[-1].startswith("nothing written, only ")
        assert "so many heads meet almost no real labels of more than" in said.err
        assert not out.exists()
        partial = ["--out", str(tmp_path / "part.safetensors"), "--partial", "--heads", "1"]
        assert command.main([*words, *partial]) == 0
        assert re.search(r"stored      1?\d of 20 labels", capsys.readouterr().out)
    assert command.main([*words, "--heads", "8"]) == 0
    said = capsys.readouterr()
    lines = re.split(r"\n(?=\S)", said.out)
    assert [line[:12].strip() for line in lines] == ["data", "stored", "weights", "load"]
    assert lines[1].startswith("stored      20 of 20 labels, by ")
    weights = MHAWeights(**load_file(out))
    shapes = [f"{name} {tuple(W.shape)}" for name, W in weights._asdict().items()]
    assert all(shape in " ".join(said.out.split()) for shape in shapes)
    found = answers(said.out)
    if kind == "real":
        assert found.tolist() == pytest.approx([i % 3 for i in range(20)], abs=1e-5)
    else:
        assert found.tolist() == [str(i % 3) for i in range(20)]
        outputs = mha(weights, *load(path)[:2])
        assert [*outputs.argmax(1)] == [i % 3 for i in range(20)], "an ordinary layer's weights"
    if kind == "class":
        with safe_open(out, "pt") as file:
            assert json.loads(file.metadata()["classes"]) == ["0", "1", "2"]
    assert command.main([*words, "--heads", "4"]) == 1
    assert "w.safetensors', which exists; expected a new file" in capsys.readouterr().err


@pytest.mark.parametrize("contents", [b"", b"words", None, {}, {"W_Q": torch.ones(1, 2, 1)}])
def test_a_file_of_other_weights_is_refused_by_name(tmp_path, contents):
    path = tmp_path / "w.safetensors"
    if isinstance(contents, bytes):
        path.write_bytes(contents)
    elif contents is not None:
        save_file(contents, path)
    with pytest.raises((ValueError, OSError), match=r"w\.safetensors"):
        predict(path, torch.ones(1, 2, 2), torch.ones(1, 2))


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
def test_what_cannot_be_written_is_refused_before_it_is_computed(
    tmp_path, capsys, monkeypatch, words
):
    path = write(tmp_path, ["a,b,y", "1,2,0.5", "2,3,1.5", "3,3,2.5"])
    for work in ("load", "examine", "memorize"):
        monkeypatch.setattr(command, work, None)  # a call would be an error of another type
    name, *options = words.format(tmp_path).split()
    assert command.main([name, str(path), *options]) == 1
    said = capsys.readouterr()
    assert re.search(NOT_WRITTEN[words], said.err)
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize(
    ("words", "package"),
    [
        ("memorize --heads=2 --out {}/w.safetensors", "safetensors.torch"),
        ("examine --heads=2 --picture {}/x.png", "matplotlib.figure"),
    ],
)
def test_a_missing_package_is_told_before_the_work(tmp_path, capsys, monkeypatch, words, package):
    path = write(tmp_path, ["a,b,y", "1,2,0.5", "2,3,1.5", "3,3,2.5"])
    monkeypatch.setattr(command, "load", None)
    monkeypatch.setitem(sys.modules, package, None)
    name, *options = words.format(tmp_path).split()
    assert command.main([name, str(path), *options]) == 1
    assert capsys.readouterr().err.startswith(f"{package} is missing: pip install ")


def test_a_report_is_not_lost_for_letters_or_a_picture(tmp_path, monkeypatch):
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


ODD = ["inf", "12%", "$3.50", "1\u00a0234.5", "1 234", "12a", "#REF!", "1,234.5"]


@pytest.mark.parametrize("odd", ODD)
def test_one_bad_cell_is_a_gap_and_is_told(tmp_path, call, odd):
    body = [f"{i / 4},{i * i % 7},{i / 3:.2f}" for i in range(9)]
    body[5] = f'"{odd}",4,1.5'
    path = write(tmp_path, ["a,b,y", *body])
    data = same_as_plain(path)
    assert len(data.labels) == 8
    assert data.summary["numbers"] == ["a", "b"]
    assert data.summary["taken as gaps"] == {"a": f"{odd!r} in line 7 is no number"}
    out = " ".join(call(path)[1].split())
    assert f"taken as gaps: a ({odd!r} in line 7 is no number); lines left out: 1 layer" in out


@pytest.mark.parametrize(("bad", "of", "numbers"), [(1, 3, 1), (1, 2, 0), (2, 39, 0), (2, 42, 1)])
def test_few_bad_cells_are_gaps_and_many_are_words(tmp_path, bad, of, numbers):
    body = [f"{'x%' if i < bad else i},{i / 3:.2f}" for i in range(of)]
    column = load(write(tmp_path, ["a,b,y", *(f"{i},{row}" for i, row in enumerate(body))]))
    left = column.summary["columns left out"]
    assert ("b" in column.summary["numbers"]) == (numbers and of > 3)
    assert "'x%' in line 2 is no number" in str(left or column.summary["taken as gaps"])
    assert bad == 1 or numbers == 0 or ", nor are 1 others" in str(column)


def test_a_label_that_is_no_number_is_refused_or_left_out_on_demand(tmp_path):
    path = write(tmp_path, ["a,y", *(f"{i},{i / 2}" for i in range(6)), "7,inf"])
    with pytest.raises(
        ValueError, match=r"'y', where 'inf' in line 8 is no number; .*kind real to"
    ):
        load(path)
    assert len(same_as_plain(path, label_kind="real").labels) == 6
    assert same_as_plain(path, label_kind="class").labels[-1] == "inf"


def test_other_minus_signs_and_leading_zeros_are_read_and_told(tmp_path, call):
    rows = [f"\u2212{i}.5,0{i},{i},{i / 3:.2f}" for i in range(5)]
    path = write(tmp_path, ["a,zip,b,y", *rows])
    data = load(path)
    assert table_of(data)[:, :3].tolist() == [[-i - 0.5, i, i] for i in range(5)]
    assert data.summary["leading zeros dropped"] == ["zip"]
    assert "; leading zeros dropped: zip" in " ".join(call(path)[1].split())


def test_the_three_lines_name_each_column_that_is_left_out_and_why(tmp_path, call):
    names = [f"column number {k}" for k in range(40)]
    rows = [[f"{k},{i}".replace(",", "-") for k in range(40)] for i in range(9)]
    lines = [",".join([*row, str(i), str(i), f"{i / 3:.2f}"]) for i, row in enumerate(rows)]
    out = call(write(tmp_path, [",".join([*names, "odd", "a", "y"]), *lines]))[1]
    brief = " ".join(out.partition("layer")[0].split())
    why = "(9 different words)"
    assert f"left out: column number 0 {why}, column number 1 {why}, column number 2 {why}" in brief
    assert f"{why} and 34 more" in brief
    assert len(brief) < 400


def test_a_hundred_thousand_columns_take_seconds(tmp_path):
    """Numbers and words: were each name held against all others, this would take minutes."""
    names = [f"g{k}" for k in range(100_000)]
    lines = [",".join([*names, "y"])]
    lines += [",".join([f"{i}.5", f"w{i % 2}"] * 50_000 + [str(i)]) for i in range(4)]
    path = write(tmp_path, lines)
    for data in (load(path), load(path, columns=names)):
        assert (
            len(data.summary["numbers"]) == 50_000 == len(data.summary["words, coded as 0 and 1"])
        )
        assert len(str(data)) < 5000


REFUSALS = {  # files of people, by name, and what is true of them
    "numpy.pt": "with arrays or numbers of numpy; expected tensors .torch.as_tensor., or a .npz",
    "scalar.pt": "with arrays or numbers of numpy",
    "words.pt": "--queries: got list; expected numbers of one shape|queries: got",
    "text.pt": "--queries: got 'queries' in 'text.pt', a str; expected an array",
    "meta.pt": "'meta.pt', with a tensor that cannot be read",
    "quantized.pt": "queries: got dtype torch.quint8; expected real numbers",
    "quantized labels.pt": "with a tensor that cannot be read",
    "complex.pt": "contexts: got dtype torch.complex64; expected real numbers",
    "scalars.pt": r"queries: got shape \(\)",
    "ragged.pt": "queries: got list; expected numbers of one shape",
    "mixed.pt": "labels: got words beside others",
    "nan.pt": "--label-kind|labels: got NaN",
    "objects.npz": "with an array of Python objects; expected arrays of numbers, and of words",
    "xy.npz": r"--contexts: got no array 'contexts' .*one of X, y; a table .* cut\(X, tokens\)",
    "comment.csv": "'1 cells|cells in line .*no comments .#. above the table",
    "many.npz": "--contexts: got no array .* and 9[0-9] more",
    "long.csv": "2 cells in line 2 and 1 in line 1|cells in line",
    "twice.csv": "as name of columns 1, 2",
    "none.csv": "no column to use",
}


def refusable(folder):
    """Each file of ``REFUSALS``."""
    E, e, y = torch.randn(3, 2, 2), torch.randn(3, 2), torch.ones(3)
    fine = {"contexts": E, "queries": e, "labels": y}
    packed = torch.quantize_per_tensor(e, 0.1, 10, torch.quint8)
    changed = {
        "numpy": {"contexts": E.numpy()},
        "scalar": {"rate": np.float64(0.1)},
        "words": {"queries": [*"abc"]},
        "text": {"queries": "x"},
        "meta": {"queries": e.to("meta")},
        "quantized": {"queries": packed},
        "quantized labels": {"labels": packed[:, 0]},
        "complex": {"contexts": E.to(torch.complex64)},
        "scalars": {"queries": torch.tensor(3.0)},
        "ragged": {"queries": [[1.0], [2.0, 3.0], [1.0]]},
        "mixed": {"labels": ["a", 1, "b"]},
        "nan": {"labels": torch.tensor([1.0, torch.nan, 2.0])},
    }
    for name, change in changed.items():
        torch.save(fine | change, folder / f"{name}.pt")
    np.savez(folder / "objects.npz", contexts=np.array([{}], dtype=object))
    np.savez(folder / "xy.npz", X=e.numpy(), y=y.numpy())
    np.savez(folder / "many.npz", **{f"{'long name ' * 9}{k}": y.numpy() for k in range(99)})
    write(folder, ["# made by x", "# on a day", "a,b,y", "1,2,3", "4,5,6"], "comment.csv")
    write(folder, ["a" * 9999, "1,2", "3,4"], "long.csv")
    write(folder, [f"{'a' * 9999},{'a' * 9999},y", "1,2,3"], "twice.csv")
    names = [f"{'words ' * 99}{k}" for k in range(99)]
    write(
        folder, [",".join([*names, "y"]), *[",".join([f"w{i}"] * 99 + [f"{i}"]) for i in range(3)]]
    )
    (folder / "t.csv").rename(folder / "none.csv")


@pytest.mark.parametrize("verb", ["examine", "memorize"])
def test_refusals_are_true_of_the_file_short_and_no_traceback(tmp_path, capsys, verb):
    refusable(tmp_path)
    options = {
        "examine": ["--samples=5"],
        "memorize": ["--heads=2", f"--out={tmp_path}/w.safetensors"],
    }
    for name, said in REFUSALS.items():
        assert command.main([verb, str(tmp_path / name), *options[verb]]) == 1, name
        error = capsys.readouterr().err.splitlines()[-1]
        assert re.search(said, error), (name, error)
        assert len(error) <= 400, name


def test_tensors_of_every_kind_are_read_or_refused_in_a_line(tmp_path, capsys):
    """Each way to hold numbers in each place, of each type."""
    plain = {"contexts": torch.rand(3, 2, 2), "queries": torch.rand(3, 2), "labels": torch.ones(3)}
    plain["mask"] = torch.tensor([[False, True]] * 3)
    ways = {
        "sparse": lambda x: x.to_sparse(),
        "csr": lambda x: x.flatten(0, -2).to_sparse_csr() if x.ndim > 1 else x.to_sparse(),
        "meta": lambda x: x.to("meta"),
        "quantized": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
        "complex": lambda x: x.to(torch.complex64),
        "bool": lambda x: x.bool(),
        "int": lambda x: x.int(),
        "float8": lambda x: x.to(torch.float8_e5m2),
        "parameter": lambda x: torch.nn.Parameter(x.float()),
        "none": lambda x: None,
        "list": lambda x: x.tolist(),
        "tensors": lambda x: [*x],
        "nested": lambda x: torch.nested.nested_tensor([*x.float()]),
        "jagged": lambda x: torch.nested.nested_tensor([*x.float()], layout=torch.jagged),
        "scalar": lambda x: torch.tensor(1.5),
        "empty": lambda x: x[:0],
        "number": lambda x: 3,
        "dictionary": lambda x: {"a": x},
        "conjugate": lambda x: torch.complex(x.float(), x.float()).conj().imag,
        "expanded": lambda x: x[:1].expand_as(x),
        "words": lambda x: [["a"]] * len(x),
        "bytes": lambda x: [b"a"] * len(x),
    }
    read = set()
    for way, role in itertools.product(ways, plain):
        try:
            torch.save(plain | {role: ways[way](plain[role])}, tmp_path / "f.pt")
        except (RuntimeError, NotImplementedError):
            continue  # torch has no such tensor, or cannot save it
        out = tmp_path / "w.safetensors"
        words = [str(tmp_path / "f.pt"), "--heads=2", "--partial", f"--out={out}"]
        status = command.main(["memorize", *words])
        said = capsys.readouterr()
        if status:
            assert len(said.err.splitlines()[-1]) <= 400
            assert "Internal" not in said.err
        else:
            assert answers(said.out).shape[0] == 3
            read.add((way, role))
            out.unlink()
    assert {("nested", "contexts"), ("tensors", "queries"), ("sparse", "labels")} <= read


NO_FILES = {
    "http://example.org/a.csv": "file: got 'http://example.org/a.csv'; expected .*download",
    "": "a folder; expected a file",
    "none.csv": "not there",
    "t.xlsx": r"expected a name that ends in \.csv, \.tsv",
    "t.csv.gz": r"expected a name that ends in \.csv, \.tsv",
}


@pytest.mark.parametrize(("name", "said"), NO_FILES.items())
def test_a_place_that_is_no_file_is_refused(tmp_path, call, name, said):
    for there in ("t.xlsx", "t.csv.gz"):
        (tmp_path / there).touch()
    status, out, error = call(name if "://" in name else tmp_path / name)
    assert (status, out) == (1, "")
    assert re.search(said, error.splitlines()[-1])


NAMED = ("line ", "column", "--", "shape", "'f.", "labels", "contexts", "queries", "mask")


def mutated(rng):
    """A clean table, then a few things that people and programs do to tables."""
    rows = [["a", "b", "kind", "ok", "y"]]
    for i in range(rng.choice([1, 2, 9])):
        number = f"{rng.uniform(-5, 5):.{rng.choice([0, 1, 3])}f}"
        rows.append([number, str(rng.randrange(9)), "uvw"[i % 3], "True", str(i / 4)])
    mark = rng.choice([",", ",", ";", "\t", "|", " "])
    cells = 'NA abc 1,5 1.5 9007199254740993 1e999 1e-999 " inf - ß 1,234 0x1 1_0 ٣ =1 None'
    cells = ["", "x y", "\u2028", mark, *cells.split()]
    encoding = "utf-8"
    for _ in range(rng.randrange(4)):
        row = rng.choice([row for row in rows if row])
        do = rng.randrange(14)
        if do < 5:
            row[rng.randrange(len(row))] = rng.choice(cells)
        elif do == 5:
            head = [] if rng.random() < 0.5 else rows[:1]
            rows = [*head, *([*each, ""] for each in rows[1:])]
        elif do == 6:
            row.append(rng.choice(cells))
        elif do == 7:
            row.pop()
        elif do == 8:
            del rows[0]
        elif do == 9:
            rows.insert(rng.randrange(len(rows) + 1), rng.choice([[], [""] * 5, ["title"]]))
        elif do == 10:
            rows = [rows[0], *([f"r{i}", *row] for i, row in enumerate(rows[1:]))] if rows else rows
        elif do == 11:
            encoding = rng.choice(["utf-8-sig", "utf-16", "utf-16-le", "utf-32", "latin-1"])
        elif do == 12:
            k = rng.randrange(4)
            for each in rows:
                if len(each) > k:
                    each[k] = each[k].replace(".", ",")
        else:
            rows = [[f'"{cell}"' for cell in row] for row in rows]
        if not any(rows):
            break
    text = rng.choice(["\n", "\r\n", "\r"]).join(mark.join(row) for row in rows)
    raw = text.encode(encoding, "replace")
    if rng.random() < 0.15 and raw:
        k = rng.randrange(len(raw))
        raw = rng.choice([raw[:k], raw[:k] + bytes([rng.randrange(256)]) + raw[k + 1 :]])
    return raw


def attempt(path, **options):
    """What load and read make of a file, and the refusal; no other error passes."""
    try:
        data = load(path, **options)
        as_data(*data[:3], mask=data.mask)
    except ValueError as error:
        return None, str(error)
    return data, ""


def test_hostile_tables_are_read_as_they_stand_or_refused_by_name(tmp_path):
    rng, path, answers = random.Random(0), tmp_path / "f.csv", 0
    for turn in range(300):
        raw = mutated(rng)
        path.write_bytes(raw)
        options = rng.choice([{}, {}, {"drop_missing": "rows"}, {"header": True}, {"tokens": 2}])
        data, refusal = attempt(path, **options)
        if data:
            compared(data, path)
        else:
            assert any(word in refusal for word in NAMED), (turn, raw, refusal)
        answers += bool(data)
    assert 60 < answers < 280


def test_hostile_arrays_are_refused_by_name(tmp_path, call):
    arrays = {"contexts": torch.randn(3, 2, 2), "queries": torch.randn(3, 2)}
    arrays["labels"] = torch.ones(3)
    numpys = {name: value.numpy() for name, value in arrays.items()}
    torch.save(arrays, tmp_path / "f.pt")
    save_file(arrays, tmp_path / "f.safetensors")
    np.savez(tmp_path / "f.npz", **numpys)
    np.save(tmp_path / "f.npy", numpys["queries"])
    rng = random.Random(1)
    for path in sorted(tmp_path.iterdir()):
        clean = path.read_bytes()
        for _ in range(60):
            raw = bytearray(clean)
            for _ in range(rng.choice([1, 3])):
                k = rng.randrange(min(len(raw), rng.choice([80, 10_000])))
                raw[k] = rng.choice([0, 10, 255, rng.randrange(256)])
            path.write_bytes(raw[: rng.choice([len(raw), rng.randrange(len(raw))])])
            _, refusal = attempt(path)
            assert not refusal or any(word in refusal for word in NAMED), refusal
            assert not any(word in refusal for word in ("pickle", "unsafe", "weights_only"))
    odd = [[torch.ones(2)], torch.ones(3), {"contexts": [1, 2], "queries": "x"}, "words", {3: 4}]
    for value in (*odd, torch.nn.Linear(2, 2)):
        torch.save(value, tmp_path / "f.pt")
        status, out, error = call(tmp_path / "f.pt")
        assert (status, out) == (1, "")
        assert "f.pt" in error.splitlines()[-1]
    np.save(tmp_path / "f.npy", np.array([{}, 3], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "f.npz", contexts=np.array([{}], dtype=object))
    (tmp_path / "f.safetensors").write_bytes(b"\xff" * 8 + b"{}")
    (tmp_path / "g.npz").write_bytes(b"words")
    for path in ("f.pt", "f.npy", "f.npz", "f.safetensors", "g.npz"):
        status, out, error = call(tmp_path / path)
        assert (status, out) == (1, "")
        assert f"file: got '{path}', " in error
        advice = ("unsafe", "allow_pickle", "weights_only", "Traceback")
        assert not any(word in error for word in advice)
