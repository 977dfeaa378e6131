"""The dimensions of families of functions against the rank of the Jacobian, at small sizes."""

import pytest
import torch

from attnmem.core import bounds
from attnmem.lab import data, models
from attnmem.lab.store import Run
from attnmem.theory import counts
from attnmem.theory.independence import numerical_rank

from plain import READINGS

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


def dimension_of(run):
    shared, in_skip, *_ = READINGS[run.variant]
    reading = {"shared_maps": shared, "position_in_skip": in_skip, "width": run.width or 0}
    return counts.aot_dimension(run.H, run.d_h, run.d, run.N, **reading)


def predictions(run):
    """All log-odds, from weights."""
    tokens = torch.arange(run.N)
    pairs = torch.cartesian_prod(tokens, tokens)[None]

    def of(P):
        logits = models.aot_logits(P, run, pairs)[0]
        return (logits - logits.mean(dim=0)).flatten()

    return of


@pytest.mark.parametrize("run", TRANSFORMERS, ids=lambda run: f"{run.variant}-{run.H}-{run.d_h}")
def test_dimension_is_the_rank_of_all_predictions(run):
    assert numerical_rank(jacobian(run, predictions(run)), rtol=1e-11) == dimension_of(run)


@pytest.mark.parametrize(
    ("run", "dimension"),
    [
        (transformer(4, 2, 2, 3), 34),  # all that logits of rank two can be
        (transformer(4, 3, 2, 1), 31),  # more than with one direction of outputs
        (transformer(4, 3, 1, 1, width=1), 31),  # more than without the feed-forward layer
    ],
)
def test_dimension_with_few_tokens(run, dimension):
    J = jacobian(run, predictions(run), normal=True)
    assert numerical_rank(J, rtol=1e-11) == dimension_of(run) == dimension


def layer(heads, tokens, head_dim, dim, outputs, shared):
    """The Jacobian of one layer with ``outputs`` labels, in its own words, with data to spare."""
    g = torch.Generator().manual_seed(0)
    n_examples = 40
    contexts = torch.randn(1 if shared else n_examples, tokens, dim, generator=g).double()
    queries = torch.randn(n_examples, dim, generator=g).double()
    shapes = 2 * [(heads, dim, head_dim)] + [(heads, dim, dim), (dim, outputs)]
    weights = tuple(torch.randn(*shape, generator=g).double() for shape in shapes)

    def of(Q, K, V, D):
        logits = torch.einsum(
            "tnd,hdk,hck,tc->thn", contexts.expand(n_examples, -1, -1), K, Q, queries
        )
        mixed = torch.einsum(
            "thn,tnd->thd", logits.softmax(-1), contexts.expand(n_examples, -1, -1)
        )
        return torch.einsum("thd,hdo,oy->ty", mixed, V, D).flatten()

    parts = torch.autograd.functional.jacobian(of, weights)
    return torch.cat([J.flatten(1) for J in parts], dim=1)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    "sizes",
    [
        (2, 3, 2, 3, 5),
        (1, 2, 1, 4, 6),  # a read-out of fewer rows than d
        (2, 3, 1, 4, 2),  # of fewer outputs
        (1, 5, 2, 3, 4),  # more tokens than dimensions
        (3, 2, 3, 3, 1),
        (2, 3, 4, 3, 7),  # wider heads than d
    ],
)
def test_dimension_of_a_layer_is_the_rank_of_all_outputs(sizes, shared):
    rank = numerical_rank(layer(*sizes, shared), rtol=1e-11)
    assert rank == counts.mha_dimension(*sizes, shared=shared)


def test_one_output_of_a_layer_shows_what_limits_real_labels():
    for heads, tokens, head_dim, dim in [(20, 32, 64, 64), (1, 5, 3, 8), (4, 8, 8, 8)]:
        one = bounds.shared_context_ceiling(heads, tokens, head_dim, dim)
        assert counts.mha_dimension(heads, tokens, head_dim, dim) == one
        many = bounds.own_context_ceiling(heads, head_dim, dim)
        assert counts.mha_dimension(heads, tokens, head_dim, dim, shared=False) == many
        assert counts.mha_dimension(heads, dim + 1, head_dim, dim) == many
