"""The idea, to read in an evening: two layers, what they can memorize, and weights that do.

Read the files in this order:

1. ``layers``: attention as one function of its weights, in the letters of each paper.
2. ``stacked``: such layers one after the other.
3. ``bounds``: how much they can memorize, by counting what their outputs show of the weights.
4. ``memorize``: weights that memorize, written down as Theorem 1 of Mahdavi et al. proves them.
5. ``sequences``: weights that predict next tokens, as far as Theorem 1 of Dana et al. is true.
6. ``descent``: other weights that memorize, found by gradient descent, in one loop.
7. ``random``: weights drawn at random, which show what almost all weights do.

``checks`` and ``examples`` beside this folder refuse bad input; a reader may skip them.
"""

from . import bounds
from .descent import descend
from .layers import AoTWeights, MHAWeights, aot, aot_features, mha, mha_attention, mha_features
from .memorize import memorize_mha
from .random import random_deep, random_mha, xavier
from .sequences import memorize_aot
from .stacked import DeepWeights, Layer, deep

__all__ = ["AoTWeights", "MHAWeights", "aot", "aot_features", "mha", "mha_attention"]
__all__ += ["DeepWeights", "Layer", "bounds", "deep", "descend", "memorize_aot", "memorize_mha"]
__all__ += ["mha_features", "random_deep", "random_mha", "xavier"]
