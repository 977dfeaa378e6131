"""Files of arrays and of tables: each is read, or refused by name; nothing in them is run."""

import re

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from attnmem_yours import __main__ as command
from attnmem_yours import examine, memorize, predict
from attnmem_yours.data import as_data, cut
from attnmem_yours.files import load


@pytest.fixture(scope="module")
def arrays(tmp_path_factory):
    """The same arrays in files of three kinds."""
    gen = torch.Generator().manual_seed(0)
    tensors = {"E": torch.randn(4, 3, 2, generator=gen), "y": torch.arange(4)}
    tensors |= {"queries": torch.randn(4, 2, generator=gen), "hot": torch.eye(4).long()}
    folder = tmp_path_factory.mktemp("arrays")
    np.savez(folder / "a.npz", **{name: value.numpy() for name, value in tensors.items()})
    torch.save(tensors, folder / "a.pt")
    save_file(tensors, folder / "a.safetensors")
    return folder


ENDINGS = ["npz", "pt", "safetensors"]


@pytest.mark.parametrize("ending", ENDINGS)
def test_arrays_by_name(arrays, ending):
    path = arrays / f"a.{ending}"
    data = load(path, contexts="E")
    assert data.labels is None
    assert data.summary["labels"] == "none (--label takes an array as labels)"
    assert data.summary["contexts"] == "E, of shape (4, 3, 2)"
    assert load(path, contexts="E", label="y").labels.dtype.kind == "i"
    assert load(path, contexts="E", label="y", label_kind="real").labels.dtype.kind == "f"
    hot = load(path, contexts="E", label="hot").summary["labels"]
    assert hot == "hot, of shape (4, 4), numbers"


WRONG_NAMES = [
    ({"contexts": None}, r"^--contexts: got no array 'contexts' .*one of .*E"),
    ({"label": "hot", "label_kind": "class"}, r"^--label-kind: got class; .* one-hot rows"),
    ({"mask": "m"}, r"^--mask: got no array 'm'"),
    ({"label": "y", "label_kind": "words"}, r"^--label-kind: got 'words'; expected real or"),
]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize(("options", "refusal"), WRONG_NAMES)
def test_wrong_name_of_an_array_is_refused(arrays, ending, options, refusal):
    with pytest.raises(ValueError, match=refusal):
        load(arrays / f"a.{ending}", **{"contexts": "E"} | options)


def test_npy_is_cut_and_filled_with_zeros(tmp_path):
    table = np.arange(15.0).reshape(3, 5)
    np.save(tmp_path / "t.npy", table.astype(np.float32))
    data = load(tmp_path / "t.npy")
    assert data.contexts.shape == (3, 3, 2 + 3)
    assert np.array_equal(data.contexts[:, :, :2].flatten(1), np.pad(table, ((0, 0), (0, 1))))
    assert data.labels is None


def test_npy_with_a_gap_is_refused(tmp_path):
    table = np.arange(15.0).reshape(3, 5)
    table[2, 3] = np.nan
    np.save(tmp_path / "t.npy", table)
    with pytest.raises(ValueError, match=r"^table: got no finite number in row 2, column 3"):
        load(tmp_path / "t.npy")
    with pytest.raises(ValueError, match=r"^table: got no finite number in row 2, column 'd'"):
        cut(pd.DataFrame(table, columns=[*"abcde"]), 1)


@pytest.mark.parametrize("shape", [(3,), (2, 3, 4), (0, 4), (4, 0)])
def test_npy_of_another_shape_is_refused(tmp_path, shape):
    np.save(tmp_path / "t.npy", np.ones(shape))
    with pytest.raises(ValueError, match=r"^table: got shape"):
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
def test_ignored_option_is_refused(tmp_path, name, option):
    (tmp_path / name).touch()
    refusal = f"^--{option.replace('_', '-')}: got 'a'; .* only .*{IGNORED[name, option]}"
    with pytest.raises(ValueError, match=refusal):
        load(tmp_path / name, **{option: "a"})


NO_FILES = {
    "http://example.org/a.csv": "^file: got 'http://example.org/a.csv'; expected .*download",
    "": "^file: got '.*', a folder; expected a file",
    "none.csv": "^file: got '.*none.csv', not there",
    "t.xlsx": r"^file: .*expected a name that ends in \.csv, \.tsv",
    "t.csv.gz": r"^file: .*expected a name that ends in \.csv, \.tsv",
}


@pytest.mark.parametrize(("name", "refusal"), NO_FILES.items())
def test_place_that_is_no_file_is_refused(tmp_path, name, refusal):
    for other in ("t.xlsx", "t.csv.gz"):
        (tmp_path / other).touch()
    with pytest.raises(ValueError, match=refusal):
        load(name if "://" in name else tmp_path / name)


