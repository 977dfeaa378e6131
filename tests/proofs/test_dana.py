"""Statements of Dana et al. against closed forms and all small cases: they call no library."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hostile
import oracles
from oracles import F64


def divergence(pi, logits):
    """The KL divergence of one row, from its definition."""
    top = max(logits)
    log_total = top + math.log(sum(math.exp(logit - top) for logit in logits))
    pairs = zip(pi, logits, strict=True)
    return sum(p * (math.log(p) - logit + log_total) for p, logit in pairs if p)


def entropy(pi):
    return -sum(p * math.log(p) for p in pi if p)


def rows_and_tokens(N, parts):
    """Lattice distributions with every ``g`` for which the look-up has a finite strength."""
    for exact in hostile.lattice_distributions(N, parts):
        pi = [float(p) for p in exact]
        for g in range(N):
            if entropy(pi) > 0 and pi[g] < 1:
                yield pi, g


def strength(gaps, H):
    """``lambda >= 0`` with ``sum_j exp(-lambda gap_j) = e^H - 1``, by bisection."""
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        if sum(math.exp(-middle * gap) for gap in gaps) > math.expm1(H):
            low = middle
        else:
            high = middle
    return low


def paid(pi, g, products):
    """The divergence of a look-up of ``g`` at that strength; products of tokens are given."""
    gaps = [products[g][g] - products[g][j] for j in range(len(pi)) if j != g]
    scale = strength(gaps, entropy(pi))
    return divergence(pi, [scale * product for product in products[g]])


def look_up_bound(pi, g, C):
    """The right side of Theorem 2, one sequence."""
    N, wrong = len(pi), 1 - pi[g]
    rest = [p / wrong for i, p in enumerate(pi) if i != g]
    tv = sum(abs(p - 1 / (N - 1)) for p in rest) / 2
    return wrong * (1 + 2 * C + C * tv) / (1 - 2 * C) * math.log((N - 1) / math.expm1(entropy(pi)))


# --- encoders -------------------------------------------------------------------------------------


@pytest.mark.hostile("dana-proposition-2")
@pytest.mark.parametrize("N", [2, 3, 5, 7])
def test_proposition_2_on_powers_of_two(N):
    """``N - 1`` dimensions are exact: the softmax in base 2 is the distribution, not its limit."""
    W = [*torch.eye(N - 1, dtype=torch.int64).tolist(), [0] * (N - 1)]
    logs = []
    for pi in hostile.dyadic_distributions(N):
        log2 = [p.numerator.bit_length() - p.denominator.bit_length() for p in pi]
        E = [entry - log2[-1] for entry in log2[:-1]]
        assert oracles.softmax2([oracles.dot(row, E) for row in W]) == pi
        logs.append([N * entry - sum(log2) for entry in log2])
    # One dimension less: encoders have centred logits of rank at most d, and these have N - 1.
    if N > 2:  # two powers of two that add to one are equal
        assert oracles.rank(logs) == N - 1
    tiny = Fraction(1, 2**900)  # nearly without full support
    assert oracles.softmax2([900, 0])[1] == tiny / (1 + tiny)


@pytest.mark.hostile("dana-lemma-1")
@pytest.mark.parametrize("N", [2, 3, 5])
def test_lemma_1_the_slope_is_the_least_probability(N):
    """All lattice distributions of full support, all directions of the logits, far out."""
    corners = [c for c in itertools.product((0, 1), repeat=N) if len(set(c)) > 1]
    for pi in hostile.lattice_distributions(N, 7, zeros=False):
        slopes = []
        for corner in corners:
            far = divergence(pi, [2000.0 * x for x in corner])
            near = divergence(pi, [1000.0 * x for x in corner])
            slopes.append((far - near) / 1000)
            assert far >= float(min(pi)) * 2000 - entropy(pi) - 1e-9
        assert min(slopes) == pytest.approx(float(min(pi)))  # so level sets are bounded, just


@pytest.mark.hostile("dana-section-5-1")
@pytest.mark.parametrize("d", [1, 2, 5])
def test_rank_d_stores_d_independent_outputs_exactly(d):
    """And no more."""
    tokens, wanted = hostile.moments(d + 1, d + 1, d + 3), hostile.integers(d, d + 1, d + 1, size=9)
    assert oracles.rank(tokens) == oracles.rank(wanted) == d + 1
    for count in (d, d + 1):  # any matrix M with tokens @ M = wanted has at least the rank of both
        M = torch.linalg.pinv(tokens[:count].double()) @ wanted[:count].double()
        torch.testing.assert_close(tokens[:count].double() @ M, wanted[:count].double())
        assert torch.linalg.matrix_rank(M) == count


@pytest.mark.hostile("dana-lemma-3")
def test_lemma_3_generic_exponents_differ():
    """Unless a last token is shared: swapped choices of two such sequences are one polynomial."""

    def exponents(rows, e, pos, kappa):
        x = e[rows] + pos
        products = x[:, -1:] * x
        heads = itertools.permutations(range(len(rows)))
        return {
            sum(int(kappa[h] * products[t, s]) for t, (h, s) in enumerate(zip(*pick, strict=True)))
            for pick in itertools.product(heads, itertools.product(range(2), repeat=len(rows)))
        }

    draw = torch.Generator().manual_seed(0)
    e, pos, kappa = torch.randint(1, 10**6, (3, 3), generator=draw)
    cycle, shared = torch.tensor([[0, 1], [1, 2], [2, 0]]), torch.tensor([[1, 0], [2, 0]])
    assert len(exponents(cycle, e, pos[:2], kappa)) == math.factorial(3) * 2**3
    assert len(exponents(cycle, torch.arange(3), torch.arange(2), torch.arange(1, 4))) < 48
    assert len(exponents(shared, e, pos[:2], kappa)) == 7 < 2 * 2**2  # the order of heads is lost


# --- noisy tables ---------------------------------------------------------------------------------


FRAMES = dict(hostile.frames())


@pytest.mark.hostile("dana-theorem-2")
@pytest.mark.parametrize("name", FRAMES)
def test_theorem_2_for_lattice_distributions(name):
    """Every ``g``, also of no probability, and rows that are no unit vectors."""
    W = FRAMES[name]
    N = len(W)
    products = (W @ W.T).tolist()
    C = max(abs(products[i][j] - (i == j)) for i in range(N) for j in range(N))
    assert C < 0.5
    closest = math.inf
    for pi, g in rows_and_tokens(N, 5 if N < 5 else 3):
        loss, bound = paid(pi, g, products), look_up_bound(pi, g, C)
        assert -1e-12 <= loss <= bound * (1 + 1e-9) + 1e-9
        if loss > 1e-6:
            closest = min(closest, bound / loss)
    if name.startswith("orthonormal"):  # attained: no smaller constant would do
        assert closest == pytest.approx(1)


def nearly_orthogonal_table(N, C, same_g, seed):
    """W with products at most C off the identity, some of them exactly, and a noisy table."""
    generator = torch.Generator().manual_seed(seed)
    off = 2 * oracles.uniform(generator, N, N) - 1
    off = (off + off.T) / 2
    off *= C / off.abs().max()
    # The smallest eigenvalue may be below -1: then the products are smaller, so that W exists.
    off *= min(1.0, 0.99 / max(1e-9, -float(torch.linalg.eigvalsh(off)[0])))
    W = torch.linalg.cholesky(torch.eye(N, **F64) + off)
    assert (W @ W.T - torch.eye(N, **F64)).abs().max() <= C + 1e-12
    g = torch.zeros(9, dtype=torch.int64) if same_g else torch.randint(N, (9,), generator=generator)
    pi = oracles.uniform(generator, 9, N).pow(3) + 1e-3
    return W, pi / pi.sum(1, keepdim=True), g


@pytest.mark.hostile("dana-theorem-2-simple")
@settings(max_examples=40)
@given(st.integers(2, 12), st.floats(0.01, 0.49), st.booleans(), st.integers(0, 2**32))
def test_theorem_2_simple_by_one_strength_for_all(N, C, same_g, seed):
    W, pi, g = nearly_orthogonal_table(N, C, same_g, seed)
    H = sum(entropy(row) for row in pi.tolist()) / len(pi)
    logarithm = math.log((N - 1) / math.expm1(H))
    logits = logarithm / (1 - 2 * C) * (W @ W.T)[g]
    losses = [divergence(*row) for row in zip(pi.tolist(), logits.tolist(), strict=True)]
    wrong = 1 - float(pi.gather(1, g[:, None]).mean())
    bound = wrong * (1 + 2 * C) / (1 - 2 * C) * logarithm
    assert sum(losses) / len(pi) <= bound * (1 + 1e-9) + 1e-9


@pytest.mark.hostile("dana-section-6-coefficient")
@pytest.mark.parametrize("N", [3, 4, 5, 12])
def test_section_6_printed_factor_fails_on_a_square(N):
    """Twice the greatest product's bound holds, for every lattice distribution and every g."""
    W = [(math.cos(x), math.sin(x)) for x in (2 * math.pi * i / N for i in range(N))]
    products = [[oracles.dot(a, b) for b in W] for a in W]
    c = max(products[0][1:])
    assert c == pytest.approx(1 - 2 * math.sin(math.pi / N) ** 2)
    exceeded = 0
    for pi, g in rows_and_tokens(N, 5 if N < 5 else 2):
        loss = paid(pi, g, products)
        logarithm = (1 - pi[g]) * math.log((N - 1) / math.expm1(entropy(pi)))
        assert loss <= 2 / (1 - c) * logarithm * (1 + 1e-9) + 1e-9
        if c < 0.5 and loss > look_up_bound(pi, g, max(c, 0.0)) + 1e-6:
            exceeded += 1
    assert (exceeded > 0) == (N == 4)


