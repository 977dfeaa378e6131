"""Features of real models: the tokens that an attention layer meets, on real images and real text.

``encoders`` cuts models after their first blocks and computes features, ``corpora`` gives the
images and the text, ``pretrained`` trains small models for machines that reach no hub.
"""

from .corpora import normalized
from .encoders import (
    FAMILIES,
    PUBLISHED,
    Encoder,
    Maps,
    Seen,
    collect,
    exact_embeddings,
    feature_maps,
    head_features,
    random_attention,
    random_encoder,
    trained_encoder,
)

__all__ = [
    "FAMILIES",
    "PUBLISHED",
    "Encoder",
    "Maps",
    "Seen",
    "collect",
    "exact_embeddings",
    "feature_maps",
    "head_features",
    "normalized",
    "random_attention",
    "random_encoder",
    "trained_encoder",
]
