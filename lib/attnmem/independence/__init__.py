"""Linear independence in four ways: numerical rank, exact Kruskal rank, sampled, and certified.

``vectors`` are one a row. ``rtol`` is a relative tolerance from 0 to 1, and ``dtype`` the
arithmetic, float32 or float64, as :func:`numerical_rank` has them.

Source: Mahdavi et al. 2024, Definitions 1 and 2 and Assumptions 1 to 3.
"""

from .certified import CertifiedRank, certified_rank
from .kruskal import kruskal_rank
from .numerical import (
    SampledIndependence,
    SampledKruskalRank,
    numerical_rank,
    sampled_independence,
    sampled_kruskal_rank,
)

__all__ = [
    "CertifiedRank",
    "SampledIndependence",
    "SampledKruskalRank",
    "certified_rank",
    "kruskal_rank",
    "numerical_rank",
    "sampled_independence",
    "sampled_kruskal_rank",
]
