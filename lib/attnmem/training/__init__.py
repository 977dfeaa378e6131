"""Many small models trained at once: runs that share shapes are stacked along a leading axis.

Every run keeps its own seed for weights, data and order, so a run in a stack follows the same path
as the same run alone, up to the rounding of batched products.

``initial`` draws weights, ``transformers`` and ``models`` hold the models, ``gradients`` says how
gradients follow from their losses, ``data`` holds their data,
``engine`` the steps of a stack, ``protocols`` the published ways to train, ``trainer`` the whole of
a training.
"""

from .checkpoints import forget
from .counts import dimension, layer_parameter_count
from .data import examples
from .initial import generator
from .models import (
    FAMILIES,
    Family,
    mha_heads,
    mha_losses,
    mha_outputs,
    mha_parameters,
    parameter_count,
    sinusoids,
)
from .protocols import PROTOCOLS, SATURATED, linear_by_epoch, warmup_cosine
from .single import descend, xavier
from .trainer import configuration, opening, operations, selfcheck, stacks, train
from .transformers import VARIANTS, Variant, aot_logits, aot_parameters

__all__ = [
    "FAMILIES",
    "PROTOCOLS",
    "SATURATED",
    "VARIANTS",
    "Family",
    "Variant",
    "aot_logits",
    "aot_parameters",
    "configuration",
    "descend",
    "dimension",
    "examples",
    "forget",
    "generator",
    "layer_parameter_count",
    "linear_by_epoch",
    "mha_heads",
    "mha_losses",
    "mha_outputs",
    "mha_parameters",
    "opening",
    "operations",
    "parameter_count",
    "selfcheck",
    "sinusoids",
    "stacks",
    "train",
    "warmup_cosine",
    "xavier",
]
