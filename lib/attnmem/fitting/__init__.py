"""Training a layer with one output on all examples at once, in float64, by three optimizers.

All of them start from the weights that they are given and stop when every label is met. (Adam looks
after some of its steps only, so it may leave a start that meets them.) Whether they can is a
question of the optimizer and of the number of examples, so the data, the start and the derivative
(:mod:`attnmem.attention.tangents`) are the same for all.

``problem`` holds what is asked of an optimizer, and where it ended;
``newton`` Levenberg-Marquardt, which solves a linear system for each step;
``gradients`` L-BFGS, which remembers the last gradients, and Adam, which follows a schedule;
``limits`` measures what stops them.
"""

from .gradients import adam, lbfgs
from .limits import Limits, limits
from .newton import levenberg_marquardt
from .problem import MET, Fit

__all__ = ["MET", "Fit", "Limits", "adam", "lbfgs", "levenberg_marquardt", "limits"]
