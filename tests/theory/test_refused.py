"""What the constructions, ranks, fits and proofs refuse, each by name; promises that are kept.

Types, sizes and ranges are read from annotations (tests/unit/test_checks.py); here every function
refuses one of them, and all that relates its arguments.
"""

import math

import pytest
import torch

from attnmem import AoTWeights, MHAWeights, memorize_mha
from attnmem.core import memorize
from attnmem.theory import associations, balls, fitting, near, sequence_ranks, solutions
from attnmem.theory import certificates as proofs
from attnmem.theory import independence as ranks
from attnmem.theory.tangents import ScalarHeads

F64 = {"dtype": torch.float64}


def draw(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), **F64)


def changed(x, where, to):
    """A copy with other numbers somewhere."""
    x = x.clone()
    x[where] = to
    return x


def empty(*names):
    return {name: ALL[name][:0] for name in names}


T, N, D = 13, 4, 6
E, e, y = draw(T, N, D), draw(T, D, seed=1), draw(T, seed=2)
ALL = {"contexts": E, "queries": e, "labels": y}
HEADS = {"heads": 4, "head_dim": 4, "seed": 0}
SIZES = {"heads": 0}, "heads: got 0"
SHAPES = [
    ({"labels": y[1:]}, "labels: got T = 12 .* expected T = 13, as in contexts"),
    ({"contexts": E[..., 1:]}, r"(queries: got d = 6|contexts: got d = 5) .* expected d = \d"),
    ({"contexts": E[1:]}, "queries: got T = 13 .* expected T = 12, as in contexts"),
    ({"contexts": E.tolist()}, "contexts: got list; expected a torch.Tensor"),
    ({"queries": e[None]}, "queries: got shape"),
    ({"labels": changed(y, 3, math.inf)}, "labels: got 1 entries that are NaN or infinite"),
    ({"contexts": changed(E, (2, 1, 0), math.nan)}, "contexts: got 1 entries that are NaN"),
    (empty(*ALL), "contexts: got shape .* expected at least one entry"),
]
MHA = [
    ({"heads": 3}, "labels: got T = 13 examples; expected T <= .* = 10"),
    ({"head_dim": 3}, "labels: got T = 13 examples; expected T <= .* = 9"),
    ({"contexts": changed(E, (7, 3), E[7, :3].sum(0))}, "contexts: got rank 3 in context 7"),
    ({"queries": changed(e, 9, e[2])}, "queries: got .* Kruskal rank at least 4"),
    ({"queries": changed(e, 0, 0)}, "queries: got a zero vector"),
    ({"labels": draw(T, 3), "value_dim": 2}, "value_dim: got 2; expected at least d_out = 3"),
    ({"labels": draw(T, 7), "skip": True}, "labels: got d_out = 7"),
]
CANCEL = [({"contexts": E[:, :1]}, "contexts: got n = 1 token; expected at least 2 tokens"), SIZES]

ONE_HEAD = {"heads": 1}, "labels: got T = 13 examples; expected at most 0"

CONTEXT, QUERIES, SCALARS = draw(3, 6) - 0.5, draw(11, 6, seed=1) - 0.5, draw(11, seed=2) - 0.5
SCALAR = {"context": CONTEXT, "queries": QUERIES, "labels": SCALARS, "heads": 3}
SCALAR_CASES = [
    ({"context": CONTEXT[:2]}, "context: got 2 tokens"),
    ({"context": CONTEXT[[0, 1, 1]]}, "context: got 3 tokens"),
    ({"queries": QUERIES[[0] * 8 + [1] * 3]}, "examples: got 0 and 1 equal, with"),
    ({"queries": QUERIES[:1] * torch.arange(1.0, 12.0)[:, None]}, "queries: got dependent"),
    ({"labels": SCALARS[:-1]}, "labels: got T = 10"),
    ({"heads": 2}, "labels: got T = 11 examples; expected 1 <= T <= .* = 10"),
    ({"queries": QUERIES.log()}, "queries: got .* NaN"),
    ({"queries": changed(QUERIES, 10, QUERIES[:2].sum(0))}, "queries: got example 10 in"),
]

