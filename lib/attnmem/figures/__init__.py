"""Drawing: data in, Axes out. Nothing here computes a result, and nothing is saved.

Theory is drawn dashed, data as solid lines or dots. The colours are those of Okabe and Ito, which
colour-blind readers can tell apart. Captions are in the chapters, so no figure has a title. Every
function draws into ``ax``, by default the current axes, and returns it.

The module needs matplotlib and raises ``ImportError`` without it.
"""

from .mechanisms import (
    attended_path,
    decay,
    detection,
    finite_scale,
    logit_fan,
    logit_map,
    memorized,
    rank_staircase,
    residual_cliff,
    saturation_map,
    sharpening,
    spectra,
    wiring,
)
from .style import (
    BLUE,
    CYCLE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    STYLES,
    THEORY,
    use_style,
)
from .sweeps import (
    between,
    bounds_below,
    capacities,
    curves,
    curves_with_bands,
    laws,
    shares_reached,
    spans,
)

__all__ = [
    "BLUE",
    "CYCLE",
    "GREEN",
    "GREY",
    "ORANGE",
    "PURPLE",
    "STYLES",
    "THEORY",
    "attended_path",
    "between",
    "bounds_below",
    "capacities",
    "curves",
    "curves_with_bands",
    "decay",
    "detection",
    "finite_scale",
    "laws",
    "logit_fan",
    "logit_map",
    "memorized",
    "rank_staircase",
    "residual_cliff",
    "saturation_map",
    "shares_reached",
    "sharpening",
    "spans",
    "spectra",
    "use_style",
    "wiring",
]