@pytest.mark.parametrize(
    ("version", "fine"), [("2.9.1", False), ("2.10.0+cpu", True), ("3.0", True)]
)
def test_pt_needs_a_torch_that_runs_nothing(tmp_path, monkeypatch, version, fine):
    path = tmp_path / "a.pt"
    torch.save({"contexts": torch.ones(2, 2, 2), "queries": torch.ones(2, 2)}, path)
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    if fine:
        assert load(path).contexts.shape == (2, 2, 2)
        return
    with pytest.raises(ValueError, match=r"^file: got .pt with torch 2\.9\.1"):
        load(path)


# --- what arrays may hold -------------------------------------------------------------------------

GEN = torch.Generator().manual_seed(0)
E, e = torch.randn(3, 4, 2, generator=GEN), torch.randn(3, 2, generator=GEN)
PAD = torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1], [0, 0, 0, 0]]).bool()
ATTENTION = (~PAD).long()
LEAST = [-torch.inf, torch.finfo().min, -1e9, torch.finfo(torch.float16).min, -1e4]
MASKS = {
    "bools": PAD,
    "numpy": PAD.numpy(),
    "a list": PAD.tolist(),
    "a data frame": pd.DataFrame(PAD.numpy()),
    **{f"{least:.0e}": torch.where(PAD, least, 0.0) for least in LEAST},
    "four axes": torch.where(PAD, -1e9, 0.0)[:, None, None],
    "four axes of bools": PAD[:, None, None].numpy(),
    "bfloat16": torch.where(PAD, -1e9, 0.0).bfloat16(),
}
NO_MASKS = {
    "a tokenizer's": ATTENTION,
    "numpy": ATTENTION.numpy(),
    "a list": ATTENTION.tolist(),
    "floats": ATTENTION.float(),
    "too small": torch.where(PAD, -9999.0, 0.0),
    "nan": torch.where(PAD, torch.nan, 0),
}


@pytest.mark.parametrize("case", MASKS)
def test_mask_of_any_convention_is_read(case):
    assert torch.equal(as_data(E, e, mask=MASKS[case]).mask, PAD)


@pytest.mark.parametrize("case", NO_MASKS)
def test_mask_of_no_clear_sense_is_refused(case):
    with pytest.raises(ValueError, match=r"^mask: got .* True for padding.* mask == 0"):
        examine(E, e, mask=NO_MASKS[case])


def test_mask_in_predictions():
    built = memorize(E, e, [1.0, 2.0, 3.0], heads=2, head_dim=2, mask=PAD)
    assert np.allclose(built.predict(E, e, ATTENTION == 0), [1, 2, 3], atol=1e-5)
    with pytest.raises(ValueError, match=r"^mask: .* mask == 0"):
        built.predict(E, e, mask=ATTENTION)


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
    named = "id" if hasattr(value, "columns") else str(BIG)
    with pytest.raises(ValueError, match=named):
        as_data(torch.ones(2, 3, 2), value)
    with pytest.raises(ValueError, match=named):
        cut(value, 2)


@pytest.mark.parametrize("of", [list, np.array, torch.tensor])
def test_integers_that_float64_holds(of):
    queries = of([[2**53, 0], [-(2**53), 0]])
    assert as_data(torch.ones(2, 3, 2), queries).queries[0, 0] == 2**53


def test_tables_of_several_precisions_keep_theirs():
    """A coarse table does not round the others that stand beside it."""
    fine, coarse = np.full((2, 2), 1 + 1e-9), np.ones((1, 2), np.float32)
    data = as_data([fine, coarse], np.ones((2, 2)))
    assert data.contexts[0, 0, 0] == 1 + 1e-9
    assert data.precision == torch.float32


@pytest.mark.parametrize("contents", [b"", b"words", None, {}, {"W_Q": torch.ones(1, 2, 1)}])
def test_file_of_other_weights_is_refused(tmp_path, contents):
    path = tmp_path / "w.safetensors"
    if isinstance(contents, bytes):
        path.write_bytes(contents)
    elif contents is not None:
        save_file(contents, path)
    with pytest.raises((ValueError, OSError), match=r"w\.safetensors"):
        predict(path, torch.ones(1, 2, 2), torch.ones(1, 2))


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


@pytest.fixture(scope="module")
def refusable(tmp_path_factory):
    """A folder with each file of ``REFUSALS``."""
    folder = tmp_path_factory.mktemp("refusable")
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
    (folder / "comment.csv").write_text("# made by x\n# on a day\na,b,y\n1,2,3\n4,5,6\n")
    (folder / "long.csv").write_text(f"{'a' * 9999}\n1,2\n3,4\n")
    (folder / "twice.csv").write_text(f"{'a' * 9999},{'a' * 9999},y\n1,2,3\n")
    names = ",".join(f"{'words ' * 99}{k}" for k in range(99))
    rows = [f"{f'w{i},' * 99}{i}" for i in range(3)]
    (folder / "none.csv").write_text("\n".join([f"{names},y", *rows]))
    return folder


