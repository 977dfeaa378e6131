"""Many small models trained at once: runs that share shapes are stacked along a leading axis.

Every run keeps its own seed for weights, data and order, so a run in a stack follows the same path
as the same run alone, up to the rounding of batched products.
"""

from .data import examples, generator
from .models import (
    FAMILIES,
    VARIANTS,
    Family,
    Variant,
    aot_logits,
    aot_parameters,
    dimension,
    layer_parameter_count,
    mha_heads,
    mha_parameters,
    parameter_count,
)
from .one_layer import descend, xavier
from .protocols import PROTOCOLS, SATURATED, warmup_cosine
from .trainer import first_epochs, forget, operations, stacks, train

__all__ = [
    "FAMILIES",
    "PROTOCOLS",
    "SATURATED",
    "VARIANTS",
    "Family",
    "Variant",
    "aot_logits",
    "aot_parameters",
    "descend",
    "dimension",
    "examples",
    "first_epochs",
    "forget",
    "generator",
    "layer_parameter_count",
    "mha_heads",
    "mha_parameters",
    "operations",
    "parameter_count",
    "stacks",
    "train",
    "warmup_cosine",
    "xavier",
]
