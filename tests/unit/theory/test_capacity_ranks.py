"""The counts of one layer are ranks of Jacobians at small sizes, or above them."""

import random

import pytest
import torch

from attnmem.core import bounds
from attnmem.theory.capacity import capacity


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_counts_of_the_books_layer_and_of_several():
    found = capacity(5, 7, 3)
    assert found.one_output == bounds.own_context_ceiling(5, 3, 7)
    assert found.floor == bounds.own_context_floor(5, 3, 7)
    assert found.proved.startswith("one output: proved")
    for other in ({"bias": "o"}, {"norm": True}, {"rope": 1.0, "head_dim": 4}, {"adapter": 1}):
        assert capacity(**{"heads": 5, "dim": 7, "head_dim": 3} | other).proved.startswith(
            "proved from above; with"
        )
    counted = capacity(4, 8, 2, value_dim=3, layers=3)
    assert counted.deep == bounds.deep_ceiling([4, 4, 4], 2, 3, 8)
    assert f"{counted.deep:,} matter for one output of 3 such layers" in str(counted)
    assert "with skip connections and a read-out, unlike above" in str(counted)
    assert capacity(4, 8, 2).deep is None
    signs = f"{2 * found.floor:,} signs (two classes): half of all choices fit, or more"
    assert signs in str(found)
    assert "signs" not in str(capacity(4, 8, 2, adapter=1)), "no floor is known"
    assert capacity(10**9, 8, 8).floor <= capacity(10**9, 8, 8).one_output, "at once"
    with pytest.raises(ValueError, match=r"layers: got 1000000000; expected .* 10000$"):
        capacity(4, 8, 2, layers=10**9)
    with pytest.raises(ValueError, match="layers: got 2; expected 1 for this kind"):
        capacity(4, 8, 2, bias="o", layers=2)


def outputs(x, maps, angles, norm):
    """One attention layer, plainly: the last token asks."""
    Q, K, V, W, q, k, v, total = maps
    if norm:
        x = x - x.mean(-1, keepdim=True)
        x = x / x.square().mean(-1, keepdim=True).sqrt() * torch.linspace(1, 2, x.shape[-1])
        x = x + torch.linspace(-1, 2, x.shape[-1]) * (q.any() and k.any() and v.any())
    for h in range(len(Q)):
        g = h * len(K) // len(Q)
        keys = x @ K[g] + k[g]
        if any(angles):
            turn = (len(x) - 1 - torch.arange(len(x)))[:, None] * torch.tensor(angles)
            even, odd = keys[:, ::2], keys[:, 1::2]
            pairs = [even * turn.cos() - odd * turn.sin(), even * turn.sin() + odd * turn.cos()]
            keys = torch.stack(pairs, -1).flatten(-2)
        total = total + (keys @ (x[-1] @ Q[h] + q[h])).softmax(0) @ (x @ V[g] + v[g]) @ W[h]
    return total


def draw(layer):
    """Sizes of a layer to its maps and biases, at random."""
    heads, dim, head_dim = (layer[name] for name in ("heads", "dim", "head_dim"))
    groups, d_v, o = layer["kv_heads"], layer["value_dim"], layer["outputs"]
    shapes = [(heads, dim, head_dim), (groups, dim, head_dim), (groups, dim, d_v), (heads, d_v, o)]
    shapes += [(heads, head_dim), (groups, head_dim), (groups, d_v), (o,)]
    maps = [normal(*shape, seed=i) for i, shape in enumerate(shapes)]
    biases = [b if k in layer["bias"] else 0 * b for k, b in zip("qkvo", maps[4:], strict=True)]
    return [*maps[:4], *biases]


