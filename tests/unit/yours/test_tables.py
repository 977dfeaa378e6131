"""Tables of text: each is read as a plain reader reads it, or refused by name; nothing else."""

import csv
import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmem_yours.data import as_data
from attnmem_yours.files import load
from attnmem_yours.tables import shortened

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


def write(folder, lines, encoding="utf-8"):
    path = folder / "t.csv"
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


def test_summary_everyday_table(tmp_path):
    summary = same_as_plain(write(tmp_path, EVERY)).summary
    assert summary["numbers"] == ["height", "age"]
    coded = {"colour": ["NA", "blue", "red"], "member": ["no", "yes"]}
    assert summary["words, coded as 0 and 1"] == coded
    assert summary["columns left out"] == dict.fromkeys(["name", "day"], "10 different words")
    gaps = {"with gaps in height, age": [3, 4], "without a label": [9]}
    assert summary["lines left out"] == gaps
    assert load(tmp_path / "t.csv").labels.tolist() == [*"ABABABA"]


def test_columns_chosen_and_gaps(tmp_path):
    path = write(tmp_path, EVERY)
    data = same_as_plain(path, drop_missing="columns")
    assert len(data.labels) == 9
    assert data.summary["columns left out"]["height"] == "no value in 1 of 9 rows"
    data = same_as_plain(path, label="height", columns=["name", "age"])
    assert data.summary["words, coded as 0 and 1"]["name"][:2] == ["Ada", "Dora"]
    assert data.summary["label"] == {"height": "numbers"}
    assert len(data.labels) == 8


SPARSE = {  # cells of column b by row, what becomes of it, and how many rows are left
    "half": (lambda i: i if i % 2 else "", 0.5, "no value in 4 of 8 rows", 8),
    "a quarter": (lambda i: i if i % 4 else "", 0.5, None, 6),
    "a quarter of all, half of labels": (
        lambda i: "" if i < 2 else i,
        lambda i: i / 2 if i < 4 else "",
        "no value in 2 of 4 rows",
        4,
    ),
}


@pytest.mark.parametrize("case", SPARSE)
def test_column_with_gaps_goes_above_a_quarter(tmp_path, case):
    b, y, reason, left = SPARSE[case]
    label = y if callable(y) else lambda i: y * i
    path = write(tmp_path, ["a,b,c,y", *(f"{i},{b(i)},{i * i},{label(i)}" for i in range(8))])
    data = same_as_plain(path)
    assert data.summary["columns left out"].get("b") == reason
    assert len(data.labels) == left
    by_rows = same_as_plain(path, drop_missing="rows")
    assert "b" in by_rows.summary["numbers"]


@pytest.mark.parametrize(
    ("count", "rows", "coded"), [(12, 24, True), (13, 26, False), (12, 23, False), (1, 9, False)]
)
def test_words_coded_up_to_twelve_twice(tmp_path, count, rows, coded):
    body = [f"{i},w{i % count},{i / 7:.3f}" for i in range(rows)]
    summary = same_as_plain(write(tmp_path, ["a,b,y", *body])).summary
    assert ("b" in summary["words, coded as 0 and 1"]) == coded


def test_words_asked_for_at_most_a_thousand(tmp_path):
    path = write(tmp_path, ["a,b,y", *(f"{i},w{i % 1000},0.5" for i in range(1001))])
    assert len(load(path, columns=["b"]).summary["words, coded as 0 and 1"]["b"]) == 1000
    path = write(tmp_path, ["a,b,y", *(f"{i},w{i},0.5" for i in range(1001))])
    with pytest.raises(ValueError, match=r"^--columns: got 1001 words in 'b'"):
        load(path, columns=["b"])


@pytest.mark.parametrize(
    ("width", "tokens", "cut_to"),
    [(1, None, 1), (2, None, 2), (4, None, 2), (5, None, 3), (64, None, 8), (9, 4, 4), (8, 4, 4)],
)
def test_rows_cut_and_filled_with_zeros(tmp_path, width, tokens, cut_to):
    rows = [[f"{i + k}.5" for k in range(width + 1)] for i in range(3)]
    names = [f"c{k}" for k in range(width + 1)]
    path = write(tmp_path, [",".join(row) for row in (names, *rows)])
    data = same_as_plain(path, tokens=tokens)
    assert data.contexts.shape[1] == cut_to
    fill = -width % cut_to
    assert (f"filled up with zeros: {fill}" in data.summary["tokens"]) == (fill > 0)
    with pytest.raises(ValueError, match=f"^--tokens: got {width + 1}; .* at most {width}"):
        load(path, tokens=width + 1)


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
    ",,,|,,": "empty cells alone",
    '""|""': "empty cells alone",
    "a,b,y|,2,1|3,,2": "no column to use; .* or --drop-missing.* a .no value in 1 of 2 rows.*b",
}


