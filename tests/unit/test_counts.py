"""The dimensions of families of functions against the rank of the Jacobian, at small sizes."""

import pytest
import torch

from attnmem import MHAWeights, mha
from attnmem.core import bounds
from attnmem.lab import data, models
from attnmem.lab.store import Run
from attnmem.theory import counts
from attnmem.theory.independence import numerical_rank

from plain import mha_outputs

PLAIN = {"experiment": "none", "profile": "quick", "seed": 0, "steps": 1, "batch": 1, "T": 1}
PLAIN |= {"schedule": "linear", "lr": 1.0, "lr_start": 1.0, "lr_end": 1.0}


def jacobian(run, outputs, *, normal=False):
    """Rows: outputs; columns: weights in float64, drawn as for training and enlarged, or normal."""
    P = models.MODELS[run.model].initial(run, data.generator(run, "weights"))
    P = {name: 3 * W.double()[None] for name, W in P.items()}
    if normal:
        g = torch.Generator().manual_seed(2)
        P = {name: torch.randn(W.shape, generator=g).double() for name, W in P.items()}

    def of(*weights):
        return outputs(dict(zip(P, weights, strict=True)))

    parts = torch.autograd.functional.jacobian(of, tuple(P.values()))
    return torch.cat([J.flatten(1) for J in parts], dim=1)


def transformer(N, d, d_h, H, variant="paper", width=None):
    model = "mlp" if width else "aot"
    sizes = {"N": N, "n": 2, "d": d, "d_h": d_h, "H": H, "width": width, "layers": 1}
    return Run(model=model, variant=variant, task="bigrams", context=None, **sizes, **PLAIN)


TRANSFORMERS = [
    *[transformer(*sizes) for sizes in [(7, 3, 2, 2), (7, 3, 3, 2), (8, 4, 1, 1), (6, 2, 1, 3)]],
    *[transformer(*sizes, "own-maps") for sizes in [(7, 3, 2, 2), (12, 7, 1, 2), (8, 4, 4, 1)]],
    *[transformer(*sizes, "code") for sizes in [(7, 3, 3, 2), (8, 4, 1, 2), (8, 4, 2, 1)]],
    *[transformer(*sizes, "skip-positions") for sizes in [(7, 3, 2, 2), (9, 5, 1, 1)]],
    *[transformer(3, 2, 1, 1), transformer(5, 3, 1, 2)],
    *[transformer(9, 3, 5, 1), transformer(4, 2, 2, 3, "skip-positions")],
    transformer(8, 4, 2, 2, "unscaled"),
    transformer(7, 3, 3, 1, "code", width=2),
]


def predictions(run):
    """All log-odds, from weights."""
    every = torch.arange(run.N)
    pairs = torch.cartesian_prod(every, every)[None]

    def of(P):
        logits = models.aot_logits(P, run, pairs)[0]
        return (logits - logits.mean(dim=0)).flatten()

    return of


@pytest.mark.parametrize("run", TRANSFORMERS, ids=lambda run: f"{run.variant}-{run.H}-{run.d_h}")
def test_dimension_of_transformers_is_the_rank_of_all_predictions(run):
    assert numerical_rank(jacobian(run, predictions(run)), rtol=1e-11) == models.dimension(run)


@pytest.mark.parametrize(
    ("run", "dimension"),
    [
        (transformer(4, 2, 2, 3), 34),  # all that logits of rank two can be
        (transformer(4, 3, 2, 1), 31),  # more than with one direction of outputs
        (transformer(4, 3, 1, 1, width=1), 31),  # more than without the feed-forward layer
    ],
)
def test_dimension_of_transformers_with_few_tokens(run, dimension):
    found = jacobian(run, predictions(run), normal=True)
    assert numerical_rank(found, rtol=1e-11) == models.dimension(run) == dimension


def layer(H, n, d, d_h, N, context):
    sizes = {"N": N, "n": n, "d": d, "d_h": d_h, "H": H, "width": None, "layers": 1}
    task = "classes" if N else "reals"
    return Run(model="mha", variant="code", task=task, context=context, **sizes, **PLAIN)