@pytest.mark.parametrize("name", REFUSALS)
@pytest.mark.parametrize("words", ["examine", "memorize --heads=2 --out={}/w.safetensors"])
def test_refusal_is_true_and_short(refusable, capsys, words, name):
    verb, *options = words.format(refusable).split()
    assert command.main([verb, str(refusable / name), *options]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.search(REFUSALS[name], error)
    assert len(error) <= 400


PLAIN = {"contexts": torch.rand(3, 2, 2), "queries": torch.rand(3, 2), "labels": torch.ones(3)}
PLAIN["mask"] = torch.tensor([[False, True]] * 3)
HOLD = {  # ways to hold numbers
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
READ = {("nested", "contexts"), ("tensors", "queries"), ("sparse", "labels")}


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, on kinds of tensors
@pytest.mark.parametrize("role", PLAIN)
@pytest.mark.parametrize("kind", HOLD)
def test_tensor_of_any_kind_is_read_or_refused(tmp_path, capsys, kind, role):
    path, out = tmp_path / "f.pt", tmp_path / "w.safetensors"
    try:
        torch.save(PLAIN | {role: HOLD[kind](PLAIN[role])}, path)
    except (RuntimeError, NotImplementedError):
        pytest.skip("torch has no such tensor, or cannot save it")
    status = command.main(["memorize", str(path), "--heads=2", "--partial", f"--out={out}"])
    if not status:
        data = load(path)
        assert len(predict(out, *data[:2], data.mask)) == 3
        return
    error = capsys.readouterr().err.splitlines()[-1]
    assert (kind, role) not in READ
    assert len(error) <= 400
    assert "Internal" not in error


# --- damaged files --------------------------------------------------------------------------------

NAMED = ("--", "shape", "'f.", "table", "labels", "contexts", "queries", "mask")
ADVICE = ("pickle", "unsafe", "weights_only", "Traceback")  # to trust a file


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """Bytes of files that are read."""
    folder = tmp_path_factory.mktemp("clean")
    tensors = {"contexts": E[:, :2].contiguous(), "queries": e, "labels": torch.ones(3)}
    torch.save(tensors, folder / "f.pt")
    save_file(tensors, folder / "f.safetensors")
    np.savez(folder / "f.npz", **{name: value.numpy() for name, value in tensors.items()})
    np.save(folder / "f.npy", e.numpy())
    return folder, {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # of a signalling NaN
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("name", ["f.npy", "f.npz", "f.pt", "f.safetensors"])
@given(data=st.data())
def test_damaged_arrays_are_refused_by_name(clean, name, data):
    folder, contents = clean
    raw = bytearray(contents[name])
    head = st.integers(0, min(80, len(raw)) - 1)  # where a fault does most
    places = st.one_of(head, st.integers(0, len(raw) - 1))
    values = st.one_of(st.sampled_from([0, 10, 255]), st.integers(0, 255))
    for place, value in data.draw(st.lists(st.tuples(places, values), min_size=1, max_size=3)):
        raw[place] = value
    end = data.draw(st.one_of(st.just(len(raw)), st.integers(0, len(raw))))
    (folder / name).write_bytes(raw[:end])
    try:
        loaded = load(folder / name)
        as_data(*loaded[:3], mask=loaded.mask)
        refusal = "'f."
    except ValueError as error:
        refusal = str(error)
    assert any(word in refusal for word in NAMED)
    assert not any(word in refusal for word in ADVICE)


NO_ARRAYS = [
    [torch.ones(2)],
    torch.ones(3),
    {"contexts": [1, 2], "queries": "x"},
    "words",
    {3: 4},
    torch.nn.Linear(2, 2),
]


@pytest.mark.parametrize("value", NO_ARRAYS, ids=lambda value: type(value).__name__)
def test_pt_without_arrays_is_refused(tmp_path, value):
    torch.save(value, tmp_path / "f.pt")
    with pytest.raises(ValueError, match=r"f\.pt"):
        load(tmp_path / "f.pt")


def test_files_of_objects_or_none_are_refused(tmp_path):
    np.save(tmp_path / "f.npy", np.array([{}, 3], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "f.npz", contexts=np.array([{}], dtype=object))
    (tmp_path / "f.safetensors").write_bytes(b"\xff" * 8 + b"{}")
    (tmp_path / "g.npz").write_bytes(b"words")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "f.pt")
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(ValueError, match=rf"^file: got '{path.name}', ") as error:
            load(path)
        assert not any(word in str(error.value) for word in ADVICE)
