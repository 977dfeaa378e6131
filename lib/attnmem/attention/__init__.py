"""The two papers' attention layers, and the orders of multiplication in which they are computed.

``layers`` holds the layers, their weights and what they refuse;
``products`` the products, softmaxes and sums that layers and training share;
``short`` the same for contexts of a few tokens;
``pairs`` the same for pairs of tokens of a vocabulary, with the loss of what follows them;
``losses`` losses of single examples;
``embedded`` the loss of heads with scalar values on embedded data;
``tables`` the embeddings of tokens;
``once`` a mark for gradients that are written out;
``tangents`` the derivative of a layer with one output;
``coordinates`` linear changes of its data.

Sources: Mahdavi et al. 2024, Sec. 3 (``mha``); Dana et al. 2025, equations (1)-(2) (``aot``).
"""

from .embedded import EmbeddedWeights, embedded_losses
from .layers import (
    AoTWeights,
    MHAWeights,
    aot,
    aot_features,
    check_aot,
    check_features,
    check_skip,
    mha,
    mha_attention,
    mha_features,
)
from .pairs import Maps, after_pairs, next_token_losses
from .products import (
    OWN,
    SHARED,
    add_heads,
    attend,
    attend_and_add,
    attention_logits,
    attention_weights,
    combine_heads,
    head_values,
    over_tokens,
)
from .short import attend_and_add_columns
from .tables import look_up

__all__ = [
    "OWN",
    "SHARED",
    "AoTWeights",
    "EmbeddedWeights",
    "MHAWeights",
    "Maps",
    "add_heads",
    "after_pairs",
    "aot",
    "aot_features",
    "attend",
    "attend_and_add",
    "attend_and_add_columns",
    "attention_logits",
    "attention_weights",
    "check_aot",
    "check_features",
    "check_skip",
    "combine_heads",
    "embedded_losses",
    "head_values",
    "look_up",
    "mha",
    "mha_attention",
    "mha_features",
    "next_token_losses",
    "over_tokens",
]
