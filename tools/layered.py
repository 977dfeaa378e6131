"""Draw a directed graph in columns: each node left of all that it leads to, and few crossings.

The method of Sugiyama, in its plainest form: columns by the longest path to an end, orders within
them by means of neighbours, heights by least squares. The same graph gives the same drawing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from itertools import combinations, pairwise
from statistics import fmean
from typing import NamedTuple

import numpy as np
from scipy.optimize import isotonic_regression

SWEEPS = 24
Node = Hashable  # a node of the graph, or (edge, column) where an edge crosses a column
Edge = tuple[Node, Node]
Columns = list[list[Node]]  # from the ends, which are drawn on the right, to the left


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


def draw(edges: Iterable[Edge], frame: Frame, alone: Iterable[Node] = ()) -> Drawing:
    """Draw each connected part by itself, the largest first, small ones side by side.

    Nodes that have no edge come last, in their order.
    """
    places, routes, x, y, right, bottom = {}, {}, 0.0, 0.0, 0.0, 0.0
    parts = [_part(part, frame) for part in _parts(edges)]
    for own, paths in parts + [({node: (0.0, frame.height / 2)}, {}) for node in alone]:
        width = max(left for left, _ in own.values()) + frame.width
        if x and x + width > max(frame.page, right):
            x, y = 0.0, bottom + 2 * frame.above
        places |= {node: (x + a, y + b) for node, (a, b) in own.items()}
        routes |= {edge: [(x + a, y + b) for a, b in path] for edge, path in paths.items()}
        right = max(right, x + width)
        points = [*places.values(), *(point for path in routes.values() for point in path)]
        bottom = max(b for _, b in points) + frame.height / 2
        x += width + frame.aside
    return Drawing(places, routes, (right, bottom))


def _parts(edges: Iterable[Edge]) -> list[list[Edge]]:
    parts: list[set[Node]] = []
    edges = sorted(set(edges), key=str)
    for edge in edges:
        touched = [part for part in parts if part & {*edge}]
        parts = [part for part in parts if part not in touched] + [set(edge).union(*touched)]
    parts.sort(key=lambda part: (-len(part), str(min(part, key=str))))
    return [[edge for edge in edges if edge[0] in part] for part in parts]


def _part(edges: list[Edge], frame: Frame) -> tuple[dict, dict]:
    """The places and the routes of a connected part."""
    depth = _depths(edges)
    paths = {edge: _path(edge, depth) for edge in edges}
    steps = [step for path in paths.values() for step in pairwise(path)]
    near = defaultdict(list)
    for a, b in steps:
        near[a].append(b)
        near[b].append(a)
    column = {n: depth[path[0]] - i for path in paths.values() for i, n in enumerate(path)}
    nodes = sorted(column, key=str)
    columns = [[n for n in nodes if column[n] == i] for i in range(max(column.values()) + 1)]
    height = _heights(_ordered(columns, steps, near), near, depth, frame)
    pitch = frame.width + frame.aside
    left = {node: (len(columns) - 1 - i) * pitch for node, i in column.items()}
    routes = {}
    for edge, path in paths.items():
        points = [(x, height[n]) for n in path for x in (left[n], left[n] + frame.width)]
        points = points[1:-1]  # from the right of the first box to the left of the last
        routes[edge] = points if path[0] == edge[0] else points[::-1]
    return {node: (left[node], height[node]) for node in depth}, routes


def _depths(edges: list[Edge]) -> dict[Node, int]:
    """The longest path from each node to an end; edges that close a circle count as reversed."""
    after: dict[Node, list[Node]] = {}
    for source, target in edges:
        after.setdefault(source, []).append(target)
        after.setdefault(target, [])
    depths: dict[Node, int] = {}

    def visit(node: Node, above: tuple[Node, ...]) -> None:
        for target in after[node]:
            if target not in depths and target not in (*above, node):
                visit(target, (*above, node))
        depths[node] = 1 + max((depths[t] for t in after[node] if t in depths), default=-1)

    for node in sorted(after, key=str):
        if node not in depths:
            visit(node, ())
    return depths


def _path(edge: Edge, depth: dict[Node, int]) -> list[Node]:
    """The edge's nodes from left to right, with a point for each column that it crosses."""
    source, target = sorted(edge, key=lambda node: -depth[node])
    between = range(depth[source] - 1, depth[target], -1)
    return [source, *((edge, column) for column in between), target]


def _ordered(columns: Columns, steps: list[Edge], near: dict[Node, list[Node]]) -> Columns:
    """Sort each column by the means of its neighbours; keep the orders with fewest crossings."""
    best = columns
    for sweep in range(SWEEPS):
        columns, back = [*columns], sweep % 2
        for i in range(len(columns) - 2, -1, -1) if back else range(1, len(columns)):
            rank = {node: j for j, node in enumerate(columns[i + 1 if back else i - 1])}
            mean = {}
            for j, node in enumerate(columns[i]):
                mean[node] = fmean([rank[n] for n in near[node] if n in rank] or [j])
            columns[i] = sorted(mean, key=mean.get)
        best = min(best, columns, key=lambda order: _crossings(order, steps))
    return best


def _crossings(columns: Columns, steps: list[Edge]) -> int:
    rank = {node: (i, j) for i, column in enumerate(columns) for j, node in enumerate(column)}
    gaps = defaultdict(list)
    for a, b in steps:
        gaps[rank[a][0]].append((rank[a][1], rank[b][1]))
    pairs = (pair for gap in gaps.values() for pair in combinations(gap, 2))
    return sum((a - c) * (b - d) < 0 for (a, b), (c, d) in pairs)


def _heights(columns: Columns, near: dict, boxes: Iterable[Node], frame: Frame) -> dict:
    """Each node near the mean of its neighbours, in its column's order, boxes apart."""
    height = {node: i * frame.height for column in columns for i, node in enumerate(column)}
    for sweep in range(SWEEPS):
        for column in columns if sweep % 2 == 0 else columns[::-1]:
            room = [frame.height if node in boxes else frame.above for node in column]
            gaps = [(a + b) / 2 + frame.above for a, b in pairwise(room)]
            least = np.cumsum([0.0, *gaps])
            wished = np.array([fmean(height[n] for n in near[node]) for node in column])
            nearest = isotonic_regression(wished - least).x + least  # in squares
            height |= dict(zip(column, nearest.tolist(), strict=True))
    top = min(height.values())
    return {node: value - top + frame.height / 2 for node, value in height.items()}