ROWS = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]])
TASK = {"sequences": ROWS, "next_tokens": torch.arange(4), "vocab": 4, "head_dim": 2, "seed": 0}
TASKS = [
    ({"sequences": torch.full((4, 2), 9)}, "sequences: got tokens from 9 to 9"),
    ({"sequences": ROWS[[0, 0, 1, 2]]}, "sequences: got 0 and 1 equal"),
    ({"next_tokens": torch.arange(3)}, "next_tokens: got T = 3"),
    ({"next_tokens": torch.tensor([0, 1, 2, -1])}, "next_tokens: got tokens from -1"),
    ({"dim": 1}, "dim: got 1"),
    ({"head_dim": 4}, "head_dim: got 4"),
    ({"seed": -1}, "seed: got -1"),
]
AOT = [
    ({"sequences": torch.arange(4)[:, None]}, "sequences: got S = 1"),
    ({"heads": 1, "head_dim": 1, "dim": 2}, "sequences: got T_0 = 4; expected 1 <= T_0 <= .* = 3"),
]
NEXT = [
    ({"groups": ()}, "groups: got"),
    ({"groups": (2, 0)}, r"groups\[1\]: got 0"),
    ({"vocab": 1}, "vocab: got 1"),
]
RANK = [
    ({"sequences": torch.zeros(2, 2)}, "sequences: got dtype"),
    ({"sequences": -ROWS}, "sequences: got torch.int64 of shape"),
    ({"sequences": ROWS[:0]}, "sequences: got torch.int64 of shape"),
    ({"head_dim": 3}, "head_dim: got 3"),
]
START = ScalarHeads(draw(2, D, 3), draw(2, D, 3, seed=1), draw(2, D, seed=2))
FIT = {"weights": START, **ALL, "steps": 2}
FITS = [
    ({"steps": 0}, "steps: got 0"),
    ({"contexts": E[:, :0]}, "contexts: got shape"),
    ({"labels": 1e71 * y}, "labels: got a largest label of .e"),
    ({"labels": 1e-71 * y}, "labels: got a largest label of .e"),
    ({"contexts": 1e200 * E, "queries": 1e200 * e}, "weights: got weights with which"),
    ({"weights": ScalarHeads(*(w[:0] for w in START))}, "weights.W_Q: got shape"),
    ({"weights": START._replace(mu=START.mu[:, 1:])}, "weights.mu: got d = 5"),
]

ONE = torch.ones(1, 1, **F64)
LAYER = MHAWeights(START.W_Q, START.W_K, START.mu[..., None], ONE.expand(2, 1), ONE)
PROOF = {"weights": LAYER, **ALL}
PROOFS = [
    ({"weights": LAYER._replace(W_Q=LAYER.W_Q * math.nan)}, "weights.W_Q: got 36 entries"),
    ({"weights": MHAWeights(*(W[:0] for W in LAYER[:4]), ONE)}, "weights.W_Q: got shape"),
    ({"weights": MHAWeights(*(W[None] for W in LAYER))}, "weights.W_Q: got shape"),
    ({"contexts": E * math.inf}, "contexts: got 312 entries"),
    ({"contexts": E[..., 1:]}, "contexts: got d = 5 .*; expected d = 6"),
    ({"contexts": E[:, :0]}, "contexts: got shape"),
    (empty(*ALL), "contexts: got shape"),
    ({"contexts": E[0], **empty("queries", "labels")}, "queries: got shape"),
]
LABELS = [
    ({"labels": y[1:]}, "labels: got T = 12"),
    ({"labels": y * math.nan}, "labels: got 13 entries"),
    ({"most_bits": 127}, "most_bits: got 127"),
    ({"labels": draw(T, 2)}, "labels: got"),
]
COLUMNS = [
    ({"labels": y[1:, None]}, "labels: got T = 12"),
    ({"labels": y[:, None].expand(-1, 2)}, "labels: got d_out = 2"),
    ({"skip": True}, "weights.W_O: got"),
    LABELS[2],
]
WIDE = {"weights": LAYER._replace(W_D=ONE.expand(1, 2))}, "weights.W_D: got shape"

