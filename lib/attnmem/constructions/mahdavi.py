r"""Theorem 1 of Mahdavi et al. 2024, built: multi-head attention weights that memorize.

The proof asks two things of each head ``h``. On the few examples that it *serves*, its attention
weights are chosen freely (Claim 1). On all others it is *saturated*: it looks at one token,
whatever was chosen (Claim 2). Then every head adds as many independent rows to the feature matrix
``Z`` as it serves examples (Step 1, in ``attnmem.constructions.serving``), and a read-out of
full-rank ``Z`` meets any labels (Step 2). One product of rank at most ``r = min(n, d_h)`` does both
parts of Step 1:

.. math:: W_K W_Q^\top = \sum_{s \text{ served}} x_s f_s^\top + c \, u v^\top .

Every head here serves the same number of examples, the least that suffices, and no head serves the
first example. All steps are batched over the heads.
"""

from __future__ import annotations

import functools

import torch
from jaxtyping import Float
from torch import Tensor

from ..attention import MHAWeights, attend, mha
from ..bounds import mha_capacity
from ..checks import (
    check_distinct_examples,
    check_example_sizes,
    check_examples,
    check_integer,
    check_seed,
    checked_by,
    refuse,
)
from ..independence import numerical_rank
from .generic import on_cpu
from .serving import (
    attention_maps,
    dual_basis,
    interpolating_keys,
    orthogonal_direction,
    saturating_scale,
    separating_direction,
    serve,
)
from .units import in_units

__all__ = [
    "attention_maps",
    "dual_basis",
    "factor",
    "interpolating_keys",
    "memorize_mha",
    "orthogonal_direction",
    "read_out",
    "saturating_scale",
    "separating_direction",
    "serve",
]

DRAWS = 5  # constructions tried before the data are called degenerate
TOLERANCE = 1e-9  # of the largest label: a tenth of the error that the book claims


# --- Step 2: the read-out -------------------------------------------------------------------------


def read_out(
    Z: Float[Tensor, "T Hd"], labels: Float[Tensor, "T d_out"], refinements: int = 1
) -> Float[Tensor, "Hd d_out"]:
    """The least-norm ``M`` with ``Z M = labels``, for ``Z`` of full row rank.

    It is computed by a QR decomposition of ``Z^T`` and refined against the residual.

    Args:
        Z: Features, one row for each example.
        labels: Labels, one row for each example.
        refinements: How often the solution is refined.

    Returns:
        ``M``.

    Source: Mahdavi et al. 2024, proof of Theorem 1, Step 2.
    """
    Q, R = torch.linalg.qr(Z.mT)
    M = torch.zeros(Z.shape[1], labels.shape[1], dtype=Z.dtype, device=Z.device)
    for _ in range(1 + refinements):
        M = M + Q @ torch.linalg.solve_triangular(R.mT, labels - Z @ M, upper=False)
    return M


def factor(
    M: Float[Tensor, "H d d_out"], value_dim: int, W_D: Float[Tensor, "d_o d_out"]
) -> tuple[Float[Tensor, "H d d_v"], Float[Tensor, "H*d_v d_o"]]:
    """Split a read-out into ``W_V`` and ``W_O`` with ``W_V,h W_O,h W_D = M_h`` for every head.

    ``W_V,h`` is ``M_h`` with zero columns up to ``d_v``. Each ``W_O,h`` is the left inverse of
    ``W_D``, with zero rows.

    Args:
        M: The read-out of each head.
        value_dim: Width of the values ``d_v``, at least ``d_out``.
        W_D: The decoder, of full column rank.

    Returns:
        ``W_V`` and ``W_O``.
    """
    heads, dim, outputs = M.shape
    W_V = torch.cat([M, M.new_zeros(heads, dim, value_dim - outputs)], dim=-1)
    undo = torch.cat([torch.linalg.pinv(W_D), W_D.new_zeros(value_dim - outputs, len(W_D))])
    return W_V, undo.repeat(heads, 1)


# --- the theorem ----------------------------------------------------------------------------------


def _check_examples(contexts, queries, labels, heads, head_dim, seed, value_dim, skip) -> None:
    check_examples(contexts, queries, labels)
    for name, value in (("heads", heads), ("head_dim", head_dim)):
        check_integer(name, value)
    check_seed(seed)
    _check_sizes(contexts, queries, labels, value_dim, skip)
    check_distinct_examples(contexts, queries, labels)
    _check_assumptions(contexts, queries, heads, head_dim)


def _check_sizes(contexts, queries, labels, value_dim, skip) -> None:
    d, outputs = queries.shape[1], labels.shape[1] if labels.ndim == 2 else 1
    check_example_sizes(contexts, queries, labels)
    if value_dim is not None:
        check_integer("value_dim", value_dim)
        if value_dim < outputs:
            refuse("value_dim", value_dim, f"at least d_out = {outputs}")
    if skip and outputs > d:
        refuse("labels", f"d_out = {outputs}", f"at most d = {d} with a skip connection")


