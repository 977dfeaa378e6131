"""Every capacity formula of the two papers and of this book, one function each.

Prose, figures and tests call these functions, so that no formula is written twice. The letters are
those of the notation page: ``H`` heads, ``n`` context length, ``d`` embedding dimension, ``d_h``
head dimension, ``T`` examples, ``N`` vocabulary, ``T_0`` sequences. All sizes are integers of at
least 1. Other values raise ``ValueError``.
"""

from .capacities import (
    aot_capacity,
    mha_capacity,
    previous_aot_capacity,
    random_bigrams_risk,
    relu_capacity,
    scalar_capacity,
)
from .dimensions import (
    best_groups,
    group_rank,
    own_context_ceiling,
    own_context_floor,
    shared_context_floor,
)
from .information import (
    accuracy_to_associations,
    accuracy_to_bits,
    associations_to_accuracy,
    different_draws,
    error_to_bits,
    loss_to_bits,
)
from .parameters import (
    aot_dimension,
    aot_parameters,
    mha_dimension,
    mha_parameters,
    relu_parameters,
)
from .ranks import (
    affine_rank,
    affine_span_rank,
    own_context_rank,
    shared_context_ceiling,
    shared_context_rank,
)
from .sequences import sequences_ceiling, sequences_floor

__all__ = [
    "accuracy_to_associations",
    "accuracy_to_bits",
    "affine_rank",
    "affine_span_rank",
    "aot_capacity",
    "aot_dimension",
    "aot_parameters",
    "associations_to_accuracy",
    "best_groups",
    "different_draws",
    "error_to_bits",
    "group_rank",
    "loss_to_bits",
    "mha_capacity",
    "mha_dimension",
    "mha_parameters",
    "own_context_ceiling",
    "own_context_floor",
    "own_context_rank",
    "previous_aot_capacity",
    "random_bigrams_risk",
    "relu_capacity",
    "relu_parameters",
    "scalar_capacity",
    "sequences_ceiling",
    "sequences_floor",
    "shared_context_ceiling",
    "shared_context_floor",
    "shared_context_rank",
]
