"""Your own data and your own layer: what holds, how many labels it holds, and which weights do.

``data`` and ``files`` read, ``layer`` is one layer in the dimensions that the data have;
``examine`` says what holds and ``memorize`` finds weights; ``modules`` goes to and from torch;
``capacity`` counts from sizes or a configuration. ``python -m attnmem`` has both as commands.
"""

from .capacity import Capacity, capacity, from_config
from .data import cut
from .examine import Bound, Examination, Tested, examine
from .files import Loaded, load
from .layer import Rank
from .memorize import Memorized, memorize
from .modules import FromTorch, SavedLayer, from_torch, saved_layer, to_torch

__all__ = ["Bound", "Capacity", "Examination", "FromTorch", "Loaded", "Memorized", "Rank"]
__all__ += ["SavedLayer", "Tested", "capacity", "cut", "examine", "from_config", "from_torch"]
__all__ += ["load", "memorize", "saved_layer", "to_torch"]