# --- without full support -------------------------------------------------------------------------


@pytest.mark.hostile("dana-lemma-4", "dana-definition-2")
@pytest.mark.parametrize("N", [3, 5])
def test_lemma_4_mass_spread_off_the_support_alone(N):
    """Every support: both halves of Definition 2, and the range."""
    for pi in hostile.lattice_distributions(N, 4):
        zeros = pi.count(0)
        for k in (1, 20, 200):
            mu = Fraction(1, 2**k)
            if not zeros:  # the least likely token gives some away
                q = min(pi)
                others = 1 + q * mu / (1 - q)
                assert q * (1 - mu) + (1 - q) * others == 1
                assert 1 + q * mu / 2 <= others <= 1 + mu  # its logarithm lies between both
                continue
            f = [(1 - mu) * p if p else mu / zeros for p in pi]
            assert sum(f) == 1
            ratios = {p / q for p, q in zip(pi, f, strict=True) if p}
            assert ratios == {1 / (1 - mu)}  # log of it lies between mu and 2 mu
            assert max(f) / min(f) <= 4 * N * 2**k
            assert max(f) / min(f) >= Fraction(2**k, N)  # the logarithm is needed


@pytest.mark.hostile("dana-theorem-3")
def test_theorem_3_fails_for_one_head_on_xor():
    """T_epsilon = 4 = H d_h + d at every epsilon < 1/4, and the best encoder reaches zero."""
    parity = hostile.parity(2)[1].tolist()
    wanted = tuple(1 - 2 * p for p in parity)
    # Signs of l with D_00 l_00 + D_11 l_11 = D_01 l_01 + D_10 l_10 and positive D.
    possible = [
        s
        for s in itertools.product((1, -1), repeat=4)
        if not (s[0] == s[3] and s[1] == s[2] and s[0] != s[1])
    ]
    wrong = min(sum(a != b for a, b in zip(s, wanted, strict=True)) for s in possible)
    floor = wrong * math.log(2) / 4
    epsilon = 2.0**-30
    assert floor > 1000 * epsilon * math.log(1 / epsilon)
