"""Embeddings looked up in tables, with gradients that repeat bit for bit."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def look_up(
    embedding: Float[Tensor, "*runs N d"], tokens: Int[Tensor, "*data B S"]
) -> Float[Tensor, "*allruns B S d"]:
    """The embedding of every token, each run from its own table.

    The gradient repeats bit for bit, on a GPU too, and nothing waits for the host, so that a step
    may be captured.

    Args:
        embedding: One row for every token of the vocabulary.
        tokens: Integers in ``[0, N)``, one sequence a row.

    Returns:
        The rows that the tokens choose.
    """
    runs = torch.broadcast_shapes(embedding.shape[:-2], tokens.shape[:-2])
    N, d = embedding.shape[-2:]
    table = embedding.expand(*runs, N, d).reshape(-1, N, d)
    chosen = tokens.expand(*runs, *tokens.shape[-2:]).flatten(-2).reshape(len(table), -1)
    # index_select adds gradients in order on a CPU, and in any order on a GPU.
    found = (_Rows.apply if table.is_cuda else _rows)(table, chosen)
    return found.view(*runs, *tokens.shape[-2:], d)


def _rows(table: Float[Tensor, "R N d"], chosen: Int[Tensor, "R m"]) -> Float[Tensor, "R m d"]:
    # Not F.embedding: its backward pass may wait for the host.
    R, N, d = table.shape
    first = N * torch.arange(R, device=table.device)
    rows = table.reshape(-1, d).index_select(0, (chosen + first[:, None]).flatten())
    return rows.view(R, -1, d)


class _Rows(torch.autograd.Function):
    """:func:`_rows`; the gradient of the table is a product with the tokens' indicators."""

    @staticmethod
    def forward(ctx, table, chosen):
        ctx.save_for_backward(chosen)
        ctx.N = table.shape[-2]
        return _rows(table, chosen)

    @staticmethod
    def backward(ctx, g):
        [chosen] = ctx.saved_tensors
        vocabulary = torch.arange(ctx.N, device=g.device)
        return (chosen[..., None, :] == vocabulary[:, None]).to(g.dtype) @ g, None