SIDES = [draw(2, 3, 5, seed=s) for s in range(3)]
TRANSFORMER = AoTWeights(draw(4, 5), draw(2, 5), *SIDES, SIDES[0].mT.contiguous(), draw(4, 5))
OFFER = {"weights": TRANSFORMER, "sequences": ROWS}
OFFERS = [
    ({"sequences": ROWS[:0], "next_tokens": torch.arange(0)}, "sequences: got shape"),
    ({"sequences": ROWS[0]}, "sequences: got shape"),
    ({"sequences": ROWS + 11}, "sequences: got tokens from 11 to 14"),
    ({"weights": TRANSFORMER._replace(W_Q=SIDES[0] / 0)}, "weights.W_Q: got 30 entries"),
    ({"weights": AoTWeights(*(W[None] for W in TRANSFORMER))}, "weights.W_Q: got shape"),
]
NEXT_TOKENS = {"next_tokens": torch.arange(4)}
OTHER_TOKENS = [
    ({"next_tokens": torch.arange(3)}, "next_tokens: got T = 3"),
    ({"next_tokens": torch.arange(4) + 1}, "next_tokens: got tokens from 1 to 4"),
    ({"bits": 1}, "bits: got 1"),
]

V = -torch.ones(4, 3)
MATRIX = [
    ({"matrix": V[0]}, "matrix: got shape"),
    ({"matrix": V * math.nan}, "matrix: got 12 entries"),
]
VECTORS = [({"vectors": V[None]}, "vectors: got shape"), ({"vectors": V.log()}, "vectors: got 12")]
DRAWN = {"vectors": V, "seed": 0}
SAMPLED = [({"samples": 0}, "samples: got 0"), *VECTORS]
SAMPLED_SETS = [*SAMPLED, ({"rtol": 2.0}, "rtol: got 2.0"), ({"size": 5}, "size")]
CERTIFIED = [
    ({"target": 2}, "target: got 2; expected None"),
    ({"matrix": lambda bits: balls.exact(V), "target": 5}, "target: got 5; expected at most 3"),
    ({"matrix": lambda bits: balls.exact(V), "times": V}, "times: got"),
    ({"times": torch.ones(2)}, "times: got shape"),
    ({"times": torch.full((3, 2), math.nan)}, "times: got 6 entries"),
    ({"times": torch.eye(2)}, "times: got n = 2"),
    ({"most_bits": 8}, "most_bits: got 8"),
]
BIGRAMS = {"sequences": ROWS, "head_dim": 2, "dim": 2}
GIVEN = {name: PROOF[name] for name in ("weights", "contexts", "queries")}
TABLE = [
    (memorize_mha, {**ALL, **HEADS}, [*SHAPES, *MHA, SIZES]),
    (near.memorize_by_difference, {**ALL, **HEADS}, [*SHAPES, *CANCEL, ONE_HEAD]),
    (near.memorize_by_cancellation, {**ALL, **HEADS}, [*SHAPES, *CANCEL]),
    (near.memorize_scalars, SCALAR, [*SCALAR_CASES, SIZES]),
    (associations.memorize_aot, TASK | {"dim": 3, "heads": 2}, [*TASKS, *AOT, SIZES]),
    (associations.memorize_next_tokens, TASK | {"dim": 3, "groups": (2,)}, [*TASKS, *NEXT]),
    (sequence_ranks.jacobian_rank, BIGRAMS | {"heads": 1}, [*RANK, SIZES]),
    (sequence_ranks.cancelling_rank, BIGRAMS | {"groups": [1]}, RANK + NEXT[:2]),
    (fitting.levenberg_marquardt, FIT, [*SHAPES, *FITS]),
    (fitting.lbfgs, FIT, FITS),
    (fitting.adam, FIT | {"rate": float}, [*FITS, ({"batch": 0}, "batch: got 0")]),
    (fitting.limits, {"weights": START, **ALL}, FITS[1:]),
    (proofs.certified_memorization, PROOF | {"labels": y[:, None]}, [*PROOFS[:-2], *COLUMNS]),
    (proofs.enclosed_features, GIVEN, PROOFS[:-2]),
    (solutions.certified_solution, PROOF, [*PROOFS, *LABELS, WIDE]),
    (solutions.enclosed_derivative, GIVEN, [*PROOFS[:-2], WIDE]),
    (proofs.certified_associations, OFFER | NEXT_TOKENS, [*OFFERS, *OTHER_TOKENS]),
    (proofs.enclosed_offers, OFFER, OFFERS[1:]),
    (ranks.numerical_rank, {"matrix": V}, [*MATRIX, ({"dtype": torch.float16}, "dtype: got")]),
    (ranks.kruskal_rank, {"vectors": V}, [*VECTORS, ({"max_subsets": 0}, "max_subsets: got 0")]),
    (ranks.sampled_independence, DRAWN | {"size": 2}, SAMPLED_SETS),
    (ranks.certified_rank, {"matrix": V}, [*MATRIX, *CERTIFIED]),
]
CASES = [
    pytest.param(function, arguments | change, message, id=f"{function.__name__}-{message}")
    for function, arguments, cases in TABLE
    for change, message in cases
]