@pytest.mark.parametrize("lines", REFUSED)
def test_unreadable_table_is_refused(tmp_path, lines):
    with pytest.raises(ValueError, match=REFUSED[lines]):
        load(write(tmp_path, lines.split("|")))


def test_label_is_last_column_with_a_value(tmp_path):
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
def test_one_table_in_many_ways(tmp_path, way):
    lines, description = WAYS[way]
    data = load(write(tmp_path, lines.split("|")))
    assert table_of(data).tolist() == [[1.5, 2.0], [2.5, 3.0]]
    assert data.labels.tolist() == [0.5, 1.25]
    assert description in data.summary["file"]
    if way in ("no first name", "one name less"):
        assert [*data.summary["columns left out"]] == ["row names"]


ENCODINGS = {"utf-8": "commas,", "utf-8-sig": "commas,", "utf-16": "in UTF-16"}
ENCODINGS |= {"latin-1": "line 8 is not"}


@pytest.mark.parametrize(("encoding", "description"), ENCODINGS.items())
def test_letters_of_any_encoding(tmp_path, encoding, description):
    path = write(tmp_path, EVERY, encoding=encoding)
    assert description in same_as_plain(path).summary["file"]
    names = same_as_plain(path, columns=["name"]).summary["words, coded as 0 and 1"]["name"]
    assert "Gül" in names


ODD_COLUMNS = {  # by column: why it is left out
    "id": "'9007199254740993' in line 2 is no number that float64 holds",
    "odd": "no value in 1 of 3 rows, as 'x' in line 3 is no number",
    "far": "'1e999' in line 2 is no number that float64 holds",
    "near": "'-2e-999' in line 3 is no number that float64 holds",
}


def test_columns_of_ids_truths_and_odd_cells(tmp_path):
    body = ["9007199254740993,True,1,1e999,0.0,1", "9007199254740992,FALSE,x,2,-2e-999,2"]
    path = write(tmp_path, ["id,ok,odd,far,near,y", *body, "1,true,3,4,0e5,3"])
    data = load(path)
    assert data.summary["numbers"] == ["ok"]
    assert table_of(data)[:, 0].tolist() == [1.0, 0.0, 1.0]
    assert data.summary["columns left out"] == ODD_COLUMNS
    words = load(path, columns=["id"]).summary["words, coded as 0 and 1"]["id"]
    assert words == ["1", "9007199254740992", "9007199254740993"]
    assert len({*load(path, label="id").labels}) == 3, "as classes they stay apart"
    with pytest.raises(ValueError, match=r"^--label-kind: got real; expected class, as '900"):
        load(path, label="id", label_kind="real")


def test_integers_that_float64_holds(tmp_path):
    path = write(tmp_path, ["a,b,y", "9007199254740994,1e30,2", "9007199254740992,1e30,2"])
    assert load(path).summary["numbers"] == ["a", "b"], "a power is rounded, as it is measured"


def test_thousands_or_decimal_commas_are_no_number(tmp_path):
    path = write(tmp_path, ["a;b;y", "1,234;2;3", "5,678;3;4"])
    assert load(path).summary["columns left out"] == {"a": "'1,234' in line 2 is no number"}


def test_lines_are_those_of_an_editor(tmp_path):
    lines = ['a,"b', 'c",y', "1,2,0.5", "", '3,"4', '",1.5', "5,,2.5", "7,8,"]
    data = same_as_plain(write(tmp_path, lines), drop_missing="rows")
    assert [*data.summary["lines left out"].values()] == [[8], [7]]
    assert "example 0 in line 3" in data.summary["file"]


def test_class_may_be_called_na(tmp_path):
    path = write(tmp_path, ["a,b,y", "1,2,NA", "2,3,DE", "3,4,None", "5,5,null", "6,7,"])
    data = same_as_plain(path)
    assert data.labels.tolist() == ["NA", "DE", "None", "null"]
    assert data.summary["lines left out"] == {"without a label": [6]}


def test_label_kind_of_integers_and_decimals(tmp_path):
    integers = write(tmp_path, ["a,b,y", "1,2,NA", "2,3,4", "3,4,5"])
    assert load(integers).labels.tolist() == ["4", "5"], "still integers, hence classes"
    assert load(integers, label_kind="real").labels.dtype == np.float64
    decimals = write(tmp_path, ["a,y", "1,0.5", "2,4"])
    assert load(decimals, label_kind="class").labels.tolist() == ["0.5", "4"]


