"""One's own data and one's own layer: what holds for them, and which weights memorize them.

``data`` reads arrays, lists, data frames and tensors;
``layer`` is one layer in the dimensions that the data have, its derivative and its fit;
``examine`` says what holds, and how many labels can be met;
``memorize`` finds weights;
``modules`` goes to and from torch;
``capacity`` counts for a layer from its configuration;
``commands`` are the commands.
"""

from .capacity import Capacity, capacity, from_config
from .data import cut
from .examine import Examination, examine
from .memorize import Memorized, memorize
from .modules import FromTorch, from_torch, load_weights, save, to_torch

__all__ = [
    "Capacity",
    "Examination",
    "FromTorch",
    "Memorized",
    "capacity",
    "cut",
    "examine",
    "from_config",
    "from_torch",
    "load_weights",
    "memorize",
    "save",
    "to_torch",
]
