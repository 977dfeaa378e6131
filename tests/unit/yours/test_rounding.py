"""Weights in a number type: which are kept, which labels are lost, and what is said of it."""

import pytest
import torch
from safetensors.torch import load_file

from attnmem import MHAWeights, mha
from attnmem_yours import __main__ as command
from attnmem_yours import memorize
from attnmem_yours.rounding import stored

W = torch.tensor([[[1 + 2.0**-9, 127.0], [0.5, -254.0]]], dtype=torch.float64)
BOTH = MHAWeights(W, W, W, W[0], W[0])


def uniform(T, n, d, seed=0):
    """Contexts, queries and labels."""
    g = torch.Generator().manual_seed(seed)
    return [torch.rand(*shape, generator=g) for shape in [(T, n, d), (T, d), (T,)]]


def are_of(weights, number_type):
    """Whether all weights are numbers of that type."""
    pairs = zip(weights, stored(weights, number_type), strict=True)
    return all(torch.allclose(A, B, rtol=1e-12, atol=0) for A, B in pairs)


@pytest.mark.parametrize(
    ("number_type", "expected"),
    [
        ("float32", [1 + 2.0**-9, 127, 0.5, -254]),
        ("float16", [1 + 2.0**-9, 127, 0.5, -254]),
        ("bfloat16", [1, 127, 0.5, -254]),
        # In steps of the largest of each column over 127; 127 is 63.5 steps of 2, to even 64.
        ("int8", [1 + 2.0**-9, 128, (1 + 2.0**-9) / 127 * round(0.5 * 127 / (1 + 2.0**-9)), -254]),
    ],
)
def test_stored_by_hand(number_type, expected):
    held = stored(BOTH, number_type).W_Q.flatten()
    assert torch.allclose(held, torch.tensor(expected).double(), rtol=1e-15)


def test_stored_zeros_and_ends_of_the_range():
    assert stored(BOTH._replace(W_D=1e5 * W[0]), "float16").W_D.isinf().any()
    zero = stored(MHAWeights(*(0 * A for A in BOTH)), "int8")
    assert not any(A.any() for A in zero)
    column = torch.tensor([[1.0, 0.0], [0.25, 0.0]], dtype=torch.float64)
    small = stored(BOTH._replace(W_O=1e-310 * column), "int8").W_O
    assert torch.allclose(small / 1e-310, (127 * column).round() / 127, rtol=1e-4)


@pytest.mark.parametrize("keep", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("kind", ["reals", "two", "classes"])
def test_labels_are_kept_in_a_number_type(keep, kind):
    E, e, y = uniform(40, 3, 5)
    if kind == "two":
        E, e, y = E[:20], e[:20], y.view(20, 2)
    elif kind == "classes":
        y = (3 * y).long()
    built = memorize(E, e, y, heads=4, head_dim=3, keep=keep)
    assert are_of(built.weights, keep)
    assert built.count == built.kept[keep] == len(y)
    assert built.how.endswith(f", in {keep}")
    answers = torch.tensor(built.predict(E, e))
    met = answers == y if kind == "classes" else (answers - y).abs() <= 0.0101 * y.abs().max()
    assert met.all()


def test_less_is_lost_when_asked():
    data = uniform(100, 4, 6)
    plain = memorize(*data, heads=4, head_dim=3)
    asked = memorize(*data, heads=4, head_dim=3, keep="int8")
    assert plain.count == plain.kept["float32"] == 100
    assert plain.kept["int8"] < 50 < 80 < asked.kept["int8"]
    assert "in int8" in str(plain)
    assert asked.kept == {"int8": asked.count}
    assert str(asked).endswith(f"of all 100, rounded weights keep {asked.count} in int8")
    assert are_of(asked.weights, "int8")
    with pytest.raises(ValueError, match=r"^keep: got 'int4'"):
        memorize(*data, heads=4, head_dim=3, keep="int4")


@pytest.mark.parametrize(("T", "classes"), [(28, False), (40, False), (40, True)])
def test_what_a_number_type_loses_is_a_reason(T, classes):
    """Not that no fit met more; where it loses nothing, the reason is that of float64."""
    E, e, y = uniform(T, 3, 4)
    if classes:
        y = (20 * y).long()
    plain, asked, same = (
        memorize(E, e, y, heads=2, head_dim=2, keep=keep) for keep in (None, "int8", "float32")
    )
    assert asked.count < plain.count
    lost = f" int8 keeps {asked.count} of the {plain.count} stored in float64; another seed"
    assert lost in asked.reason
    assert ("more than 32 examples" in asked.reason) == (T == 40 and not classes)
    assert "float64" not in same.reason


def test_weights_out_of_range_are_a_reason():
    E, e, y = uniform(20, 3, 4)
    data = 1e-8 * E, 1e-8 * e, y
    built = memorize(*data, heads=3, head_dim=2, keep="float16", seconds=3)
    assert built.count < 20
    assert built.reason.endswith("; some fit had weights beyond the largest float16")
    assert memorize(*data, heads=3, head_dim=2, keep="bfloat16").count > 15


def test_weights_do_not_grow_beyond_the_largest_number():
    """Without a limit some weight here doubles at each round, and float16 has no such number."""
    g = torch.Generator().manual_seed(0)
    E, e, y = (torch.rand(*size, generator=g, dtype=float) for size in [(40, 3, 4), (40, 4), (40,)])
    small = 10**-2.75
    built = memorize(small * E, small * e, y, heads=4, head_dim=2, keep="float16")
    assert built.count == built.kept["float16"] == 40


@pytest.mark.parametrize(("keep", "count"), [("bfloat16", 0), ("int8", 10)])
def test_labels_below_the_least_normal_number(keep, count):
    """Int8 meets them by its scale; bfloat16 has no such number."""
    E, e, y = uniform(10, 3, 4)
    built = memorize(E, e, 1e-310 * y.double(), heads=3, head_dim=2, keep=keep)
    assert built.count == built.kept[keep] == count


@pytest.mark.parametrize("keep", ["bfloat16", "int8"])
def test_the_command_writes_such_numbers(tmp_path, keep, capsys):
    E, e, y = uniform(20, 2, 4, seed=1)
    path, out = tmp_path / "t.pt", tmp_path / "w.safetensors"
    torch.save({"contexts": E, "queries": e, "labels": y}, path)
    words = ["memorize", str(path), "--heads", "4", "--head-dim", "2"]
    assert command.main([*words, "--keep", keep, "--out", str(out)]) == 0
    assert f", in {keep}" in " ".join(capsys.readouterr().out.split())
    weights = MHAWeights(**load_file(out))
    assert are_of(weights, keep)
    assert (mha(weights, E, e)[:, 0] - y).abs().max() <= 0.01 * y.max()
    with pytest.raises(SystemExit):
        command.main([*words, "--keep", "int4", "--out", str(out)])
