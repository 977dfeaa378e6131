"""Your own data and your own layer: what holds, how many labels it holds, and which weights do.

``data`` reads arrays, lists, data frames and tensors, ``files`` reads tables and arrays in files;
``layer`` is one layer in the dimensions that the data have, its ranks and its fit;
``examine`` says what holds for data, and how many of their labels can be met;
``memorize`` finds weights;
``modules`` goes to and from torch, and to and from files;
``capacity`` counts for a layer from its sizes or its configuration;
``commands`` are the commands.
"""

from .capacity import Capacity, capacity, from_config
from .data import cut
from .examine import Bound, Examination, Finding, examine
from .files import Loaded, load
from .layer import Rank
from .memorize import Memorized, memorize
from .modules import FromTorch, SavedLayer, from_torch, load_weights, save, saved_layer, to_torch

__all__ = [
    "Bound",
    "Capacity",
    "Examination",
    "Finding",
    "FromTorch",
    "Loaded",
    "Memorized",
    "Rank",
    "SavedLayer",
    "capacity",
    "cut",
    "examine",
    "from_config",
    "from_torch",
    "load",
    "load_weights",
    "memorize",
    "save",
    "saved_layer",
    "to_torch",
]
