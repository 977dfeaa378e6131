"""Your own data, layer and model: how many labels they hold, which weights do, and what hinders.

The tool beside the book's library ``attnmem``, on whose public names it stands. Its command is
``python -m attnmem_yours``.
"""

from attnmem.theory.capacity import Capacity, capacity
from attnmem.theory.editing import Memory

from .assumptions import Tested
from .data import cut
from .examination import Bound, Examination, examine
from .files import Loaded, load
from .layer import Rank
from .memorization import Memorized, memorize, predict
from .models import ModelCapacity, model_capacity
from .modules import FromTorch, LayerMemory, SavedLayer, from_torch, saved_layer, to_torch
from .silent import Met, meet_labels

__all__ = ["Bound", "Capacity", "Examination", "FromTorch", "LayerMemory", "Loaded", "Memorized"]
__all__ += ["Memory", "Rank", "SavedLayer", "Tested", "capacity", "cut", "examine", "from_torch"]
__all__ += ["ModelCapacity", "load", "memorize", "model_capacity", "predict", "saved_layer"]
__all__ += ["Met", "meet_labels", "to_torch"]
