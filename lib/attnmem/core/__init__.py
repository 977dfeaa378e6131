"""The idea, to read in an evening: two layers, what they can memorize, and weights that do.

Read the files in this order:

1. ``layers``: attention as one function of its weights, in the letters of each paper.
2. ``deep``: such layers one after the other.
3. ``bounds``: how much they can memorize, by counting what their outputs show of the weights.
4. ``memorize``: weights that memorize, written down as Theorem 1 of Mahdavi et al. proves them.
5. ``descend``: other weights that memorize, found by gradient descent.
6. ``random``: weights drawn at random, which show what almost all weights do.

``checks`` and ``examples`` beside this folder refuse bad input; a reader may skip them.
"""

from .bounds import (
    DeepGroups,
    affine_rank,
    affine_span_rank,
    aot_capacity,
    best_groups,
    carried_rank,
    deep_ceiling,
    deep_floor,
    deep_groups,
    group_rank,
    mha_capacity,
    own_context_ceiling,
    own_context_floor,
    own_context_rank,
    previous_aot_capacity,
    relu_capacity,
    scalar_capacity,
    sequences_ceiling,
    sequences_floor,
    shared_context_ceiling,
    shared_context_floor,
    shared_context_rank,
)
from .deep import DeepWeights, Layer, deep
from .descend import descend
from .layers import AoTWeights, MHAWeights, aot, aot_features, mha, mha_attention, mha_features
from .memorize import memorize_mha
from .random import random_deep, random_mha, xavier

__all__ = ["AoTWeights", "MHAWeights", "aot", "aot_features", "mha", "mha_attention"]
__all__ += ["DeepWeights", "Layer", "deep", "descend", "memorize_mha", "mha_features"]
__all__ += ["random_deep", "random_mha", "xavier"]
__all__ += ["DeepGroups", "affine_rank", "affine_span_rank", "aot_capacity", "best_groups"]
__all__ += ["carried_rank", "deep_ceiling", "deep_floor", "deep_groups", "group_rank"]
__all__ += ["mha_capacity", "own_context_ceiling", "own_context_floor", "own_context_rank"]
__all__ += ["previous_aot_capacity", "relu_capacity", "scalar_capacity", "sequences_ceiling"]
__all__ += ["sequences_floor", "shared_context_ceiling", "shared_context_floor"]
__all__ += ["shared_context_rank"]