def _check_assumptions(contexts, queries, heads, head_dim) -> None:
    """Check the theorem's hypotheses except the queries' independence, which the steps check."""
    n, d = contexts.shape[-2:]
    if n >= d:
        refuse("contexts", f"n = {n} tokens in dimension d = {d}", "n < d")
    capacity = mha_capacity(heads, n, head_dim)
    if len(queries) > capacity:
        room = f"T <= H (r - 1) + 1 = {capacity} for H = {heads}, r = min(n, head_dim)"
        refuse("labels", f"T = {len(queries)} examples", f"{room} = {min(n, head_dim)}")
    if not queries.any(dim=1).all():
        refuse("queries", "a zero vector", "Kruskal rank at least 1")
    ranks = torch.as_tensor(numerical_rank(contexts, dtype=torch.float64)).reshape(-1)
    if (ranks < n).any():
        poor = int((ranks < n).nonzero()[0])
        refuse("contexts", f"rank {int(ranks[poor])} in context {poor}", f"rank n = {n}")


@on_cpu
@checked_by(_check_examples)
@torch.no_grad()
def memorize_mha(
    contexts: Float[Tensor, "*T n d"],
    queries: Float[Tensor, "T d"],
    labels: Float[Tensor, "T *d_out"],
    *,
    heads: int,
    head_dim: int,
    seed: int,
    value_dim: int | None = None,
    skip: bool = False,
) -> MHAWeights:
    """Build one multi-head attention layer that reproduces every label.

    ``mha(weights, contexts, queries, skip=skip)`` equals ``labels``, as ``(T, d_out)``, within 1e-9
    of the largest label. This holds for any ``T`` up to ``mha_capacity(heads, n, head_dim)``.

    Args:
        contexts: Contexts, own ``(T, n, d)`` or shared ``(n, d)``, with ``n < d``, each of rank
            ``n`` (Assumption 2).
        queries: One query a row, of Kruskal rank at least ``n`` (Assumption 1). Rank ``ceil((T - 1)
            / H) + 1`` suffices, which covers Remark 1.
        labels: Reals, ``(T, d_out)``, or ``(T,)`` for ``d_out = 1``.
        heads: Number of heads ``H``.
        head_dim: Head dimension ``d_h``.
        seed: Seed of the random directions, at least 0.
        value_dim: Width of the values ``d_v``, at least ``d_out``, which is the default.
        skip: Whether the layer has a skip connection (``d_o = d``), which needs ``d_out <= d``.

    Returns:
        The weights, computed in float64 whatever the precision of the input.

    Raises:
        ValueError: If sizes or types do not fit, an entry is not finite, ``n >= d``, ``T`` exceeds
            the capacity, tokens of a context or queries are dependent, or they are so close to
            dependent that float64 cannot tell.

    Example:
        >>> E, e, y = torch.rand(8, 16), torch.rand(25, 16), torch.rand(25)
        >>> weights = memorize_mha(E, e, y, heads=8, head_dim=4, seed=0)
        >>> bool((mha(weights, E, e)[:, 0] - y).abs().max() < 1e-8)
        True

    Source: Mahdavi et al. 2024, Theorem 1 and Remark 1; with ``skip``, Appendix C.
    """
    how = {"heads": heads, "head_dim": head_dim, "seed": seed, "skip": skip}
    build = functools.partial(_build, **how, value_dim=value_dim or labels[0].numel())
    return in_units(build, contexts, queries, labels, skip)


def _build(contexts, queries, targets, *, heads, head_dim, seed, value_dim, skip) -> MHAWeights:
    """The layer for data in their units."""
    W_D = _decoder(queries, targets, skip)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(DRAWS):
        W_Q, W_K = attention_maps(contexts, queries, heads, generator)
        maps = [_widened(W, head_dim) for W in (W_Q, W_K)]
        rest = targets - queries @ W_D if skip else targets
        Z = attend(*maps, contexts, queries)[1]  # (T, H, d)
        M = read_out(Z.flatten(-2), rest).unflatten(0, Z.shape[1:])
        weights = MHAWeights(*maps, *factor(M, value_dim, W_D), W_D)
        error = _error(weights, contexts, queries, targets, skip)
        if error <= TOLERANCE * targets.abs().max():
            return weights
    got = f"nearly dependent contexts or queries (error {error:.1e} after {DRAWS} draws)"
    return refuse("contexts, queries", got, "data that float64 tells from dependent ones")


def _decoder(queries: Tensor, targets: Tensor, skip: bool) -> Float[Tensor, "d_o d_out"]:
    """``W_D``: the identity, or with a skip a few coordinates, at the scale of the labels.

    Appendix C leaves it free. At another scale labels and query would cancel digits.
    """
    outputs = targets.shape[1]
    eye = torch.eye(queries.shape[1] if skip else outputs, outputs).to(queries)
    scale = targets.abs().max() / queries.abs().max() if skip else 1.0
    return eye * scale


def _error(
    weights: MHAWeights, contexts: Tensor, queries: Tensor, targets: Tensor, skip: bool
) -> Float[Tensor, ""]:
    """Largest error, computed in reverse order so that shared rounding errors hide nothing."""
    contexts = contexts.flip(0) if contexts.ndim == 3 else contexts
    outputs = mha(weights, contexts, queries.flip(0), skip=skip)
    return (outputs.flip(0) - targets).abs().max()


def _widened(W: Float[Tensor, "H d r"], head_dim: int) -> Float[Tensor, "H d d_h"]:
    return torch.cat([W, W.new_zeros(*W.shape[:2], head_dim - W.shape[2])], dim=-1)
