"""attnmem: how much can attention memorize?

The library behind the book of the same question. Two attention layers, each written once as a pure
function over a NamedTuple of weights, the constructions that fill those weights by theorem, and
the measurements that fill them by training.

Rooms, from the ground up (nothing imports upwards):

========================  =======================================================================
``checks``                refusing bad input, by name
``bounds``                every capacity formula, one function each
``balls``                 real numbers with proven error bounds
``attention``             the two layers
``independence``          rank, Kruskal rank, general position: numerical, exact, sampled, certified
``certificates``          proofs that a layer memorizes
``tasks``                 the data sets of the experiments
``rows``                  what a measurement is, and its text: configurations, outcomes, kinds
``results``               the store of rows: one file for each experiment and profile
``scaling``               fits, intervals, which law the data prefer
``reporting``             what a chapter leaves behind: glued numbers and verdicts on claims
``constructions``         weights by theorem or at random; which sequences can be told apart
``training``              many models trained at once
``descent``               many tiny models trained on a few sequences each
``experiments``           the published grids, and how to run them (``python -m attnmem``)
``capacity``              how many associations training memorizes, by bisection
``figures``               drawing: data in, Axes out
========================  =======================================================================
"""

__version__ = "0.1.0"
