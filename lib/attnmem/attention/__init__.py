"""The two papers' attention layers, and the orders of multiplication in which they are computed.

``layers`` holds the layers, their weights and what they refuse;
``products`` the products, softmaxes, sums and look-ups that layers and training share;
``pairs`` and ``embedded`` the losses that are trained, with their gradients written out;
``tangents`` the derivative of a layer with one output, and linear changes of its data.

Sources: Mahdavi et al. 2024, Sec. 3 (``mha``); Dana et al. 2025, equations (1)-(2) (``aot``).
"""

from .embedded import EmbeddedWeights, embedded_losses
from .layers import (
    AoTWeights,
    MHAWeights,
    aot,
    aot_features,
    check_skip,
    mha,
    mha_attention,
    mha_features,
)
from .products import attend, attention_weights, look_up

__all__ = [
    "AoTWeights",
    "EmbeddedWeights",
    "MHAWeights",
    "aot",
    "aot_features",
    "attend",
    "attention_weights",
    "check_skip",
    "embedded_losses",
    "look_up",
    "mha",
    "mha_attention",
    "mha_features",
]
