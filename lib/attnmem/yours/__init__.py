"""Your own data and your own layer: how many labels it holds, which weights do, and what hinders.

``layer`` is one layer in the dimensions that the data have; ``modules`` goes to and from torch.
"""

from .capacity import Capacity, capacity
from .data import cut
from .editing import Memory
from .examine import Bound, Examination, Tested, examine
from .files import Loaded, load
from .layer import Rank
from .memorize import Memorized, memorize, predict
from .models import ModelCapacity, model_capacity
from .modules import FromTorch, SavedLayer, from_torch, saved_layer, to_torch

__all__ = ["Bound", "Capacity", "Examination", "FromTorch", "Loaded", "Memorized", "Rank"]
__all__ += ["Memory", "SavedLayer", "Tested", "capacity", "cut", "examine", "from_torch"]
__all__ += ["ModelCapacity", "load", "memorize", "model_capacity", "predict", "saved_layer"]
__all__ += ["to_torch"]
