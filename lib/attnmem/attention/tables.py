"""Embeddings looked up in tables, with gradients that repeat bit for bit, on a GPU too."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor


def look_up(
    embedding: Float[Tensor, "*runs N d"], tokens: Int[Tensor, "*data B S"]
) -> Float[Tensor, "*allruns B S d"]:
    """The embedding of every token, each run from its own table.

    Nothing waits for the host, so that a step may be captured.

    Args:
        embedding: One row for every token of the vocabulary.
        tokens: Integers in ``[0, N)``, one sequence a row.

    Returns:
        The rows that the tokens choose.
    """
    runs = torch.broadcast_shapes(embedding.shape[:-2], tokens.shape[:-2])
    N, d = embedding.shape[-2:]
    table = embedding.expand(*runs, N, d).reshape(math.prod(runs), N, d)
    chosen = tokens.expand(*runs, *tokens.shape[-2:]).flatten(-2)
    chosen = chosen.reshape(len(table), chosen.shape[-1])
    rows = _Rows.apply if table.is_cuda else take_rows
    return rows(table, chosen).view(*runs, *tokens.shape[-2:], d)


def take_rows(table: Num[Tensor, "R N d"], chosen: Int[Tensor, "R m"]) -> Num[Tensor, "R m d"]:
    """The rows of each run's table that its integers choose."""
    # The tables are put one below the other. F.embedding's gradient might wait for the host.
    first = table.shape[1] * torch.arange(len(chosen), device=chosen.device)
    rows = table.flatten(0, 1).index_select(0, (chosen + first[:, None]).flatten())
    return rows.view(*chosen.shape, table.shape[-1])


def add_rows(
    rows: Float[Tensor, "R m d"], chosen: Int[Tensor, "R m"], N: int
) -> Float[Tensor, "R N d"]:
    """The gradient of :func:`take_rows`, as one product: on a GPU torch's own adds in any order."""
    vocabulary = torch.arange(N, device=rows.device)
    return (chosen[:, None] == vocabulary[:, None]).to(rows.dtype) @ rows


def take_columns(
    table: Num[Tensor, "*runs d N"], chosen: Int[Tensor, "*runs m"]
) -> Num[Tensor, "*runs d m"]:
    """:func:`take_rows` of tables whose entries are columns; for gradients that are written out."""
    return table.gather(-1, chosen[..., None, :].expand(*table.shape[:-1], -1))


def add_columns(
    columns: Float[Tensor, "R d m"], chosen: Int[Tensor, "R m"], N: int
) -> Float[Tensor, "R d N"]:
    """The gradient of :func:`take_columns`."""
    if columns.is_cuda:  # scatter_add adds in any order there
        return add_rows(columns.mT, chosen, N).mT
    R, d, _ = columns.shape
    sums = columns.new_zeros(R, d, N)
    return sums.scatter_add_(2, chosen[:, None].expand(-1, d, -1), columns)


class _Rows(torch.autograd.Function):
    """:func:`take_rows` with :func:`add_rows`, for a GPU; transforms of ``torch.func`` know it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(table, chosen):
        return take_rows(table, chosen)

    @staticmethod
    def setup_context(ctx, inputs, output):
        table, chosen = inputs
        ctx.save_for_backward(chosen)
        ctx.save_for_forward(chosen)
        ctx.N = table.shape[-2]

    @staticmethod
    def backward(ctx, g):
        [chosen] = ctx.saved_tensors
        return add_rows(g, chosen, ctx.N), None

    @staticmethod
    def jvp(ctx, table, _):
        [chosen] = ctx.saved_tensors
        return take_rows(table, chosen)
