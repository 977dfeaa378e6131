"""Names of :mod:`attnmem.store`, for code that has not been renamed yet."""

from .store import *  # noqa: F403
from .store import PACKAGE, SHIPPED, commit  # noqa: F401