TWINS = {  # texts of labels that numbers or truths would merge, and the first two that are one
    "02110 00501 10001": None,
    "04 4 004": "'04' and '4'",
    "+1 1 -0 0 -1 \u22121": "'+1' and '1'",
    "TRUE true False": "'TRUE' and 'true'",
    "00000000000000000001 1 12345678901234567890 12345678901234567891": None,
    "3.1 3.10 3.2": "'3.1' and '3.10'",
    "1,0 1,00": "'1,0' and '1,00'",
    "1E3 1000.0 1000": "'1E3' and '1000.0'",
    "01x 1x x": None,
}


@pytest.mark.parametrize("texts", TWINS)
def test_class_is_the_text_of_its_cell(tmp_path, texts):
    labels = 4 * texts.split()
    rows = [f"{i};{i * i % 7};{label}" for i, label in enumerate(labels)]
    path = write(tmp_path, ["a;b;y", *rows])
    decimals = any(mark in texts for mark in (".", ","))
    data = same_as_plain(path, label_kind="class" if decimals else None)
    assert data.labels.tolist() == labels
    about = data.summary["label"]["y"]
    assert f"classes: {len({*labels})}" in about
    assert (f"{TWINS[texts]} are two" in about) == (TWINS[texts] is not None)
    if decimals:
        assert load(path).labels.dtype == np.float64, "real labels stay real"
        assert f"{TWINS[texts]} are one" in load(path).summary["label"]["y"]


ODD = ["inf", "12%", "$3.50", "1\u00a0234.5", "1 234", "12a", "#REF!", "1,234.5"]


@pytest.mark.parametrize("odd", ODD)
def test_one_odd_cell_is_a_gap(tmp_path, odd):
    body = [f"{i / 4},{i * i % 7},{i / 3:.2f}" for i in range(9)]
    body[5] = f'"{odd}",4,1.5'
    data = same_as_plain(write(tmp_path, ["a,b,y", *body]))
    assert len(data.labels) == 8
    assert data.summary["numbers"] == ["a", "b"]
    assert data.summary["taken as gaps"] == {"a": f"{odd!r} in line 7 is no number"}
    brief = f"taken as gaps: a ({odd!r} in line 7 is no number); lines left out: 1"
    assert data.brief.endswith(brief)


NO_NUMBER = "'x%' in line 2 is no number"
FEW_OR_MANY = [  # cells that are no numbers, of so many, and what is said of their column
    (1, 2, NO_NUMBER),
    (1, 3, f"no value in 1 of 3 rows, as {NO_NUMBER}"),
    (2, 39, NO_NUMBER),
    (2, 42, f"{NO_NUMBER}, nor are 1 others"),
]


@pytest.mark.parametrize(("odd", "rows", "reason"), FEW_OR_MANY)
def test_few_odd_cells_are_gaps_many_words(tmp_path, odd, rows, reason):
    body = [f"{i},{'x%' if i < odd else i},{i / 3:.2f}" for i in range(rows)]
    summary = load(write(tmp_path, ["a,b,y", *body])).summary
    assert ("b" in summary["numbers"]) == (rows == 42)
    assert (summary["columns left out"] | summary["taken as gaps"])["b"] == reason


def test_odd_label_is_refused_or_left_out(tmp_path):
    path = write(tmp_path, ["a,y", *(f"{i},{i / 2}" for i in range(6)), "7,inf"])
    with pytest.raises(ValueError, match=r"^--label: got 'y', where 'inf' in line 8"):
        load(path)
    assert len(same_as_plain(path, label_kind="real").labels) == 6
    assert same_as_plain(path, label_kind="class").labels[-1] == "inf"


def test_minus_signs_and_leading_zeros(tmp_path):
    rows = [f"\u2212{i}.5,0{i},{i},{i / 3:.2f}" for i in range(5)]
    data = load(write(tmp_path, ["a,zip,b,y", *rows]))
    assert table_of(data)[:, :3].tolist() == [[-i - 0.5, i, i] for i in range(5)]
    assert data.summary["leading zeros dropped"] == ["zip"]
    assert data.brief.endswith("; leading zeros dropped: zip")


def test_brief_names_columns_that_are_left_out(tmp_path):
    names = [f"column number {k}" for k in range(40)]
    rows = [[f"{k}-{i}" for k in range(40)] for i in range(9)]
    lines = [",".join([*row, str(i), str(i), f"{i / 3:.2f}"]) for i, row in enumerate(rows)]
    brief = load(write(tmp_path, [",".join([*names, "odd", "a", "y"]), *lines])).brief
    reason = "(9 different words)"
    shown = ", ".join(f"column number {k} {reason}" for k in range(3))
    assert f"left out: {shown}" in brief
    assert f"{reason} and 34 more" in brief
    assert len(brief) < 400


