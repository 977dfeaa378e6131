"""Weights in few digits: the proof against every corner of the balls, number types by hand."""

import itertools
import math

import pytest
import torch
from safetensors.torch import load_file

from attnmem import MHAWeights, memorize, memorize_mha, mha
from attnmem import __main__ as command
from attnmem.theory.certificates import certified_digits, certified_rounding
from attnmem.yours.memorize import stored


def drawn(shape, own, spread, seed):
    """A small layer of so many heads, dimensions, widths and outputs, and three examples."""
    H, d, d_h, d_v, o = shape
    g = torch.Generator().manual_seed(seed)
    draw = lambda *size: torch.randn(*size, generator=g, dtype=torch.float64)  # noqa: E731
    maps = spread * draw(H, d, d_h), spread * draw(H, d, d_h), draw(H, d, d_v)
    weights = MHAWeights(*maps, draw(H * d_v, o), draw(o, o))
    return weights, draw(*[3] * own, 3, d), draw(3, d)


def layers(weights, rows):
    """A layer for each row of all weights."""
    parts = rows.split([W.numel() for W in weights], 1)
    return MHAWeights(*(x.reshape(-1, *W.shape) for x, W in zip(parts, weights, strict=True)))


SHAPES = (1, 2, 1, 1, 1), (1, 2, 2, 1, 1), (2, 2, 1, 1, 1), (1, 2, 1, 2, 2)


@pytest.mark.hostile("mahdavi-finding-rounding")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("spread", [0.5, 6.0])
def test_no_corner_of_the_balls_is_further_than_proven(shape, own, spread):
    """And with many digits some corner is nearly as far; the first order alone is exceeded."""
    weights, E, e = drawn(shape, own, spread, seed=1)
    y, flat = mha(weights, E, e), torch.cat([W.flatten() for W in weights])
    signs = torch.tensor([*itertools.product((-1.0, 1.0), repeat=len(flat))]).double()
    alone = lambda v: mha(layers(weights, v[None]), E[None], e[None]).flatten()  # noqa: E731
    J = torch.autograd.functional.jacobian(alone, flat)
    above = False
    for digits in (1, 4, 8, 28):
        part = 2.0 ** -(digits + 1)
        many = layers(weights, flat * (1 + part * signs))
        N = len(signs)
        outputs = mha(many, E.expand(N, *E.shape), e.expand(N, *e.shape))
        far = float((outputs - y).abs().max())
        proven = certified_rounding(weights, E, e, y, digits=digits)
        assert far <= proven + 1e-14
        above |= far > part * float((J * flat).abs().sum(1).max()) + 1e-14
    assert above
    assert proven < 1.001 * far  # with 28 digits


def test_digits_keep_the_labels_and_one_less_is_not_proven():
    g = torch.Generator().manual_seed(0)
    E, e, y = (torch.rand(*size, generator=g) for size in [(3, 4), (5, 4), (5, 1)])
    weights = memorize_mha(E, e, y, heads=2, head_dim=3, seed=0)
    data = weights, E, e, y
    digits, top = certified_digits(*data), float(y.max())
    assert certified_rounding(*data, digits=digits) <= 0.01 * top
    assert certified_rounding(*data, digits=digits - 1) > 0.01 * top
    mantissas, exponents = zip(*map(torch.frexp, weights), strict=True)
    short = [(m * 2 ** (digits + 1)).round() / 2 ** (digits + 1) for m in mantissas]
    rounded = MHAWeights(*map(torch.ldexp, short, exponents))
    assert (mha(rounded, E.double(), e.double()) - y).abs().max() <= 0.01 * top
    assert certified_digits(weights, E, e, y + 1) is None  # labels that the weights miss
    assert certified_digits(*data, tolerance=1e-3) > digits
    huge = weights._replace(W_Q=weights.W_Q * 1e300)
    assert certified_rounding(huge, E, e, y, digits=0) > 1  # infinite, or at least no proof


def test_a_linear_layer_moves_by_the_sum_of_its_radii():
    """Zeros are not rounded, so attention is constant, and the output a product of three."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    weights = MHAWeights(0 * one, 0 * one, 3 * one, -5 * one[0], 7 * one[0])
    for digits in (0, 3, 9, 20):
        u = 2.0 ** -(digits + 1)
        proven = certified_rounding(weights, one[0], one[0], -105 * one[0], digits=digits)
        assert 105 * ((1 + u) ** 3 - 1) < proven
        assert math.isclose(proven, 105 * 3 * u * (1 + u) ** 2, rel_tol=1e-7)


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
