"""Weights in few digits: how many the labels need, the bound against corners, and two estimates.

    python benchmarks/rounding.py

Tokens, queries and real labels of the first part are uniform on [0, 1], with own contexts; all of
the other two is Gaussian. Layers have seeds of their own: one seed would begin them with the
numbers of the data, also where those are uniform.
"""

import itertools
import math
import statistics

import numpy as np
import torch
from scipy.integrate import quad
from scipy.optimize import brentq, nnls
from scipy.stats import norm

from attnmem import MHAWeights, mha, mha_features, random_mha
from attnmem.core import bounds
from attnmem.theory import fitting
from attnmem.theory.cancelling import memorize_by_cancellation
from attnmem.theory.rounding import certified_digits, certified_rounding
from attnmem.theory.tangents import ScalarHeads
from attnmem_yours import memorize

SHAPES = ((4, 4, 8, 4), (2, 3, 4, 2), (8, 3, 4, 2), (4, 4, 8, 1), (2, 4, 8, 8), (8, 4, 8, 2))
# How many labels, of the floor L(H) or of the ceiling P(H).
PARTS = {"built, L / 2": 0.5, "built, L": 1, "trained, L / 2": 0.5, "trained, L": 1}
PARTS |= {"trained, 0.8 P": 0.8, "trained, 0.95 P": 0.95}


def rounded(weights, digits):
    """The nearest weights of so many binary digits after the first."""
    parts = [torch.frexp(W) for W in weights]
    least = 2.0 ** (digits + 1)
    return MHAWeights(*(torch.ldexp((m * least).round() / least, k) for m, k in parts))


def measured(layer, E, e, y):
    """Digits that keep all labels to 1%, digits proven, and the error at ten over its law."""
    top = float(y.abs().max())
    off = [float((mha(rounded(layer, m), E, e)[:, 0] - y).abs().max()) / top for m in range(1, 53)]
    needed = next(m for m in range(1, 52) if max(off[m - 1], off[m]) <= 0.01)
    outputs = lambda *some: mha(MHAWeights(*some), E, e)[:, 0]  # noqa: E731
    J = torch.autograd.functional.jacobian(outputs, tuple(layer))
    S = sum((j * W).flatten(1).square().sum(1) for j, W in zip(J, layer, strict=True)).sqrt()
    law = 0.2085 * float(S.max()) / top * 2**-10
    return needed, certified_digits(layer, E, e, y[:, None]), off[9] / law, off[22], off[9]


def study(shape, seed):
    """Of one draw of data: heads that nearly cancel, and trained ones."""
    H, n, d, d_h = shape
    L, P = bounds.own_context_floor(H, d_h, d), bounds.own_context_ceiling(H, d_h, d)
    g = torch.Generator().manual_seed(seed)
    E, e, y = (torch.rand(*size, generator=g) for size in [(P, n, d), (P, d), (P,)])
    found = {}
    for name, T in PARTS.items():
        part = int(T * P if name.endswith(" P") else T * L)
        data = E[:part], e[:part], y[:part]
        if name.startswith("built"):
            layer = memorize_by_cancellation(*data, heads=H, head_dim=d_h, seed=10_000 + seed)
        else:
            for again in range(10):
                start = random_mha(H, d, d_h, seed=10_000 + seed + 100 * again, spread=0.3)
                heads = ScalarHeads(start.W_Q, start.W_K, start.W_V[..., 0])
                fit = fitting.levenberg_marquardt(heads, *data, steps=300)
                if fit.stop == "met":
                    break
            assert fit.stop == "met"
            if again:
                print(f"    {name}, seed {seed}: start {again + 1} is the first to meet the labels")
            layer = fit.weights.layer()
        found[name] = measured(layer, *data)
    return found


