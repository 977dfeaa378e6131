"""What the constructions, ranks, fits and proofs refuse, each by name; promises that are kept.

Types, sizes and ranges are read from annotations (tests/unit/test_checks.py): of these each
function refuses one here. All that relates its arguments is its own.
"""

import math
import sys

import pytest
import torch

from attnmem import AoTWeights, MHAWeights, memorize_aot, memorize_mha
from attnmem.theory import (
    associations,
    balls,
    cancelling,
    depth,
    fitting,
    scalars,
    sequence_ranks,
    solutions,
)
from attnmem.theory import certificates as proofs
from attnmem.theory import independence as ranks
from attnmem.theory.tangents import ScalarHeads

from oracles import F64, gaussian, uniform


def changed(x, where, to):
    """A copy with other numbers somewhere."""
    x = x.clone()
    x[where] = to
    return x


# --- layers of contexts, queries and labels -------------------------------------------------------

T, N, D = 13, 4, 6
E, e, y = uniform(0, T, N, D), uniform(1, T, D), uniform(2, T)
DATA = {"contexts": E, "queries": e, "labels": y}
EMPTY = {"contexts": E[:0], "queries": e[:0], "labels": y[:0]}
HEADS = {"heads": 4, "head_dim": 4, "seed": 0}
NO_HEADS = {"heads": 0}, "heads: got 0"
ANY_LAYER = [
    ({"labels": y[1:]}, "labels: got T = 12 .* expected T = 13"),
    ({"labels": changed(y, 3, math.inf)}, "labels: got 1 entries that are NaN or infinite"),
    ({"contexts": changed(E, (2, 1, 0), math.nan)}, "contexts: got 1 entries that are NaN"),
    (EMPTY, "contexts: got shape .* expected at least one entry"),
]
THEOREM_1 = [
    NO_HEADS,
    ({"heads": 3}, "labels: got T = 13 .* = 10"),
    ({"head_dim": 3}, "labels: got T = 13 .* = 9"),
    ({"contexts": changed(E, (7, 3), E[7, :3].sum(0))}, "contexts: got rank 3 in context 7"),
    ({"queries": changed(e, 9, e[2])}, "queries: got .* Kruskal rank at least 4"),
    ({"queries": changed(e, 0, 0)}, "queries: got a zero vector"),
    ({"labels": uniform(0, T, 3), "value_dim": 2}, "value_dim: got 2; .* d_out = 3"),
    ({"labels": uniform(0, T, 7), "skip": True}, "labels: got d_out = 7"),
]
CANCELLATION = [NO_HEADS, ({"contexts": E[:, :1]}, "contexts: got n = 1 token")]
DIFFERENCE = [*CANCELLATION, ({"heads": 1}, "labels: got T = 13 examples; expected at most 0")]

CONTEXT, QUERIES, LABELS = uniform(0, 3, 6) - 0.5, uniform(1, 11, 6) - 0.5, uniform(2, 11) - 0.5
ON_A_LINE = QUERIES[:1] * torch.arange(1.0, 12.0)[:, None]
SCALAR = {"context": CONTEXT, "queries": QUERIES, "labels": LABELS, "heads": 3}
SCALARS = [
    NO_HEADS,
    ({"context": CONTEXT[:2]}, "context: got 2 tokens"),
    ({"context": CONTEXT[[0, 1, 1]]}, "context: got 3 tokens"),
    ({"queries": QUERIES[[0] * 8 + [1] * 3]}, "examples: got 0 and 1 equal, with"),
    ({"queries": ON_A_LINE}, "queries: got dependent"),
    ({"queries": QUERIES.log()}, "queries: got .* NaN"),
    ({"queries": changed(QUERIES, 10, QUERIES[:2].sum(0))}, "queries: got example 10 in"),
    ({"heads": 2}, "labels: got T = 11 .* = 10"),
]

