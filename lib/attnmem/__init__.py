"""attnmem: how much can attention memorize?

This is the library behind the book of the same question. It defines two attention layers, each as a
pure function over a named tuple of weights. The weights are constructed by theorem or trained by
measurement, and both use the same functions.

Rooms, from the ground up. A room imports only from rooms above its own line:

========================  =======================================================================
``checks``                checks of arguments, with errors that name them
``examples``              examples that a layer is to memorize: shapes, units, refusals
``bounds``                every capacity formula, one function each
``balls``                 real numbers with proven error bounds
``attention``             the layers of both papers, and layers one after the other
``independence``          rank, Kruskal rank, general position: numerical, exact, sampled, certified
``tasks``                 the data sets of the experiments
``store``                 the store of rows: one file for each experiment and profile
``scaling``               laws fitted to curves, intervals, which law the data prefer
``reporting``             what a chapter leaves behind: glued numbers and verdicts on claims
``constructions``         weights by theorem or at random; which sequences can be told apart
``certificates``          proofs that a layer memorizes, or that exact weights are near
``training``              many models trained at once
``tiny_transformers``     many tiny models trained on a few sequences each
``fitting``               layers trained on all examples at once, until every label is met
``linear_memory``         the linear associative memory, which calibrates counts of bits
``features``              features of real models, and the images and texts that they read
``yours``                 your own data and layer: what holds, how many labels, which weights
``studies``               what is measured: grids, searches, tests; running them, reading rows
``figures``               drawing: data in, Axes out
``record``                an experiment in one form: protocol, what is stored, curves, means
``experiments``           the studies as chapters call them (``python -m attnmem run``)
``__main__``              the command line, ``python -m attnmem``
========================  =======================================================================
"""

__version__ = "0.1.0"