def corners(shape, own, spread, seed, digits):
    """The furthest of all corners over the first-order sum and over the proven bound."""
    H, d, d_h, d_v, o = shape
    g = torch.Generator().manual_seed(seed)
    sizes = [(H, d, d_h), (H, d, d_h), (H, d, d_v), (H * d_v, o), (o, o)]
    weights = [torch.randn(*size, generator=g) for size in sizes]
    weights = MHAWeights(*(spread * W for W in weights[:2]), *weights[2:])
    E, e = torch.randn(*[3] * own, 3, d, generator=g), torch.randn(3, d, generator=g)
    y, flat = mha(weights, E, e), torch.cat([W.flatten() for W in weights])
    signs = torch.tensor([*itertools.product((-1.0, 1.0), repeat=len(flat))])

    def outputs(rows):
        parts = rows.split([W.numel() for W in weights], 1)
        many = MHAWeights(*(x.reshape(-1, *W.shape) for x, W in zip(parts, weights, strict=True)))
        return mha(many, E.expand(len(rows), *E.shape), e.expand(len(rows), *e.shape))

    J = torch.autograd.functional.jacobian(lambda v: outputs(v[None]).flatten(), flat)
    for m in digits:
        u = 2.0 ** -(m + 1)
        far = float((outputs(flat * (1 + u * signs)) - y).abs().max())
        first = u * float((J * flat).abs().sum(1).max())
        yield far / first, far / certified_rounding(weights, E, e, y, digits=m)


def uniform(w, bits):
    """Of so many symmetric levels, with the best of 33 scales; and the share of the norm lost."""
    best = math.inf, w
    for top in np.linspace(0.2, 1, 33) * float(w.abs().max()):
        step, half = 2 * top / 2**bits, 2 ** (bits - 1)
        levels = ((w / step - 0.5).round().clamp(-half, half - 1) + 0.5) * step
        best = min(best, (float((levels - w).norm() / w.norm()), levels), key=lambda one: one[0])
    return best


def lost(load, share):
    """The estimate for signs: of the read-out of largest margin, the share of signs that turn."""
    e = share / math.sqrt(1 - share**2)
    room = lambda k: (1 + k**2) * norm.cdf(k) + k * norm.pdf(k) - 1 / load  # noqa: E731
    k = brentq(room, -5, 5)
    tail = quad(lambda t: norm.pdf(t) * norm.cdf(-t / e), k, math.inf)[0]
    return norm.cdf(k) * norm.cdf(-k / e) + tail


def law(layer, draws, load, bits, signs):
    """What rounding the read-out does, and the estimate."""
    H, n, d, d_h = layer
    R, T, off, shares = H * d, int(load * H * d), [], []
    for seed in range(100, 100 + draws):
        g = torch.Generator().manual_seed(seed)
        many = torch.randn(T + 20 * R, n, d, generator=g), torch.randn(T + 20 * R, d, generator=g)
        Z = mha_features(random_mha(H, d, d_h, seed=10_000 + seed, spread=2), *many)
        L = torch.linalg.cholesky(Z[T:].mT @ Z[T:] / (20 * R))
        Z = torch.linalg.solve_triangular(L, Z[:T].mT, upper=False).mT
        if signs:
            y = torch.randint(2, (T,), generator=g) * 2.0 - 1
            A = np.vstack([(Z * y[:, None]).mT.numpy(), np.ones(T)])
            rest = A @ nnls(A, np.eye(R + 1)[-1], maxiter=20 * T)[0] - np.eye(R + 1)[-1]
            w = torch.tensor(-rest[:-1] / rest[-1])
        else:
            y = torch.randn(T, generator=g)
            w = torch.linalg.lstsq(Z, y[:, None], driver="gelsd").solution[:, 0]
        share, levels = uniform(w, bits)
        shares.append(share)
        error = (Z @ levels) * y <= 0 if signs else (Z @ levels - y).square()
        off.append(float(error.double().mean()))
    share = statistics.mean(shares)
    if signs:
        return statistics.mean(off), lost(load, share)
    return math.sqrt(statistics.mean(off)), math.sqrt(
        share**4 + share**2 * (1 - share**2) * load / (1 - load)
    )