LAYERS = [
    *[layer(*sizes, 5, "shared") for sizes in [(2, 3, 4, 4), (2, 3, 4, 1), (3, 1, 4, 2)]],
    *[layer(*sizes, None, "shared") for sizes in [(2, 4, 4, 4), (3, 3, 5, 1)]],
    *[layer(*sizes, None, "random") for sizes in [(2, 3, 4, 4), (1, 3, 5, 1), (2, 5, 3, 2)]],
    *[layer(*sizes, 4, "random") for sizes in [(2, 3, 3, 3), (1, 2, 4, 2), (2, 1, 4, 3)]],
    layer(5, 3, 3, 1, 3, "random"),
    *[layer(4, 2, 2, 1, 5, context) for context in ("shared", "random")],  # d < H, N - 1
]


def words(run):
    return f"{run.context}-{run.N}-H{run.H}-n{run.n}-d{run.d}-{run.d_h}"


@pytest.mark.parametrize("run", LAYERS, ids=words)
def test_dimension_of_layers_is_the_rank_of_many_outputs(run):
    torch.manual_seed(1)
    B = models.parameter_count(run) // (run.N or 1) + 20
    contexts = torch.randn(1, *((B,) if run.context == "random" else ()), run.n, run.d).double()
    queries = torch.randn(1, B, run.d).double()

    def outputs(P):
        found = mha_outputs(P, run, contexts, queries)[0]
        return (found - found.mean(dim=-1, keepdim=True) if run.N else found).flatten()

    assert numerical_rank(jacobian(run, outputs), rtol=1e-12) == models.dimension(run)


@pytest.mark.parametrize(("H", "n", "d", "d_h"), [(2, 3, 4, 2), (1, 2, 3, 3), (3, 4, 4, 9)])
def test_dimensions_of_the_layer_of_theory(H, n, d, d_h):
    plain = {"heads": H, "head_dim": d_h, "dim": d, "context": n, "embedded": False}
    r = min(d_h, d)
    assert counts.mha_dimension(**plain, shared=False) == H * (r * (2 * d - r) + d)
    shared = bounds.shared_context_ceiling(H, n, d_h, d)
    assert counts.mha_dimension(**plain, shared=True) == shared
    embedded = bounds.shared_context_ceiling(H, n, d_h, d, embedded=True)
    assert counts.mha_dimension(**plain | {"embedded": True}, shared=True) == embedded


@pytest.mark.parametrize(("H", "d", "n", "classes"), [(1, 3, 2, 9), (2, 3, 3, 5), (3, 3, 2, 3)])
@pytest.mark.parametrize("shared", [False, True])
def test_dimension_of_the_layer_of_theory_with_classes_is_the_rank(H, d, n, classes, shared):
    torch.manual_seed(1)
    shapes = (H, d, 2), (H, d, 2), (H, d, 1), (H, classes)
    parts = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    contexts = torch.randn(*(() if shared else (60,)), n, d, dtype=torch.float64)
    queries = torch.randn(60, d, dtype=torch.float64)

    def outputs(*parts):
        weights = MHAWeights(*parts, torch.eye(classes, dtype=torch.float64))
        found = mha(weights, contexts, queries)
        return (found - found.mean(dim=-1, keepdim=True)).flatten()

    found = torch.autograd.functional.jacobian(outputs, tuple(parts))
    whole = torch.cat([part.flatten(1) for part in found], dim=1)
    sizes = {"shared": shared, "classes": classes, "embedded": False}
    assert numerical_rank(whole, rtol=1e-12) == counts.mha_dimension(H, 2, d, n, **sizes)


def test_the_dimension_is_unknown_for_several_layers_and_for_wide_shared_maps():
    two = transformer(7, 3, 3, 1, "code")
    assert models.dimension(two) is not None
    assert models.dimension(Run(**{**vars(two), "layers": 2})) is None
    assert models.dimension(transformer(7, 3, 4, 1, "code")) is None


@pytest.mark.parametrize(
    ("run", "tables"),
    [
        (transformer(7, 3, 2, 2), 7 * 3 * 2 + 2 * 3),
        (transformer(7, 3, 2, 2, "code"), 7 * 3 * 2 + 2 * 2),
        (transformer(7, 3, 3, 1, "code", width=2), 7 * 3 * 2 + 2 * 3),
        (layer(2, 3, 4, 4, 5, "shared"), 4 * 4 + 4 + 5 * 4 + 5),
        (layer(2, 3, 4, 4, None, "random"), 4 * 4 + 4 + 4 + 1),
    ],
    ids=lambda value: getattr(value, "model", value),
)
def test_what_is_no_table_belongs_to_the_layers(run, tables):
    assert models.parameter_count(run) - models.parameter_count(run, tables=False) == tables
