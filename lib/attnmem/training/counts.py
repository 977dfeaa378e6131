"""How many numbers a run trains, counted in three ways."""

from __future__ import annotations

from .. import bounds
from ..results import Run
from .initial import generator
from .models import FAMILIES
from .transformers import VARIANTS

TABLES = ("embedding", "unembedding", "positions", "W_E", "b_E", "W_D", "b_D")


def layer_parameter_count(run: Run) -> int:
    """How many trained numbers belong to a model's layers: heads, their maps, feed-forward layers.

    Left out are the tables, which publications on large models often leave out: embeddings of
    tokens and positions, the unembedding or decoder, and the embedding of queries and contexts.

    Args:
        run: Any run.

    Returns:
        The number. :func:`attnmem.training.parameter_count` counts the tables, too.
    """
    P = FAMILIES[run.model].initial(run, generator(run, "weights"))
    return sum(x.numel() for name, x in P.items() if name.split(".")[0] not in TABLES)


def dimension(run: Run) -> int | None:
    """Dimension of the family of functions that a run's model can be, if it is known.

    Args:
        run: Any run.

    Returns:
        What :func:`attnmem.bounds.aot_dimension` or :func:`attnmem.bounds.mha_dimension` counts.
        None for several layers, and for maps that all heads share to a space wider than ``d``.
    """
    if run.model == "mha":
        shared = run.context == "shared"
        return bounds.mha_dimension(run.H, run.d_h, run.d, run.n, shared=shared, classes=run.N)
    variant = VARIANTS[run.variant]
    if run.layers > 1 or (variant.shared_maps and run.d_h > run.d):
        return None
    return bounds.aot_dimension(
        run.H,
        run.d_h,
        run.d,
        run.N,
        width=run.width or 0,
        shared_maps=variant.shared_maps,
        position_in_skip=variant.position_in_skip,
    )
