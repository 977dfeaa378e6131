"""Labels of N classes on random attention, and a linear memory: where half of the draws are met.

    python benchmarks/classes.py

A draw has its examples in a row: how many of them, from the first, are met together? Printed is,
over the formula, the size at which a half of the draws are met (between two sizes their share is a
line), and in brackets, where it is off a half by one standard deviation. Tokens and queries are
Gaussian, logits have size one. It takes about nine minutes of one thread.
"""

import bisect
import math
import time

import numpy as np
import torch
from scipy.optimize import linprog
from scipy.sparse import csr_array

from attnmem import mha_features, random_mha
from attnmem.theory import counts, tiny

# Classes, heads, dimensions, draws; own contexts of three tokens, or a shared one of n = d.
OWN = [(N, 1, 2, 100) for N in (3, 5, 10)] + [(N, 1, 8, 100) for N in (5, 10, 20)]
OWN += [(N, 1, 4, 100) for N in (2, 5, 10, 20, 30, 50)]
SHARED = ((3, 1, 9, 100), (5, 1, 9, 100))
# Sizes of unequal classes, on own contexts of two heads in five dimensions.
UNEQUAL = ([4, 1, 1, 1, 1], [36, 36, *[1] * 8], [21, 21, 21, *[1] * 7], [64, 32, 16, 8, 4, 2, 1])
TEN = ((10, 1, 8, 100), (10, 2, 8, 100), (10, 4, 8, 48), (10, 3, 16, 24))


def separable(rows):
    """Whether a program finds a margin of more than 1e-9; rows are of about unit length."""
    k, m = rows.shape
    lines = csr_array(np.hstack([-rows, np.ones((k, 1))]))
    goal, box = np.append(np.zeros(m), -1), [(-1, 1)] * m + [(None, 1)]
    w = linprog(goal, lines, np.zeros(k), bounds=box, method="highs-ipm").x[:-1]
    return (rows @ w).min() > 1e-9


def half(draw, draws, most, formula):
    """Where half of the draws are met; ``draw`` gives of a seed whether a size is met."""
    top = range(1, most + 1)
    found = [bisect.bisect_left(top, True, key=draw(seed)) for seed in range(draws)]
    T = np.arange(most + 2)
    share = np.mean(np.array(found)[:, None] >= T, axis=0)
    off = 0.5 / math.sqrt(draws)
    at, low, high = np.interp([-0.5, -0.5 - off, -0.5 + off], -share, T) / formula
    return f"{formula:.1f}; {at:.2f} ({low:.2f} to {high:.2f})"


def classes(N, H, d, draws, shared=False, sizes=None, mean=0.0):
    """A line of the table; ``sizes`` are those of unequal classes, ``mean`` that of all tokens."""
    R = H * (d - 1) + 1 if shared else H * d
    sizes = sizes or [1] * N
    formula, k = counts.unequal_class_capacity(R, sizes)
    most = round((3 if mean else 1.6) * formula)

    def draw(seed):
        g, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
        E = mean + torch.randn(*([] if shared else [most]), d if shared else 3, d, generator=g)
        layer = random_mha(H, d, min(d, 3), seed=10_000 + seed)
        Z = mha_features(layer, E, torch.randn(most, d, generator=g))
        U, s, _ = torch.linalg.svd(Z, full_matrices=False)
        Z = U[:, s > 1e-9 * s[0]].numpy()
        assert Z.shape[1] == R
        Z /= np.linalg.norm(Z, axis=1, keepdims=True)
        y = rng.choice(N, most, p=np.divide(sizes, sum(sizes)))
        t, rival = np.nonzero(np.arange(N) != y[:, None])
        signs = (np.eye(N)[y[t]] - np.eye(N)[rival])[:, 1:]  # the first class has no weights
        rows = np.einsum("kn,kr->knr", signs, Z[t]).reshape(len(t), -1)
        return lambda T: not separable(rows[: T * (N - 1)])

    each = R / counts.class_price(k)
    print(f"  N = {N}, R = {R}: {each:.1f}; {half(draw, draws, most, formula)}", flush=True)


def by_program(keys, values):
    """Whether some matrix recalls all."""
    rows = np.einsum("ijd,ie->ijde", values[:, None] - values, keys)
    return separable(rows[~np.eye(len(keys), dtype=bool)].reshape(-1, keys.shape[1] ** 2))


def by_training(keys, values):
    """Whether training finds such a matrix."""
    facts = tiny.Facts(torch.tensor(keys), torch.tensor(values))
    return tiny.recalled(tiny.trained_matrix(facts, steps=2000), facts) == 1


def memory(d, met, draws):
    """A line for pairs of unit vectors; the formula is interpolated between integers."""
    p = tiny.count_at(1, d)
    below, above = (k * counts.class_price(k) for k in (p, p + 1))

    def draw(seed):
        pairs = [part.numpy() for part in tiny.random_facts(2 * p, d, seed)]
        return lambda k: k > 1 and not met(*(part[:k] for part in pairs))

    found = half(draw, draws, 2 * p, p + (d * d - below) / (above - below))
    load = f"p = {p}, p ln p / d^2 = {p * math.log(p) / d**2:.2f}"
    print(f"  d = {d}, {met.__name__}: {load}; {found}", flush=True)


def main():
    """All four."""
    start = time.process_time()
    print("1. own contexts: R over the price; the formula; half of the draws")
    for sizes in OWN:
        classes(*sizes)
    print("2. a shared context")
    for sizes in SHARED:
        classes(*sizes, shared=True)
    print("3. ten classes; unequal ones; nine tenths of one, also where features have a mean")
    for sizes in TEN:
        classes(*sizes)
    for sizes in UNEQUAL:
        classes(len(sizes), 2, 5, 48, sizes=sizes)
    for mean in (0.0, 2.0):
        classes(2, 2, 5, 48, sizes=[9, 1], mean=mean)
        classes(10, 2, 5, 48, sizes=[81, *[1] * 9], mean=mean)
    print("4. a linear memory: the formula, p before rounding; half of the draws")
    for d, draws in ((6, 100), (8, 48), (12, 24), (16, 8)):
        memory(d, by_program, draws)
    for d in (16, 24, 32):
        memory(d, by_training, 8)
    print(f"{time.process_time() - start:.0f} s")


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    main()
