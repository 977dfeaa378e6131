"""The two papers' attention layers, and the orders of multiplication in which they are computed.

Leading axes ``*runs`` stack independent models, equally many in all weights. They and those of the
data broadcast against each other as in torch arithmetic; a single model has none. float32 and
float64 mix as in torch arithmetic too: the computation runs in the wider of them. Contexts hold
tokens as rows, own ``(*runs, B, n, d)`` or shared ``(*runs, n, d)``, with one query ``(*runs, B,
d)`` for each example. Token numbers are in ``[0, N)``; others are refused on a CPU.

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