def test_a_hundred_thousand_columns_take_seconds(tmp_path):
    """Numbers and words: were each name held against all others, this would take minutes."""
    names = [f"g{k}" for k in range(100_000)]
    lines = [",".join([*names, "y"])]
    lines += [",".join([f"{i}.5", f"w{i % 2}"] * 50_000 + [str(i)]) for i in range(4)]
    path = write(tmp_path, lines)
    for data in (load(path), load(path, columns=names)):
        assert len(data.summary["numbers"]) == 50_000
        assert len(data.summary["words, coded as 0 and 1"]) == 50_000
        assert len(str(data)) < 5000


# --- what people and programs do to tables --------------------------------------------------------

CELLS = 'NA abc 1,5 1.5 9007199254740993 1e999 1e-999 " inf - ß 1,234 0x1 1_0 ٣ =1 None'
NAMED = ("line ", "column", "--", "empty", "'f.csv'")


def change_cell(draw, rows):
    row = draw(st.sampled_from(rows))
    if row:
        row[draw(st.integers(0, len(row) - 1))] = draw(cells)


def change_length(draw, rows):
    row = draw(st.sampled_from(rows))
    if row and draw(st.booleans()):
        row.pop()
    else:
        row.append(draw(cells))


def end_with_separators(draw, rows):
    for row in rows[draw(st.integers(0, 1)) :]:
        row.append("")


def drop_first(draw, rows):
    if len(rows) > 1:
        del rows[0]


def insert_line(draw, rows):
    line = draw(st.sampled_from([[], [""] * 5, ["title"]]))
    rows.insert(draw(st.integers(0, len(rows))), [*line])


def name_rows(draw, rows):
    for i, row in enumerate(rows[1:]):
        row.insert(0, f"r{i}")


def write_decimal_commas(draw, rows):
    k = draw(st.integers(0, 3))
    for row in rows:
        if len(row) > k:
            row[k] = row[k].replace(".", ",")


def quote(draw, rows):
    for row in rows:
        row[:] = [f'"{cell}"' for cell in row]


cells = st.sampled_from(["", "x y", "\u2028", *",;\t|", *CELLS.split()])
CHANGES = [change_cell] * 3 + [change_length, end_with_separators, drop_first, insert_line]
CHANGES += [name_rows, write_decimal_commas, quote]
OPTIONS = [{}, {}, {"drop_missing": "rows"}, {"header": True}, {"tokens": 2}]


@st.composite
def tables(draw, most_changes=3):
    """A clean table, then a few things that people and programs do to tables, as bytes."""
    rows, digits = [["a", "b", "kind", "ok", "y"]], draw(st.sampled_from([0, 1, 3]))
    for i in range(draw(st.sampled_from([1, 2, 9]))):
        number = draw(st.integers(-5000, 5000)) / 1000
        count = draw(st.integers(0, 8))
        rows.append([f"{number:.{digits}f}", str(count), "uvw"[i % 3], "True", str(i / 4)])
    for change in draw(st.lists(st.sampled_from(CHANGES), max_size=most_changes)):
        change(draw, rows)
    separator = draw(st.sampled_from([*",,;\t| "]))
    end = draw(st.sampled_from(["\n", "\r\n", "\r"]))
    text = end.join(separator.join(row) for row in rows)
    if not most_changes:
        return text.encode()
    others = ["utf-8-sig", "utf-16", "utf-16-le", "utf-32", "latin-1"]
    raw = text.encode(draw(st.sampled_from(["utf-8"] * 9 + others)), "replace")
    if raw and draw(st.integers(0, 6)) == 6:
        k, byte = draw(st.integers(0, len(raw) - 1)), draw(st.binary(max_size=1))
        raw = raw[:k] + byte + raw[k + 1 :]
    return raw


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("tables") / "f.csv"


def attempt(path, options):
    """What load reads, or the refusal; no other error passes."""
    try:
        data = load(path, **options)
        as_data(*data[:3], mask=data.mask)
    except ValueError as error:
        return None, str(error)
    return data, ""


@given(raw=tables(), options=st.sampled_from(OPTIONS))
@settings(max_examples=300)
def test_hostile_table_is_read_or_refused(path, raw, options):
    path.write_bytes(raw)
    data, refusal = attempt(path, options)
    if data:
        compared(data, path)
    else:
        assert any(word in refusal for word in NAMED), refusal


@given(raw=tables(most_changes=0))
def test_clean_table_is_read(path, raw):
    path.write_bytes(raw)
    summary = same_as_plain(path).summary
    assert summary["numbers"] == ["a", "b", "ok"]
    assert summary["label"].keys() == {"y"}


@pytest.mark.parametrize(("length", "shown"), [(40, 40), (41, 40), (10**6, 40)])
def test_a_cell_in_a_message_is_short(length, shown):
    assert len(shortened("x" * length)) == shown + 2  # with its quotes
