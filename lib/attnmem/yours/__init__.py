"""Your own layer: its weights in the book's letters, and how many labels it holds.

``modules`` goes to and from torch, and to and from files;
``capacity`` counts for a layer from its sizes or its configuration;
``commands`` are the commands.
"""

from .capacity import Capacity, capacity, from_config
from .modules import FromTorch, from_torch, load_weights, save, to_torch

__all__ = [
    "Capacity",
    "FromTorch",
    "capacity",
    "from_config",
    "from_torch",
    "load_weights",
    "save",
    "to_torch",
]
