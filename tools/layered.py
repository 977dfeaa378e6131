"""Draw a directed graph in columns: each node left of all that it leads to, and few crossings.

The method of Sugiyama, in its plainest form: columns by the longest way to an end, orders within
them by means of neighbours, heights by least squares. The same graph gives the same drawing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import pairwise
from typing import NamedTuple

SWEEPS = 24
Node = Hashable
Edge = tuple[Node, Node]


class Drawing(NamedTuple):
    """Where the nodes are (left, middle), and through which points each edge goes."""

    places: dict[Node, tuple[float, float]]
    routes: dict[Edge, list[tuple[float, float]]]
    size: tuple[float, float]


class Frame(NamedTuple):
    """The sizes of a drawing: a node's box, the room between boxes, the width to be filled."""

    width: float
    height: float
    aside: float
    above: float
    page: float


def draw(edges: Iterable[Edge], frame: Frame) -> Drawing:
    """Each connected part by itself, the largest first, small ones side by side."""
    edges = sorted(set(edges), key=str)
    parts = sorted(_parts(edges), key=lambda part: (-len(part), str(min(part, key=str))))
    places, routes, x, y, shelf, right = {}, {}, 0.0, 0.0, 0.0, 0.0
    for part in parts:
        drawn = _part([edge for edge in edges if edge[0] in part], frame)
        width, height = drawn.size
        if x and x + width > frame.page:
            x, y, shelf = 0.0, y + shelf + 2 * frame.above, 0.0
        places |= {node: (x + a, y + b) for node, (a, b) in drawn.places.items()}
        routes |= {edge: [(x + a, y + b) for a, b in way] for edge, way in drawn.routes.items()}
        right, shelf = max(right, x + width), max(shelf, height)
        x += width + frame.aside
    return Drawing(places, routes, (right, y + shelf))


def _parts(edges: list[Edge]) -> list[set[Node]]:
    parts: list[set[Node]] = []
    for edge in edges:
        touched = [part for part in parts if part & {*edge}]
        parts = [part for part in parts if part not in touched] + [set(edge).union(*touched)]
    return parts


def _part(edges: list[Edge], frame: Frame) -> Drawing:
    depth = depths(edges)
    ways = {edge: _way(edge, depth) for edge in edges}
    steps = [step for way in ways.values() for step in pairwise(way)]
    columns = _ordered(depth, steps)
    heights = _heights(columns, steps, frame)
    pitch = frame.width + frame.aside
    left = {
        node: (len(columns) - 1 - number) * pitch
        for number, column in enumerate(columns)
        for node in column
    }
    routes = {}
    for edge, way in ways.items():
        ends = [(x, heights[node]) for node in way for x in (left[node], left[node] + frame.width)]
        points = ends[1:-1]  # from the right of the first box to the left of the last
        routes[edge] = points if way[0] == edge[0] else points[::-1]
    places = {node: (left[node], heights[node]) for node in depth}
    size = (max(left.values()) + frame.width, max(heights.values()) + frame.height / 2)
    return Drawing(places, routes, size)


def depths(edges: Iterable[Edge]) -> dict[Node, int]:
    """How many steps lead from each node to an end, at most; what closes a circle counts turned."""
    after: dict[Node, list[Node]] = {}
    for source, target in sorted(edges, key=str):
        after.setdefault(source, []).append(target)
        after.setdefault(target, [])
    done: dict[Node, int] = {}

    def visit(node: Node, way: tuple[Node, ...]) -> None:
        for target in after[node]:
            if target not in done and target not in (*way, node):
                visit(target, (*way, node))
        ends = [done[target] for target in after[node] if target in done]
        done[node] = 1 + max(ends, default=-1)

    for node in sorted(after, key=str):
        if node not in done:
            visit(node, ())
    return done


def _way(edge: Edge, depth: dict[Node, int]) -> list[Node]:
    """The edge's nodes from left to right, with a point for each column that it crosses."""
    source, target = sorted(edge, key=lambda node: -depth[node])
    between = range(depth[source] - 1, depth[target], -1)
    return [source, *((edge, column) for column in between), target]


def _column(node: Node, depth: dict[Node, int]) -> int:
    return depth[node] if node in depth else node[1]


def _ordered(depth: dict[Node, int], steps: list[Edge]) -> list[list[Node]]:
    """Columns from the ends to the left, each in the order with the fewest crossings seen."""
    nodes = sorted({*depth, *(node for step in steps for node in step)}, key=str)
    columns = [
        [node for node in nodes if _column(node, depth) == column]
        for column in range(max(depth.values()) + 1)
    ]
    best = columns
    for sweep in range(SWEEPS):
        columns = [*columns]
        order = range(1, len(columns)) if sweep % 2 == 0 else range(len(columns) - 2, -1, -1)
        for column in order:
            other = columns[column - 1 if sweep % 2 == 0 else column + 1]
            columns[column] = _by_means(columns[column], other, steps)
        if _crossings(columns, steps) < _crossings(best, steps):
            best = columns
    return best


def _neighbours(node: Node, steps: list[Edge]) -> list[Node]:
    return [b if a == node else a for a, b in steps if node in (a, b)]


def _by_means(column: list[Node], other: list[Node], steps: list[Edge]) -> list[Node]:
    rank = {node: position for position, node in enumerate(other)}

    def mean(node: Node) -> float:
        near = [rank[each] for each in _neighbours(node, steps) if each in rank]
        return sum(near) / len(near) if near else column.index(node)

    return sorted(column, key=mean)


def _crossings(columns: list[list[Node]], steps: list[Edge]) -> int:
    rank = {node: position for column in columns for position, node in enumerate(column)}
    column = {node: number for number, nodes in enumerate(columns) for node in nodes}
    return sum(
        (rank[a] - rank[c]) * (rank[b] - rank[d]) < 0
        for i, (a, b) in enumerate(steps)
        for c, d in steps[:i]
        if column[a] == column[c]
    )


def _heights(columns: list[list[Node]], steps: list[Edge], frame: Frame) -> dict[Node, float]:
    """Each node near the mean of its neighbours, in its column's order, boxes apart."""
    real = {node for node in (n for column in columns for n in column) if not _bend(node)}
    height = {node: position * frame.height for c in columns for position, node in enumerate(c)}
    near = {node: _neighbours(node, steps) for column in columns for node in column}
    for sweep in range(SWEEPS):
        for column in columns if sweep % 2 == 0 else columns[::-1]:
            wished = [sum(height[n] for n in near[node]) / len(near[node]) for node in column]
            room = [frame.height if node in real else frame.above for node in column]
            gaps = [(a + b) / 2 + frame.above for a, b in pairwise(room)]
            height |= dict(zip(column, apart(wished, gaps), strict=True))
    top = min(height[node] for node in height)
    return {node: value - top + frame.height / 2 for node, value in height.items()}


def _bend(node: Node) -> bool:
    return isinstance(node, tuple) and isinstance(node[0], tuple)


def apart(wished: list[float], gaps: list[float]) -> list[float]:
    """The nearest values, in squares, that grow by these gaps at least."""
    offsets = [sum(gaps[:position]) for position in range(len(wished))]
    blocks: list[list[float]] = []
    for value, offset in zip(wished, offsets, strict=True):
        blocks.append([value - offset])
        while len(blocks) > 1 and _mean(blocks[-2]) >= _mean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    level = [_mean(block) for block in blocks for _ in block]
    return [value + offset for value, offset in zip(level, offsets, strict=True)]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
