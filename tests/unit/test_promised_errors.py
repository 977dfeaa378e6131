"""Constructions keep their promise for every label, or refuse: with arithmetic that errs on one."""

import pytest
import torch

from attnmem import memorize_mha
from attnmem.core import memorize
from attnmem.theory import near
from attnmem.theory.near import (
    memorize_by_cancellation,
    memorize_by_depth,
    memorize_by_difference,
    memorize_scalars,
)

F64 = {"dtype": torch.float64}
T, WRONG = 12, 5  # examples, and the one whose output is off


def layer(build, **sizes):
    """A construction of one layer, on own contexts."""
    return lambda X, y: build(X, X[:, -1], y, **sizes, seed=0)


SMALL = {"heads": (2, 2), "head_dim": 1, "value_dim": 2}
CONSTRUCTIONS = {  # with the module whose outputs it looks at, and its promise
    "depth": (lambda X, y: memorize_by_depth(X, y, **SMALL), near, "deep", 1e-8),
    "difference": (layer(memorize_by_difference, heads=4, head_dim=2), near, "mha", 1e-8),
    "cancellation": (layer(memorize_by_cancellation, heads=3, head_dim=2), near, "mha", 1e-8),
    "theorem 1": (layer(memorize_mha, heads=7, head_dim=3), memorize, "mha", 1e-9),
    "scalars": (lambda X, y: memorize_scalars(X[0], X[:, -1], y, heads=4), near, "mha", 1e-8),
}


@pytest.mark.parametrize("name", CONSTRUCTIONS)
def test_an_error_of_one_label_beyond_the_promise_is_refused(name, monkeypatch):
    """The promise is relative to half the range of the labels, here a fifth of the largest one."""
    build, module, forward, promise = CONSTRUCTIONS[name]
    g = torch.Generator().manual_seed(0)
    X, y = torch.randn(T, 3, 4, generator=g, **F64), 2 + torch.rand(T, generator=g, **F64)
    allowed, right = promise * float(y.max() - y.min()) / 2, getattr(module, forward)
    assert float(y.max()) > 5 * float(y.max() - y.min()) / 2

    if module is near:  # one attempt is enough
        monkeypatch.setattr(module, "_SPREADS", module._SPREADS[:1])
        monkeypatch.setattr(module, "_DRAWS", 1)

    def errs(by):
        def outputs(weights, *data, **options):
            found = right(weights, *data, **options)
            if len(found) == T and found.ndim == 2:  # not one example alone
                found = found.clone()
                found[WRONG] += by
            return found

        monkeypatch.setattr(module, forward, outputs)
        return build(X, y)

    assert errs(0.7 * allowed) is not None
    for by in (1.5 * allowed, -1.5 * allowed):
        with pytest.raises(ValueError, match="got"):
            errs(by)
