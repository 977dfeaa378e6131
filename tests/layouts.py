"""Examples of every layout, and one layer on them: one example and one head at a time, in numpy."""

import numpy as np

from oracles import partitions


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def layouts(T=60, n=3, d=4):
    """Contexts, queries, mask, and the dimensions m, q, c that they have by construction."""
    E, e, free = normal(T, n, d), normal(T, d, seed=1), (d, d, 0)
    behind = np.arange(n) >= np.random.default_rng(2).integers(1, n + 1, T)[:, None]
    front = np.arange(n) < np.random.default_rng(2).integers(0, n, T)[:, None]
    of_shared = np.random.default_rng(2).random((T, d + 2)) < 0.4
    of_shared[:, 0] = False
    first = np.eye(d)[0]
    one_sum = E * (1 - first) + (1 - E[..., 1:].sum(-1, keepdims=True)) * first
    two_sums = E.copy()
    two_sums[..., 0] = 1 - E[..., 1]
    two_sums[..., 2] = normal(T, seed=3)[:, None]
    few, flat = normal(2, d, seed=4), normal(T, n, 2) @ normal(2, d, seed=4)
    return {
        "free": (E, e, None, free),
        "masked": (np.where(behind[..., None], np.nan, E), e, behind, free),
        "masked in front": (E, e, front, free),
        "shared, short": (E[0], e, None, (n - 1, d, 1)),
        "shared, long": (normal(d + 2, d), e, None, free),
        "as many tokens as dimensions": (normal(T, d, d), e, None, free),
        "shared, masked": (normal(d + 2, d), e, of_shared, free),
        "a constant sum": (one_sum, e, None, (d - 1, d, 1)),
        "a constant sum, masked in front": (one_sum, e, front, (d - 1, d, 1)),
        "two sums": (two_sums, e, None, (d - 2, d, 2)),
        "a zero column": (E * (np.arange(d) != 1), e, None, (d - 1, d, 0)),
        "few queries": (E, normal(T, 2, seed=1) @ few, None, (d, 2, 0)),
        "one query": (E, np.repeat(e[:1], T, 0), None, (d, 1, 0)),
        "flat tokens": (flat, e, None, (2, d, 0)),
        "units": (E * [1, 30, 1e-2, 4], e * [50, 1, 1, 1e-2], None, free),
        "one token": (E[:, :1], e, None, (0, d, d)),
    }


LAYOUTS = [*layouts()]


def tokens_of(E, mask, t):
    """The tokens of one example, without padding."""
    tokens = E if E.ndim == 2 else E[t]
    return tokens if mask is None else tokens[~mask[t]]


def attention(Q, K, tokens, query):
    """The attention weights of one head."""
    logits = np.array([x @ K @ (query @ Q) for x in tokens])
    shares = np.exp(logits - logits.max())
    return shares / shares.sum()


def outputs(weights, E, e, mask=None):
    """Outputs of a layer."""
    W_Q, W_K, W_V, W_O, W_D = (W.numpy() for W in weights)
    rows = []
    for t, query in enumerate(e):
        tokens, heads = tokens_of(E, mask, t), zip(W_Q, W_K, W_V, strict=True)
        values = [attention(Q, K, tokens, query) @ tokens @ V for Q, K, V in heads]
        rows.append(np.concatenate(values) @ W_O @ W_D)
    return np.array(rows)


def jacobian(heads, E, e, mask=None):
    """The derivative of one output in all weights."""
    rows = []
    for t, query in enumerate(e):
        tokens, row = tokens_of(E, mask, t), []
        for Q, K, v in zip(*heads, strict=True):
            shares = attention(Q, K, tokens, query)
            z = shares @ tokens
            pull = sum(a * (x @ v - z @ v) * (x - z) for a, x in zip(shares, tokens, strict=True))
            row += [z, np.outer(query, K.T @ pull).ravel(), np.outer(pull, Q.T @ query).ravel()]
        rows.append(np.concatenate(row))
    return np.array(rows)


def rank(groups, E, e, d_h, mask=None):
    """Singular values above 1e-10 of the largest, for data in the units of each coordinate.

    Heads of a group have equal attention and values that sum to zero. A group of -1 is a free head.
    """
    rng, d = np.random.default_rng(0), e.shape[1]
    W_Q, W_K, mu = [], [], []
    for size in groups:
        Q, K, v = (rng.standard_normal(shape) for shape in ((d, d_h), (d, d_h), (abs(size), d)))
        W_Q += [Q] * abs(size)
        W_K += [K] * abs(size)
        mu += [*(v - v.mean(0) if size > 0 else v)]
    E, e = (x / np.maximum(np.nanmax(abs(x.reshape(-1, x.shape[-1])), 0), 1e-9) for x in (E, e))
    J = jacobian((W_Q, W_K, mu), 2 * E, 2 * e, mask)
    values = np.linalg.svd(J / np.linalg.norm(J, axis=1, keepdims=True), compute_uv=False)
    return int((values > 1e-10 * values[0]).sum())


def free_rank(heads, E, e, d_h, mask=None):
    return rank([-1] * heads, E, e, d_h, mask)


def cancelling_rank(heads, E, e, d_h, mask=None):
    """The largest rank where all outputs are zero, of all ways to group the heads."""
    return max(rank(groups, E, e, d_h, mask) for groups in partitions(heads))