START = ScalarHeads(uniform(0, 2, D, 3), uniform(1, 2, D, 3), uniform(2, 2, D))
FIT = {"weights": START, **DATA, "steps": 2}
LIMITS = [
    ({"contexts": E[:, :0]}, "contexts: got shape"),
    ({"labels": 1e71 * y}, "labels: got a largest label of .e"),
    ({"labels": 1e-71 * y}, "labels: got a largest label of .e"),
    ({"contexts": 1e200 * E, "queries": 1e200 * e}, "weights: got weights with which"),
    ({"weights": ScalarHeads(*(w[:0] for w in START))}, "weights.W_Q: got shape"),
]
FITS = [({"steps": 0}, "steps: got 0"), *LIMITS]

ONE = torch.ones(1, 1, **F64)
LAYER = MHAWeights(START.W_Q, START.W_K, START.mu[..., None], ONE.expand(2, 1), ONE)
GIVEN = {"weights": LAYER, "contexts": E, "queries": e}
ENCLOSED = [
    ({"weights": LAYER._replace(W_Q=LAYER.W_Q * math.nan)}, "weights.W_Q: got 36 entries"),
    ({"weights": MHAWeights(*(W[:0] for W in LAYER[:4]), ONE)}, "weights.W_Q: got shape"),
    ({"weights": MHAWeights(*(W[None] for W in LAYER))}, "weights.W_Q: got shape"),
    ({"contexts": E * math.inf}, "contexts: got 312 entries"),
    ({"contexts": E[..., 1:]}, "contexts: got d = 5"),
    ({"contexts": E[:, :0]}, "contexts: got shape"),
]
TWO_OUTPUTS = {"weights": LAYER._replace(W_D=ONE.expand(1, 2))}, "weights.W_D: got shape"
FEW_BITS = {"most_bits": 127}, "most_bits: got 127"
SOLVED = [
    TWO_OUTPUTS,
    FEW_BITS,
    (EMPTY, "contexts: got shape"),
    ({"contexts": E[0], "queries": e[:0], "labels": y[:0]}, "queries: got shape"),
    ({"labels": y * math.nan}, "labels: got 13 entries"),
    ({"labels": uniform(0, T, 2)}, "labels: got"),
]
MEMORIZED = [
    FEW_BITS,
    ({"labels": y[:, None].expand(-1, 2)}, "labels: got d_out = 2"),
    ({"skip": True}, "weights.W_O: got"),
]

# --- token sequences ------------------------------------------------------------------------------

ROWS = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]])
BIGRAMS = {"sequences": ROWS, "head_dim": 2, "dim": 2}
TASK = {"sequences": ROWS, "next_tokens": torch.arange(4), "vocab": 4, "head_dim": 2, "seed": 0}
SEQUENCES = [
    ({"sequences": -ROWS}, "sequences: got torch.int64 of shape"),
    ({"sequences": ROWS[:0]}, "sequences: got torch.int64 of shape"),
]
ASSOCIATIONS = [
    ({"sequences": torch.full((4, 2), 9)}, "sequences: got tokens from 9 to 9"),
    ({"sequences": ROWS[[0, 0, 1, 2]]}, "sequences: got 0 and 1 equal"),
    ({"next_tokens": torch.tensor([0, 1, 2, -1])}, "next_tokens: got tokens from -1"),
    ({"dim": 1}, "dim: got 1"),
    ({"head_dim": 4}, "head_dim: got 4"),
]
BY_THEOREM_1 = [
    NO_HEADS,
    ({"sequences": torch.arange(4)[:, None]}, "sequences: got S = 1"),
    ({"heads": 1, "head_dim": 1, "dim": 2}, "sequences: got T_0 = 4; .* = 3"),
]
NO_GROUPS = [({"groups": ()}, "groups: got"), ({"groups": (2, 0)}, r"groups\[1\]: got 0")]
ONE_TOKEN = {"vocab": 1}, "vocab: got 1"