def main():
    """Print all four parts."""
    print("1. digits needed, of five seeds (proven); error at 23 digits, at 10, over its law at 10")
    pairs, ratios = [], []
    for shape in SHAPES:
        print(" ", shape)
        found = [study(shape, seed) for seed in range(5)]
        pairs += [[needed for needed, *_ in one.values()] for one in found]
        for name in found[0]:
            needed, proven, ratio, *errors = zip(*(one[name] for one in found), strict=True)
            ratios += ratio
            most = ", ".join(f"{max(error):.1e}" for error in errors)
            print(f"    {name}: {needed} {proven}; {most}; {min(ratio):.2f} to {max(ratio):.2f}")
    for name, k in (("L / 2", 0), ("L", 1)):
        signs = [(one[k] > one[k + 2]) - (one[k] < one[k + 2]) for one in pairs]
        counts = [signs.count(sign) for sign in (1, 0, -1)]
        print(f"  {name} labels, built against trained: more, as many, fewer: {counts}")
    print(f"  error at ten digits over its law: {min(ratios):.2f} to {max(ratios):.2f}")
    print("2. digits: layers whose furthest corner exceeds the first order (by), the proven bound;")
    print("   corner over bound, least, median, largest")
    small = [(1, 2, 1, 1, 1), (1, 2, 2, 1, 1), (2, 2, 1, 1, 1), (1, 2, 1, 2, 2)]
    digits = (1, 3, 5, 7, 10, 16, 23)
    cases = itertools.product(small, (True, False), (0.5, 2.0, 6.0), range(3))
    for m, each in zip(
        digits, zip(*(corners(*c, digits) for c in cases), strict=True), strict=True
    ):
        first, bound = ([*map(float, part)] for part in zip(*each, strict=True))
        above = sum(x > 1 + 1e-9 for x in first), sum(x > 1 + 1e-7 for x in bound)
        middle = sorted(bound)[len(bound) // 2]
        ends = f"{min(bound):.3f}, {middle:.4f}, {max(bound):.4f}"
        print(f"  {m}: {above[0]} of {len(first)} ({max(first):.3f}), {above[1]}; {ends}")
    print("3. read-outs rounded: load, bits, measured, estimate")
    for layer, draws in (((4, 3, 12, 4), 12), ((6, 5, 10, 2), 12), ((4, 4, 48, 8), 6)):
        for signs, loads, bits in (
            (False, (0.25, 0.5, 0.75), (2, 4, 8)),
            (True, (0.5, 1, 1.5), (1, 2, 3)),
        ):
            lines = [(a, b, *law(layer, draws, a, b, signs)) for a in loads for b in bits]
            said = "; ".join(f"{a} {b}: {x:.3g} {y:.3g}" for a, b, x, y in lines)
            print(f"  R = {layer[0] * layer[2]}, {'signs' if signs else 'reals'}: {said}")
    print("4. memorize: labels kept by rounding, and with keep, of five seeds")
    for d, n, T, H, d_h in (
        (6, 4, 100, 4, 3),
        (8, 4, 112, 4, 4),
        (8, 4, 180, 4, 4),
        (4, 3, 20, 2, 2),
    ):
        for kind in ("bfloat16", "int8"):
            counts = []
            for seed in range(5):
                g = torch.Generator().manual_seed(seed)
                data = [torch.rand(*size, generator=g) for size in [(T, n, d), (T, d), (T,)]]
                sizes = {"heads": H, "head_dim": d_h, "seed": 10_000 + seed}
                counts.append(
                    (memorize(*data, **sizes).kept[kind], memorize(*data, **sizes, keep=kind).count)
                )
            print(f"  T = {T}, H = {H}, n = {n}, d = {d}, d_h = {d_h}, {kind}: {counts}")


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    main()
