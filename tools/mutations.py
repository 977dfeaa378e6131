"""Small mistakes, one at a time: what :mod:`mutants` puts into a module.

Names that say the opposite change places, numbers are one more or one less, comparisons include
their ends or not, terms, arguments, conditions, checks and statements are missing, arguments are
swapped, slices begin or end elsewhere. Annotations and the words of messages stay as they are.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

PAIRS = "min max, all any, minimum maximum, argmin argmax, floor ceil, lower upper, above below, "
PAIRS += "abs_lower abs_upper, low high, nrows ncols, mean median, left right, zeros ones"
OTHER = {a: b for pair in PAIRS.split(", ") for a, b in (pair.split(), pair.split()[::-1])}
SIGNS = "Lt LtE, LtE Lt, Gt GtE, GtE Gt, Eq NotEq, NotEq Eq, Is IsNot, IsNot Is, In NotIn, "
SIGNS += "NotIn In, And Or, Or And, Add Sub, Sub Add, Mult Div, Div Mult, FloorDiv Div, "
SIGNS += "Mod FloorDiv, Pow Mult"
TURNED = {getattr(ast, a): getattr(ast, b) for a, b in (pair.split() for pair in SIGNS.split(", "))}
UNTOUCHED = {"annotation", "returns", "type_params", "bases"}
LEFT = ast.JoinedStr | ast.Import | ast.ImportFrom
UNORDERED = {"min", "max", "minimum", "maximum", "hypot", "isinstance"}
KEPT = {"cache", "cached_property", "property", "dataclass", "wraps", "contextmanager"}


class Mutation(NamedTuple):
    """One change: where it is, and the node that takes the place of ``holder.field[index]``.

    ``host``: the outermost function whose body it is in; None outside, where importing runs it.
    """

    host: str | None
    function: str
    line: int
    text: str
    holder: ast.AST
    field: str
    index: int | None
    new: ast.AST | None

    def apply(self) -> None:
        """Change the tree that the mutation belongs to, so that its text is that of the mutant."""
        if self.index is None:
            setattr(self.holder, self.field, self.new)
        else:
            here = slice(self.index, self.index + 1)
            getattr(self.holder, self.field)[here] = [self.new] if self.new else []


def mutations(tree: ast.AST) -> Iterator[Mutation]:
    """Every mutation of a module, in the order of its lines; equal texts are numbered."""
    seen: Counter[tuple[str, str]] = Counter()
    for host, function, holder, field, index, node in _places(tree, (), None):
        for new in _instead(holder, field, node):
            after = "nothing" if new is None or isinstance(new, ast.Pass) else ast.unparse(new)
            text = f"{ast.unparse(node).splitlines()[0]} -> {after}"
            seen[function, text] += 1
            if seen[function, text] > 1:
                text += f" (#{seen[function, text]})"
            yield Mutation(host, function, node.lineno, text, holder, field, index, new)


def _places(holder: ast.AST, scope: tuple[str, ...], host: str | None) -> Iterator[tuple]:
    """Every node that may be changed, with the functions that it is in and its place there."""
    for field, value in ast.iter_fields(holder):
        if field in UNTOUCHED:
            continue
        runs = isinstance(holder, ast.FunctionDef) and field == "body"
        within = host or (".".join(scope) if runs else None)
        for index, node in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(node, ast.AST) or isinstance(node, LEFT) or _is_kept(field, node):
                continue
            named = isinstance(node, ast.FunctionDef | ast.ClassDef)
            inner = (*scope, node.name) if named else scope
            if isinstance(node, ast.expr | ast.stmt | ast.keyword):
                at = index if isinstance(value, list) else None
                yield within, ".".join(inner), holder, field, at, node
            if not _is_whole(node):
                yield from _places(node, inner, within)


def _is_kept(field: str, node: ast.AST) -> bool:
    """What nobody could tell, or nobody gets wrong: ``@cache``, ``strict=True``."""
    if field == "decorator_list":
        return any(name in ast.unparse(node) for name in KEPT)
    return field == "keywords" and node.arg == "strict"


def _is_whole(node: ast.AST) -> bool:
    """Negative numbers, and statements that only say what is wrong: their words are not tested."""
    negative = isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant)
    refuses = isinstance(node, ast.Expr) and ast.unparse(node).startswith("refuse(")
    return negative or refuses or isinstance(node, ast.Raise)


def _instead(holder: ast.AST, field: str, node: ast.AST) -> Iterator[ast.AST | None]:
    """What may stand by mistake in the place of a node; None for nothing."""
    if field == "test" and not isinstance(node, ast.Compare | ast.UnaryOp):
        yield ast.UnaryOp(ast.Not(), node)
    if field in ("keywords", "ifs") or (field == "values" and isinstance(holder, ast.BoolOp)):
        yield None
    if field == "decorator_list":
        yield None
    if isinstance(holder, ast.Slice):
        yield ast.Constant(None)
        if not isinstance(node, ast.Constant | ast.UnaryOp):
            yield from (_plus(node, 1), _plus(node, -1))
    match node:
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield from (ast.Constant(value + 1), ast.Constant(value - 1))
        case ast.Constant(value=float(value)):
            yield ast.Constant(0.95 * value if value else 1.0)
        case ast.Compare(left, ops, comparators):
            for i, op in enumerate(ops):
                turned = [*ops[:i], TURNED[type(op)](), *ops[i + 1 :]]
                yield ast.Compare(left, turned, comparators)
            match ops, comparators:
                case [ast.Eq()], [ast.Constant(value=int(value) | float(value))]:
                    yield ast.Compare(left, [ast.GtE()], [ast.Constant(0.999 * value)])
        case ast.BoolOp(op, values):
            yield ast.BoolOp(TURNED[type(op)](), values)
        case ast.BinOp(left, op, right):
            if type(op) in TURNED:
                yield ast.BinOp(left, TURNED[type(op)](), right)
            yield from (left, right)
        case ast.UnaryOp(ast.USub(), ast.Constant(value=int(value))):
            yield from (ast.Constant(value), _plus(node, 1), _plus(node, -1))
        case ast.UnaryOp(operand=operand):
            yield operand
        case ast.Call(func, arguments, keywords):
            ordered = ast.unparse(func).split(".")[-1] not in UNORDERED
            for i in range(len(arguments) - 1) if ordered else ():
                swapped = [*arguments[:i], arguments[i + 1], arguments[i], *arguments[i + 2 :]]
                if len({ast.unparse(a) for a in swapped[i : i + 2]}) > 1:
                    yield ast.Call(func, swapped, keywords)
            if ast.unparse(func) == "range":
                for by in (1, -1):
                    at = min(1, len(arguments) - 1)
                    longer = [*arguments[:at], _plus(arguments[at], by), *arguments[at + 1 :]]
                    yield ast.Call(func, longer, keywords)
        case ast.Name(name, ctx=ast.Load()) if name in OTHER:
            yield ast.Name(OTHER[name])
        case ast.Attribute(value, name) if name in OTHER:
            yield ast.Attribute(value, OTHER[name])
        case ast.AugAssign(target, op, value):
            if type(op) in TURNED:
                yield ast.AugAssign(target, TURNED[type(op)](), value)
            yield ast.Pass()
        case ast.Expr(value) if not isinstance(value, ast.Constant):
            yield ast.Pass()
        case ast.Raise() | ast.Break() | ast.Continue():
            yield ast.Pass()


def _plus(node: ast.expr, by: int) -> ast.expr:
    return ast.BinOp(node, ast.Add() if by > 0 else ast.Sub(), ast.Constant(abs(by)))