SIDES = [uniform(seed, 2, 3, 5) for seed in range(3)]
TABLES = uniform(3, 4, 5), uniform(4, 2, 5)
TRANSFORMER = AoTWeights(*TABLES, *SIDES, SIDES[0].mT.contiguous(), TABLES[0])
OFFER = {"weights": TRANSFORMER, "sequences": ROWS}
OFFERS = [
    ({"sequences": ROWS[0]}, "sequences: got shape"),
    ({"sequences": ROWS + 11}, "sequences: got tokens from 11 to 14"),
    ({"weights": TRANSFORMER._replace(W_Q=SIDES[0] / 0)}, "weights.W_Q: got 30 entries"),
    ({"weights": AoTWeights(*(W[None] for W in TRANSFORMER))}, "weights.W_Q: got shape"),
]
CERTIFIED = [
    ({"sequences": ROWS[:0], "next_tokens": torch.arange(0)}, "sequences: got shape"),
    ({"next_tokens": torch.arange(4) + 1}, "next_tokens: got tokens from 1 to 4"),
    ({"bits": 1}, "bits: got 1"),
]

# --- ranks ----------------------------------------------------------------------------------------

V = -torch.ones(4, 3)
NO_NUMBERS = {"vectors": V.log()}, "vectors: got 12"
SAMPLED = [
    NO_NUMBERS,
    ({"samples": 0}, "samples: got 0"),
    ({"rtol": 2.0}, "rtol: got 2.0"),
    ({"size": 5}, "size: got 5"),
]
RANK = [
    ({"matrix": V * math.nan}, "matrix: got 12 entries"),
    ({"target": 2}, "target: got 2; expected None"),
    ({"matrix": lambda bits: balls.exact(V), "target": 5}, "target: got 5; expected at most 3"),
    ({"matrix": lambda bits: balls.exact(V), "times": V}, "times: got"),
    ({"times": torch.full((3, 2), math.nan)}, "times: got 6 entries"),
    ({"times": torch.eye(2)}, "times: got n = 2"),
    ({"most_bits": 8}, "most_bits: got 8"),
]
TABLE = [
    (memorize_mha, {**DATA, **HEADS}, [*ANY_LAYER, *THEOREM_1]),
    (cancelling.memorize_by_difference, {**DATA, **HEADS}, [*ANY_LAYER, *DIFFERENCE]),
    (cancelling.memorize_by_cancellation, {**DATA, **HEADS}, [*ANY_LAYER, *CANCELLATION]),
    (scalars.memorize_scalars, SCALAR, SCALARS),
    (memorize_aot, TASK | {"dim": 3, "heads": 2}, [*ASSOCIATIONS, *BY_THEOREM_1]),
    (
        associations.memorize_next_tokens,
        TASK | {"dim": 3, "groups": (2,)},
        [*ASSOCIATIONS, *NO_GROUPS, ONE_TOKEN],
    ),
    (sequence_ranks.jacobian_rank, BIGRAMS | {"heads": 1}, [*SEQUENCES, NO_HEADS]),
    (sequence_ranks.cancelling_rank, BIGRAMS | {"groups": [1]}, SEQUENCES + NO_GROUPS),
    (fitting.levenberg_marquardt, FIT, [*ANY_LAYER, *FITS]),
    (fitting.lbfgs, FIT, FITS),
    (fitting.adam, FIT | {"rate": float}, [*FITS, ({"batch": 0}, "batch: got 0")]),
    (fitting.limits, {"weights": START, **DATA}, LIMITS),
    (proofs.certified_memorization, GIVEN | {"labels": y[:, None]}, [*ENCLOSED, *MEMORIZED]),
    (proofs.enclosed_features, GIVEN, ENCLOSED),
    (solutions.certified_solution, GIVEN | {"labels": y}, [*ENCLOSED, *SOLVED]),
    (solutions.enclosed_derivative, GIVEN, [*ENCLOSED, TWO_OUTPUTS]),
    (
        proofs.certified_associations,
        OFFER | {"next_tokens": torch.arange(4)},
        [*OFFERS, *CERTIFIED],
    ),
    (proofs.enclosed_offers, OFFER, OFFERS),
    (ranks.numerical_rank, {"matrix": V}, [RANK[0], ({"dtype": torch.float16}, "dtype: got")]),
    (ranks.kruskal_rank, {"vectors": V}, [NO_NUMBERS, ({"max_subsets": 0}, "max_subsets: got 0")]),
    (ranks.sampled_independence, {"vectors": V, "size": 2, "seed": 0}, SAMPLED),
    (ranks.certified_rank, {"matrix": V}, RANK),
]
CASES = [
    pytest.param(function, arguments | change, message, id=f"{function.__name__}-{message}")
    for function, arguments, cases in TABLE
    for change, message in cases
]
ACCEPTED = [pytest.param(*row[:2], id=row[0].__name__) for row in TABLE]


