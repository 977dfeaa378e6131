"""Weights in a number type: which are kept, which labels are lost, and what is said of it."""

import pytest
import torch
from safetensors.torch import load_file

from attnmem import MHAWeights, mha
from attnmem_yours import __main__ as command
from attnmem_yours import memorize
from attnmem_yours.memorization import stored


def test_number_types_by_hand():
    W = torch.tensor([[[1 + 2.0**-9, 127.0], [0.5, -254.0]]], dtype=torch.float64)
    both = MHAWeights(W, W, W, W[0], W[0])
    kept = {name: stored(both, name).W_Q for name in ("float32", "bfloat16", "float16", "int8")}
    assert kept["float32"].equal(W)
    assert kept["float16"].equal(W)
    assert kept["bfloat16"].flatten().tolist() == [1, 127, 0.5, -254]
    first = 1 + 2.0**-9
    expected = [first, 128.0, first / 127 * round(0.5 * 127 / first), -254.0]  # 63.5 to even: 64
    assert torch.allclose(kept["int8"].flatten(), torch.tensor(expected).double())
    assert stored(both._replace(W_D=1e5 * W[0]), "float16").W_D.isinf().any()
    zero = stored(MHAWeights(*(0 * w for w in both)), "int8")
    assert not any(w.any() for w in zero)
    column = torch.tensor([[1.0, 0.0], [0.25, 0.0]], dtype=torch.float64)
    small = stored(MHAWeights(W, W, W, 1e-310 * column, W[0]), "int8").W_O
    assert torch.allclose(small / 1e-310, (127 * column).round() / 127, rtol=1e-4)


@pytest.mark.parametrize("keep", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("outputs", ["reals", "two", "classes"])
def test_labels_are_kept_in_a_number_type(keep, outputs):
    g = torch.Generator().manual_seed(0)
    E, e = torch.rand(40, 3, 5, generator=g), torch.rand(40, 5, generator=g)
    y = {"reals": torch.rand(40, generator=g), "two": torch.rand(20, 2, generator=g)}
    y = y.get(outputs, torch.randint(3, (40,), generator=g))
    E, e = E[: len(y)], e[: len(y)]
    found = memorize(E, e, y, heads=4, head_dim=3, keep=keep)
    again = stored(found.weights, keep)
    for W, V in zip(found.weights, again, strict=True):
        assert torch.allclose(W, V, rtol=1e-12, atol=0)
    assert found.count == found.kept[keep] == len(y)
    assert found.how.endswith(f", in {keep}")
    answers = torch.tensor(found.predict(E, e))
    met = answers == y if outputs == "classes" else (answers - y).abs() <= 0.0101 * y.abs().max()
    assert met.all()


def test_what_is_lost_is_counted_and_less_is_lost_when_asked():
    g = torch.Generator().manual_seed(0)
    E, e, y = (torch.rand(*s, generator=g) for s in [(100, 4, 6), (100, 6), (100,)])
    plain = memorize(E, e, y, heads=4, head_dim=3)
    asked = memorize(E, e, y, heads=4, head_dim=3, keep="int8")
    assert plain.count == plain.kept["float32"] == 100
    assert plain.kept["int8"] < 50 < 80 < asked.kept["int8"]
    assert "in int8" in str(plain)
    assert asked.kept == {"int8": asked.count}
    assert str(asked).endswith(f"of all 100, rounded weights keep {asked.count} in int8")
    for W, V in zip(asked.weights, stored(asked.weights, "int8"), strict=True):
        assert torch.allclose(W, V, rtol=1e-12, atol=0)
    with pytest.raises(ValueError, match="keep"):
        memorize(E, e, y, heads=4, head_dim=3, keep="int4")


@pytest.mark.parametrize(("T", "classes"), [(28, False), (40, False), (40, True)])
def test_what_a_number_type_loses_is_a_reason(T, classes):
    """Not that no fit met more; where it loses nothing, the reason is that of float64."""
    g = torch.Generator().manual_seed(0)
    E, e, y = (torch.rand(*s, generator=g) for s in [(T, 3, 4), (T, 4), (T,)])
    y, sizes = (20 * y).long() if classes else y, {"heads": 2, "head_dim": 2}
    plain, asked = memorize(E, e, y, **sizes), memorize(E, e, y, **sizes, keep="int8")
    assert asked.count < plain.count
    lost = f" int8 keeps {asked.count} of the {plain.count} met in float64; another seed"
    assert lost in asked.reason
    assert ("more than 32 examples" in asked.reason) == (T == 40 and not classes)
    same = memorize(E, e, y, **sizes, keep="float32")
    assert "float64" not in same.reason


def test_weights_beyond_the_largest_number_are_a_reason():
    g = torch.Generator().manual_seed(0)
    E, e, y = (1e-8 * torch.rand(*s, generator=g) for s in [(20, 3, 4), (20, 4), (20,)])
    found = memorize(E, e, 1e8 * y, heads=3, head_dim=2, keep="float16", seconds=3)
    assert found.count < 20
    assert found.reason.endswith("; some fit had weights beyond the largest float16")
    assert memorize(E, e, 1e8 * y, heads=3, head_dim=2, keep="bfloat16").count > 15


def test_weights_do_not_grow_beyond_the_largest_number():
    """Without a limit some weight here doubles at each round, and float16 has no such number."""
    g = torch.Generator().manual_seed(0)
    E, e, y = (torch.rand(*size, generator=g, dtype=float) for size in [(40, 3, 4), (40, 4), (40,)])
    small = 10**-2.75
    found = memorize(small * E, small * e, y, heads=4, head_dim=2, keep="float16")
    assert found.count == found.kept["float16"] == 40


@pytest.mark.parametrize("keep", ["bfloat16", "int8"])
def test_labels_below_the_least_normal_number_are_met(keep):
    g = torch.Generator().manual_seed(0)
    E, e, y = (torch.rand(*s, generator=g) for s in [(10, 3, 4), (10, 4), (10,)])
    found = memorize(E, e, 1e-310 * y.double(), heads=3, head_dim=2, keep=keep)
    assert found.count == found.kept[keep]
    assert found.count == (10 if keep == "int8" else 0)  # by its scale; bfloat16 has no such number


@pytest.mark.parametrize("keep", ["bfloat16", "int8"])
def test_the_command_writes_such_numbers(tmp_path, keep, capsys):
    g = torch.Generator().manual_seed(1)
    table, out = torch.rand(20, 13, generator=g), tmp_path / "w.safetensors"
    torch.save({"contexts": table[:, :8].unflatten(1, (2, 4)), "queries": table[:, 8:12],
                "labels": table[:, 12]}, tmp_path / "t.pt")  # fmt: skip
    words = ["memorize", str(tmp_path / "t.pt"), "--heads", "4", "--head-dim", "2"]
    assert command.main([*words, "--keep", keep, "--out", str(out)]) == 0
    assert f", in {keep}" in " ".join(capsys.readouterr().out.split())
    weights = MHAWeights(**load_file(out))
    for W, V in zip(weights, stored(weights, keep), strict=True):
        assert torch.allclose(W, V, rtol=1e-12, atol=0)
    E, e, y = table[:, :8].unflatten(1, (2, 4)), table[:, 8:12], table[:, 12]
    assert (mha(weights, E, e)[:, 0] - y).abs().max() <= 0.01 * y.max()
    with pytest.raises(SystemExit):
        command.main([*words, "--keep", "int4", "--out", str(out)])