def jacobian_rank(layer, maps, context=3):
    """The rank of the derivative of the outputs in all weights, or in those of adapters."""
    moved = [0, 1, 2, 3, *(4 + "qkvo".index(letter) for letter in layer["bias"])]
    start, rank = [maps[i] for i in moved], layer.get("adapter")
    d_h = layer["head_dim"]  # each pair of coordinates that is turned has an angle of its own
    angles = [0.9 / (1 + i) if 2 * i < layer["rope"] * d_h else 0.0 for i in range(d_h // 2)]
    if rank:
        moved = ["qkvo".index(letter) for letter in layer["adapted"]]
        o = maps[3].shape[-1]
        wide = [(len(W[0]), len(W) * W.shape[2]) for W in maps[:3]] + [(maps[3].numel() // o, o)]
        start = [normal(wide[i][0], rank, seed=20 + i) for i in moved]
        start += [normal(rank, wide[i][1], seed=30 + i) for i in moved]

    def at(x, *parts):
        now = list(maps)
        for j, i in enumerate(moved):
            now[i] = parts[j]
            if rank:
                low = parts[j] @ parts[j + len(moved)]  # one matrix beside those of all heads
                low = low.unflatten(1, (len(maps[i]), -1)).transpose(0, 1) if i < 3 else low
                now[i] = maps[i] + low.reshape(maps[i].shape)
        return outputs(x, now, angles, layer["norm"])

    T = sum(part.numel() for part in start) + 9
    jacobian = torch.func.jacrev(at, argnums=tuple(range(1, 1 + len(start))))
    x = normal(T, context, maps[0].shape[1], seed=50)
    parts = torch.func.vmap(lambda tokens: jacobian(tokens, *start))(x)
    J = torch.cat([part.flatten(0, 1).flatten(1) for part in parts], dim=1)
    scale = J.norm(dim=0)
    values = torch.linalg.svdvals((J / scale)[:, scale > 1e-12 * scale.max()])
    return int((values > 1e-10 * values[0]).sum())


def random_sizes(seed, **chosen):
    """Sizes of a small layer of any kind, within what the reports say is compared."""
    rng = random.Random(seed)
    groups, each = rng.choice([(1, 1), (1, 3), (2, 1), (2, 2), (3, 1), (4, 1)])
    dim, head_dim = rng.choice([3, 4]), rng.choice([1, 2, 2, 3, 4, 5])
    layer = {"heads": groups * each, "kv_heads": groups, "dim": dim, "head_dim": head_dim}
    layer |= {"value_dim": rng.randint(1, 5), "outputs": rng.choice([1, 2, 7])}
    layer |= {"norm": rng.random() < 0.3, "bias": "".join(x for x in "qkvo" if rng.random() < 0.4)}
    turns = head_dim % 2 == 0 and head_dim <= dim - layer["norm"] and rng.random() < 0.7
    return layer | {"rope": rng.choice([1.0, 2 / head_dim]) if turns else 0.0} | chosen


@pytest.mark.parametrize("chosen", [{}, {"value_dim": 5, "outputs": 7, "bias": "v"}])
@pytest.mark.parametrize("seed", range(40))
def test_count_is_the_rank_of_the_jacobian(seed, chosen):
    layer = random_sizes(seed, **chosen)
    found = capacity(**layer)
    assert found.effective == jacobian_rank(layer, draw(layer))
    assert found.one_output == capacity(**layer | {"outputs": 1}).effective


def test_count_of_wide_rotary_heads_and_two_tokens():
    layer = random_sizes(0, heads=2, kv_heads=2, dim=4, head_dim=4, norm=False, rope=1.0, bias="")
    layer |= {"value_dim": 2, "outputs": 1}
    ranks = [jacobian_rank(layer, draw(layer), context=n) for n in (2, 3)]
    assert ranks[0] < ranks[1] == capacity(**layer).effective


@pytest.mark.parametrize("adapted", ["q", "k", "v", "o", "qv", "ko", "qk", "vo"])
@pytest.mark.parametrize("seed", range(15))
def test_count_of_adapters_is_the_rank_or_above(seed, adapted):
    layer = random_sizes(seed, adapter=1 + seed % 3, adapted=adapted)
    found, rank = capacity(**layer), jacobian_rank(layer, draw(layer))
    assert found.effective >= rank
    assert found.effective == rank or found.proved.startswith("upper bounds")
    assert found.floor is None


@pytest.mark.parametrize("seed", range(60))
def test_floor_is_the_rank_where_heads_cancel(seed):
    """Heads of a group have one logit matrix, and values whose sum is zero."""
    layer = random_sizes(seed, outputs=1)
    heads, groups, m = layer["heads"], layer["kv_heads"], layer["dim"] - layer["norm"]
    each, maps, first = heads // groups, draw(layer), 0
    sizes = [2] * (groups // 2) + [1] * (groups % 2)
    if each == 1 and not layer["rope"]:
        sizes = bounds.best_groups(heads, m, m, min(layer["head_dim"], m))
    for size in sizes:
        for i, wide in ((0, each), (1, 1), (3, each), (4, each), (5, 1)):
            of_group = maps[i][first * wide : (first + size) * wide].unflatten(0, (size, wide))
            of_group[:] = of_group[0].clone()
        for i in (2, 6):
            maps[i][first : first + size] -= maps[i][first : first + size].mean(0)
        first += size
    maps[7].zero_()
    found = capacity(**layer)
    assert (found.floor is None) == (groups == 1 and (heads > 1 or layer["rope"] > 0))
    assert (found.floor or 0) <= jacobian_rank(layer, maps)
    if found.floor and groups % 2 == 0 and not layer["bias"]:
        assert found.floor == jacobian_rank(layer, maps)


def test_counts_of_well_known_layers():
    found = capacity(12, 768, bias="qkvo", norm=True)
    counts = (found.parameters, found.effective, found.one_output, found.floor)
    assert counts == (2362368, 2260224, 1138933, 1032127), "GPT-2"
    found = capacity(28, 3584, kv_heads=4, rope=True, bias="qkv")
    counts = (found.parameters, found.effective, found.one_output, found.floor)
    assert counts == (29364736, 29298688, 14784001, 7392001), "Qwen 2"
