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
``results``               the store of measured rows
``scaling``               fits, intervals, which law the data prefer
``reporting``             what a chapter leaves behind: glued numbers and verdicts on claims
``constructions``         weights by theorem or at random; which sequences can be told apart
``training``              many models trained at once
``descent``               many tiny models trained on a few sequences each
``features``              features of real models, and the images and texts that they read
``studies``               what is measured: grids, searches, tests; running them, reading rows
``experiments``           the studies as chapters call them (``python -m attnmem run``)
``figures``               drawing: data in, Axes out
========================  =======================================================================
"""

__version__ = "0.1.0"
