"""What runs while the tests run: a call that does not fit its signature is an error."""

import importlib
import sys

import pytest
import torch
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import TypeCheckError

import shapes

REFUSED = (BeartypeCallHintViolation, TypeCheckError)
ONE = torch.ones(1)
MADE_UP = '''\
"""A package."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def product(a: Float[Tensor, "m n"], b: Float[Tensor, "n k"]) -> Float[Tensor, "m k"]:
    return a @ b


def gram(a: Float[Tensor, "m n"]) -> Float[Tensor, "m m"]:
    return product(a, a.T)


def wrong(a: Float[Tensor, "m n"]) -> Float[Tensor, "n m"]:
    return a


def count(a: int) -> int:
    return a / 2


def cut(a: Float[Tensor, "m n"], rows: int) -> Float[Tensor, "m n"]:
    return a[:rows]


def named(a: Float[Tensor, "n"], kinds: list[type | int], by: dict[str, int]) -> int:
    return len(kinds)


def drawn(ax: Axes, times: int) -> Axes:
    return ax


def first(layer: Layer) -> float:
    return float(layer.weight[0, 0])


def outer(a: int):
    def inner(a: str) -> str:
        return a

    return inner(a)


def scaled(by: float):
    def scale(a: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return by * a

    return scale


@dataclass(frozen=True)
class Layer:
    weight: Float[Tensor, "d d"]
    heads: int = 1

    def double(self, by: int) -> Layer:
        return Layer(by * self.weight)

    @property
    def width(self) -> str:
        return len(self.weight)

    @staticmethod
    def of(heads: int) -> Layer:
        return Layer(torch.eye(2), heads)


@dataclass(frozen=True)
class Named:
    weight: str
    heads: int = 1


def pieces(a: Float[Tensor, "m n"], by: int):
    for row in a:
        yield by * row
    functools.reduce(lambda x, y: x + y, a)


TABLE = {"product": product}
'''


@pytest.fixture(scope="module")
def made_up(tmp_path_factory):
    """A package with signatures, compiled without checks before it is imported with them."""
    folder = tmp_path_factory.mktemp("made_up")
    (folder / "madeup").mkdir()
    (folder / "madeup" / "__init__.py").touch()
    (folder / "madeup" / "layers.py").write_text(MADE_UP)
    sys.path.insert(0, str(folder))
    shapes.check("madeup")
    yield importlib.import_module("madeup.layers")
    del sys.path[0], sys.meta_path[0]


def test_calls_that_fit_return_what_they_would(made_up):
    a = torch.rand(2, 3)
    assert torch.equal(made_up.product(a, a.T), a @ a.T)
    assert torch.equal(made_up.gram(a), a @ a.T)  # its n is 3, that of the call within it is too
    assert torch.equal(made_up.Layer(torch.eye(3)).double(by=2).weight, 2 * torch.eye(3))
    assert made_up.Layer.of(4).heads == 4
    assert [row.tolist() for row in made_up.pieces(torch.eye(2), 3)] == [[3, 0], [0, 3]]
    assert made_up.product.__name__ == "product"
    assert made_up.drawn("axes, which only a type checker imports", 3)
    assert made_up.first(made_up.Layer.of(4)) == 1


@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("two sizes of one name", lambda m: m.product(torch.rand(2, 3), torch.rand(2, 3))),
        ("one dimension too many", lambda m: m.gram(torch.rand(2, 3, 4))),
        ("another kind of number", lambda m: m.gram(torch.ones(2, 3, dtype=torch.int64))),
        ("no tensor", lambda m: m.gram([[1.0]])),
        ("a result of another shape", lambda m: m.wrong(torch.rand(2, 3))),
        ("a result of another type", lambda m: m.count(3)),
        ("an argument of another type", lambda m: m.count("3")),
        ("a function within a function", lambda m: m.outer(3)),
        ("a function in a table", lambda m: m.TABLE["product"](torch.eye(2), torch.eye(3))),
        ("beside what is not imported", lambda m: m.drawn("axes", "3")),
        ("a class that comes later", lambda m: m.first("layer")),
        ("a field of a dataclass", lambda m: m.Layer(torch.rand(2, 3))),
        ("a later field", lambda m: m.Layer(torch.eye(2), heads=1.5)),
        ("a method", lambda m: m.Layer(torch.eye(2)).double(by="2")),
        ("a property", lambda m: m.Layer(torch.eye(2)).width),
        ("a static method", lambda m: m.Layer.of("4")),
        ("a generator", lambda m: m.pieces(torch.eye(2), by="3")),
    ],
)
def test_calls_that_do_not_fit_are_errors(made_up, what, call):
    with pytest.raises(REFUSED):
        call(made_up)


@pytest.mark.parametrize(
    ("fits", "call"),
    [
        (
            lambda m: m.product(torch.rand(2, 3), torch.rand(3, 2)),
            lambda m: m.product(torch.rand(2, 3), torch.rand(2, 3)),
        ),
        (
            lambda m: m.product(torch.rand(2, 3), b=torch.rand(3, 2)),
            lambda m: m.product(torch.rand(2, 3), b=torch.ones(3, 2, dtype=torch.int64)),
        ),
        (lambda m: m.cut(torch.rand(2, 3), 2), lambda m: m.cut(torch.rand(2, 3), 1)),
        (lambda m: m.cut(torch.rand(2, 3), 2), lambda m: m.cut(torch.rand(2, 3), 2.0)),
        (lambda m: m.cut(torch.rand(2, 3), 2), lambda m: m.cut(torch.rand(2, 3), int)),
        (lambda m: m.named(ONE, [3], {"a": 1}), lambda m: m.named(ONE, ["3"], {"a": 1})),
        (lambda m: m.named(ONE, [3], {"a": 1}), lambda m: m.named(ONE, [3], {"a": "1"})),
        (lambda m: m.named(ONE, [3], {"a": 1}), lambda m: m.named(ONE, [3], {1: 1})),
        (lambda m: m.Layer(torch.eye(2), 1), lambda m: m.Named(torch.eye(2), 1)),
        (lambda m: m.named(ONE, [3] * 20, {}), lambda m: m.named(ONE, ["3"] * 20, {})),
    ],
)
def test_calls_that_fitted_before_do_not_excuse_others(made_up, fits, call):
    for _ in range(3):
        fits(made_up)
        with pytest.raises(REFUSED):
            call(made_up)


def test_a_function_that_is_made_again_is_checked_again(made_up):
    double, half = made_up.scaled(2.0), made_up.scaled(0.5)
    assert double(torch.ones(2)).tolist() == [2, 2]
    assert half(torch.ones(2)).tolist() == [0.5, 0.5]  # not that of the function before
    for made in (double, half):
        with pytest.raises(REFUSED):
            made(torch.ones(2, 2))


def test_the_library_is_checked():
    from attnmem.attention import look_up

    with pytest.raises(REFUSED):
        look_up("no tensor", "no tensor")