@pytest.mark.parametrize(("function", "arguments", "message"), CASES)
def test_what_does_not_fit_is_refused_by_name(function, arguments, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        function(**arguments)


def test_what_the_cases_change_is_accepted():
    for function, arguments, _ in TABLE:
        function(**arguments)


def test_precisions_are_numbers_of_bits():
    for bits in (1, 2.5, True):
        with pytest.raises(ValueError, match=r"^bits: got "):
            balls.precision(bits)


TRIED, WRONG = 12, 5  # examples, and the one whose output is off


def layer(build, **sizes):
    """A construction of one layer, on own contexts."""
    return lambda X, y: build(X, X[:, -1], y, **sizes, seed=0)


SMALL = {"heads": (2, 2), "head_dim": 1, "value_dim": 2}
CONSTRUCTIONS = {  # with the module whose outputs it looks at, and its promise
    "depth": (lambda X, y: near.memorize_by_depth(X, y, **SMALL), near, "deep", 1e-8),
    "difference": (layer(near.memorize_by_difference, heads=4, head_dim=2), near, "mha", 1e-8),
    "cancellation": (layer(near.memorize_by_cancellation, heads=3, head_dim=2), near, "mha", 1e-8),
    "theorem 1": (layer(memorize_mha, heads=7, head_dim=3), memorize, "mha", 1e-9),
    "scalars": (lambda X, y: near.memorize_scalars(X[0], X[:, -1], y, heads=4), near, "mha", 1e-8),
}


@pytest.mark.parametrize("name", CONSTRUCTIONS)
def test_an_error_of_one_label_beyond_the_promise_is_refused(name, monkeypatch):
    """The promise is relative to half the range of the labels, here a fifth of the largest one."""
    build, module, forward, promise = CONSTRUCTIONS[name]
    g = torch.Generator().manual_seed(0)
    X, y = torch.randn(TRIED, 3, 4, generator=g, **F64), 2 + torch.rand(TRIED, generator=g, **F64)
    allowed, right = promise * float(y.max() - y.min()) / 2, getattr(module, forward)
    assert float(y.max()) > 5 * float(y.max() - y.min()) / 2

    if module is near:  # one attempt is enough
        monkeypatch.setattr(module, "_SPREADS", module._SPREADS[:1])
        monkeypatch.setattr(module, "_DRAWS", 1)

    def errs(by):
        def outputs(weights, *data, **options):
            found = right(weights, *data, **options)
            if len(found) == TRIED and found.ndim == 2:  # not one example alone
                found = found.clone()
                found[WRONG] += by
            return found

        monkeypatch.setattr(module, forward, outputs)
        return build(X, y)

    assert errs(0.7 * allowed) is not None
    for by in (1.5 * allowed, -1.5 * allowed):
        with pytest.raises(ValueError, match="got"):
            errs(by)
