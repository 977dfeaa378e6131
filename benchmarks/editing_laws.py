"""The laws of editing on random attention: the price, what fades, all weights, and float64.

    python benchmarks/editing_laws.py

Tokens, queries and labels are Gaussian, or uniform on [0, 1] where it says so. Layers, and labels
drawn apart, have seeds of their own: one seed would begin them with the numbers of the data.
"""

import contextlib
import math
import statistics
import time

import torch

from attnmem import mha, mha_features, random_mha
from attnmem.core import bounds
from attnmem.theory import fitting
from attnmem.theory.editing import Memory
from attnmem.theory.tangents import ScalarHeads

LAYERS = ((8, 4, 16, 4), (24, 3, 4, 2))  # heads, tokens, their width, that of heads


def balanced(layer, count, sample, seed):
    """Features of so many examples, in lengths by a ``sample`` of others; None: Gaussian ones."""
    g = torch.Generator().manual_seed(seed)
    if layer is None:
        Z = torch.randn(count + sample, 128, generator=g)
    else:
        H, n, d, d_h = layer
        E, e = (
            torch.randn(count + sample, n, d, generator=g),
            torch.randn(count + sample, d, generator=g),
        )
        Z = mha_features(random_mha(H, d, d_h, seed=10_000 + seed, spread=4 if d > 4 else 2), E, e)
    L = torch.linalg.cholesky(Z[count:].mT @ Z[count:] / sample)
    return torch.linalg.solve_triangular(L, Z[:count].mT, upper=False).mT


def price(layer, R, times, share, draws=80):
    """The law, and the means of the squared norm and of the mean square on 2000 fresh inputs."""
    T, norms, fresh = round(share * R), [], []
    for seed in range(draws):
        Z = balanced(layer, T + 2000, times * R, seed)
        c = torch.randn(T, 1, generator=torch.Generator().manual_seed(20_000 + seed))
        w = torch.linalg.lstsq(Z[:T], c, driver="gelsd").solution
        norms.append(float(w.square().sum()))
        fresh.append(float((Z[T:] @ w).square().mean()))
    return T / (R - T - 1), statistics.mean(norms), statistics.mean(fresh)


def fading(layer, R, draws=80):
    """Of some ages the share of right signs, the law, and the mean answer times the label."""
    ages = [R // 4, R // 2, R, 2 * R]
    answers = {k: [] for k in ages}
    for seed in range(draws):
        Z = balanced(layer, 5 * R, 20 * R, seed)
        g = torch.Generator().manual_seed(20_000 + seed)
        c, w = torch.randint(2, (5 * R,), generator=g) * 2.0 - 1, torch.zeros(R)
        for t in range(5 * R):
            w = w + (c[t] - w @ Z[t]) * Z[t] / (Z[t] @ Z[t])
            if t >= 3 * R and t % (R // 8) == 0:
                for k in ages:
                    answers[k].append(float(w @ Z[t - k] * c[t - k]))
    for k, found in answers.items():
        left = math.exp(-k / R)
        law = 0.5 + 0.5 * math.erf(left / math.sqrt(2 - 2 * left**2))
        share = sum(a > 0 for a in found) / len(found)
        mean, kept = statistics.mean(found), (1 - 1 / R) ** k
        print(f"  {k} facts old: right {share:.3f} (law {law:.3f}), mean {mean:.3f} ({kept:.3f})")


SHAPES = [(2, 3, 4, 2, 0.3), (4, 3, 5, 1, 0.3), (3, 4, 3, 3, 0.3), (2, 2, 6, 1, 0.3)]
SHAPES += [(6, 3, 3, 1, 0.3), (3, 5, 4, 2, 1), (4, 3, 4, 2, 1), (2, 4, 6, 2, 1)]


def everywhere(H, n, d, d_h, spread):
    """Facts one by one into all weights; uniform data if attention starts blunt."""
    P, shape = bounds.own_context_ceiling(H, d_h, d), f"H = {H}, n = {n}, d = {d}, d_h = {d_h}"
    counts, moved, kind = [], [], "uniform" if spread < 1 else "Gaussian"
    middle, size = (0.5, 12**-0.5) if spread < 1 else (0.0, 1.0)
    for seed in range(10, 15):
        g = torch.Generator().manual_seed(seed)
        draw = torch.rand if spread < 1 else torch.randn
        E, e, y = (draw(s, generator=g) for s in ((P + 3, n, d), (P + 3, d), (P + 3,)))
        others = draw(500, n, d, generator=g), draw(500, d, generator=g)
        first = random_mha(H, d, d_h, seed=10_000 + seed, spread=spread)
        heads = ScalarHeads(first.W_Q, first.W_K, first.W_V[..., 0] * first.W_O.view(H, 1))
        for T in range(1, P + 4):
            fit = fitting.levenberg_marquardt(heads, E[:T], e[:T], y[:T], steps=200)
            if fit.stop != "met":
                break
            heads = fit.weights
            if T in {round(share * P) for share in (0.25, 0.5, 0.75)}:
                out = mha(heads.layer(), *others)[:, 0] - middle
                moved.append(float(out.square().mean().sqrt()) / size)
        counts.append(T - 1)
    floor = bounds.own_context_floor(H, d_h, d)
    print(f"  {shape}, {kind}: H d = {H * d}, L = {floor}, P = {P}: {counts}")
    print(f"    deviation elsewhere, in label deviations: {min(moved):.2f} to {max(moved):.2f}")
    return [count / P for count in counts]


def nearly_dependent(spread):
    """Of 200 facts, how many a hundred heads on pairs of tokens of two numbers take in float64."""
    taken = []
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        E, e, y = (torch.randn(s, generator=g) for s in ((1800, 2, 2), (1800, 2), (200,)))
        layer = random_mha(100, 2, 1, seed=10_000 + seed, spread=spread)
        memory = Memory(layer, E[200:], e[200:])
        taken.append(0)
        with contextlib.suppress(ValueError):
            for t in range(200):
                memory.write(E[t], e[t], y[t])
                taken[-1] += 1
    return taken


def main():
    """All four."""
    start = time.time()
    print("1. price at 0.25, 0.5, 0.75, 0.9 of R: T / (R - T - 1), squared norm, on fresh inputs")
    for layer in (None, *LAYERS):
        R = layer[0] * layer[2] if layer else 128
        for times in (3, 10, 40):
            found = [price(layer, R, times, share) for share in (0.25, 0.5, 0.75, 0.9)]
            told = "; ".join(", ".join(f"{x:.2f}" for x in each) for each in found)
            print(f"  {layer or 'Gaussian'}, sample of {times} R: {told}", flush=True)
    for layer in (None, *LAYERS):
        print(f"2. without memory, {layer or 'Gaussian'}")
        fading(layer, layer[0] * layer[2] if layer else 128)
    print("3. all weights, five seeds")
    shares = [share for shape in SHAPES for share in everywhere(*shape)]
    print(f"  of P: {min(shares):.2f} to {max(shares):.2f}, median {statistics.median(shares):.2f}")
    print("4. nearly dependent features, three seeds")
    for spread in (0.3, 1, 3):
        print(f"  logits of spread {spread}: {nearly_dependent(spread)} of 200")
    print(f"{time.time() - start:.0f} s")


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    main()