@pytest.mark.parametrize(("function", "arguments", "message"), CASES)
def test_what_does_not_fit_is_refused_by_name(function, arguments, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        function(**arguments)


@pytest.mark.parametrize(("function", "arguments"), ACCEPTED)
def test_what_the_cases_change_is_accepted(function, arguments):
    function(**arguments)


@pytest.mark.parametrize("bits", [1, 2.5, True])
def test_precisions_are_numbers_of_bits(bits):
    with pytest.raises(ValueError, match=r"^bits: got "):
        balls.precision(bits)


# --- promises -------------------------------------------------------------------------------------


EXAMPLES, WRONG = 12, 5  # and the example whose output is off


def on_own_contexts(build, X, y, **sizes):
    return build(X, X[:, -1], y, **sizes, seed=0)


def on_a_shared_context(build, X, y, **sizes):
    return build(X[0], X[:, -1], y, **sizes)


def on_sequences(build, X, y, **sizes):
    return build(X, y, **sizes)


DEEP = {"heads": (2, 2), "head_dim": 1, "value_dim": 2}
CONSTRUCTIONS = [  # with the forward pass that it looks at, and its promise
    (depth.memorize_by_depth, on_sequences, DEEP, "deep", 1e-8),
    (cancelling.memorize_by_difference, on_own_contexts, {"heads": 4, "head_dim": 2}, "mha", 1e-8),
    (
        cancelling.memorize_by_cancellation,
        on_own_contexts,
        {"heads": 3, "head_dim": 2},
        "mha",
        1e-8,
    ),
    (memorize_mha, on_own_contexts, {"heads": 7, "head_dim": 3}, "mha", 1e-9),
    (scalars.memorize_scalars, on_a_shared_context, {"heads": 4}, "mha", 1e-8),
]


@pytest.mark.parametrize(
    ("build", "on", "sizes", "forward", "promise"),
    [pytest.param(*row, id=row[0].__name__) for row in CONSTRUCTIONS],
)
def test_one_label_beyond_the_promise_is_refused(build, on, sizes, forward, promise, monkeypatch):
    """The promise is relative to half the range of the labels, here a fifth of the largest one."""
    module = sys.modules[build.__module__]
    g = torch.Generator().manual_seed(0)
    X, y = gaussian(g, EXAMPLES, 3, 4), 2 + uniform(g, EXAMPLES)
    allowed, right = promise * float(y.max() - y.min()) / 2, getattr(module, forward)
    assert float(y.max()) > 5 * float(y.max() - y.min()) / 2
    if hasattr(module, "_SPREADS"):  # one attempt is enough
        monkeypatch.setattr(module, "_SPREADS", module._SPREADS[:1])
        monkeypatch.setattr(module, "_DRAWS", 1)

    def built_with_an_error_of(error):
        def outputs(weights, *data, **options):
            result = right(weights, *data, **options)
            if len(result) == EXAMPLES and result.ndim == 2:  # not one example alone
                result = result.clone()
                result[WRONG] += error
            return result

        monkeypatch.setattr(module, forward, outputs)
        return on(build, X, y, **sizes)

    assert built_with_an_error_of(0.7 * allowed) is not None
    for error in (1.5 * allowed, -1.5 * allowed):
        with pytest.raises(ValueError, match="got"):
            built_with_an_error_of(error)
