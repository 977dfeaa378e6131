"""What the layers of a ViT, a BERT or a GPT-2 hand on: the tokens that an attention layer meets.

Mahdavi et al. 2024 (Table 1, Table 3) check their assumptions on such features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..checks import check_integer, check_seed, checked_by, refuse
from ..independence import numerical_rank
from .corpora import Inputs
from .encoders import Encoder


@checked_by(lambda seed, **_: check_seed(seed))
def random_attention(
    tokens: Float[Tensor, "B n d"], asking: Float[Tensor, "B m d"], *, seed: int
) -> Float[Tensor, "B m d"]:
    r"""One attention head with Xavier's weights on layer-normalized tokens, plus its input.

    Logits are divided by :math:`\sqrt d`.

    Args:
        tokens: The tokens that are attended to.
        asking: Those of them whose output is wanted.
        seed: Decides the weights.

    Returns:
        The outputs of the tokens that ask.

    Source: Mahdavi et al. 2024, Table 1, "Random attention".
    """
    d = tokens.shape[-1]
    g = torch.Generator().manual_seed(seed)
    W_Q, W_K, W_V, W_O = (_xavier(g, d, d).to(tokens) for _ in range(4))
    with torch.autocast(tokens.device.type, enabled=False):
        keys, queries = (F.layer_norm(x, (d,)) for x in (tokens, asking))
        # Re-associated: no token is projected, only those that ask.
        z = F.scaled_dot_product_attention(queries @ (W_Q @ W_K.mT), keys, keys, scale=d**-0.5)
        return asking + z @ (W_V @ W_O)


def _check_heads(tokens, asking, heads, seed) -> None:
    check_integer("heads", heads)
    check_seed(seed)
    if tokens.shape[-1] % heads:
        refuse("heads", heads, f"a divisor of d = {tokens.shape[-1]}")


@checked_by(_check_heads)
def head_features(
    tokens: Float[Tensor, "B n d"], asking: Float[Tensor, "B d"], heads: int, *, seed: int
) -> Float[Tensor, "B d"]:
    """What random heads of width ``d / heads`` hand to their output map, side by side.

    The weights are Xavier's, the tokens layer-normalized. This is what a read-out of the next
    attention layer sees.

    Args:
        tokens: The tokens that are attended to.
        asking: The token of each example that asks.
        heads: How many heads, a divisor of ``d``.
        seed: Decides the weights.

    Returns:
        One vector for each example.
    """
    d = tokens.shape[-1]
    g = torch.Generator().manual_seed(seed)
    x, query = F.layer_norm(tokens, (d,)), F.layer_norm(asking, (d,))[:, None]
    read = []
    for _ in range(heads):
        W_Q, W_K, W_V = (_xavier(g, d, d // heads).to(tokens) for _ in range(3))
        with torch.autocast(tokens.device.type, enabled=False):
            read.append(F.scaled_dot_product_attention(query @ W_Q, x @ W_K, x @ W_V))
    return torch.cat(read, dim=2)[:, 0]


def _xavier(g: torch.Generator, *shape: int) -> Tensor:
    W = torch.empty(shape, dtype=torch.float32, device="cpu")
    return nn.init.xavier_uniform_(W, generator=g)


Maps = Callable[[Inputs], dict[str, Float[Tensor, "B n d"]]]


def _check_maps(random, trained, seed) -> None:
    if random is None and (trained is None or seed is not None):
        refuse("random", "None", "an encoder; only without a seed, a trained one is enough")
    if seed is not None:
        check_seed(seed)


@checked_by(_check_maps)
def feature_maps(
    random: Encoder | None = None, trained: Encoder | None = None, *, seed: int | None = None
) -> Maps:
    """A function from a batch to its tokens under every map, by name.

    ``random L0`` are the embeddings of the random encoder, ``random L1`` what its first block makes
    of them, and so on; ``trained L0``, ... likewise. ``random attention`` is one random layer on
    the random embeddings.

    Args:
        random: An encoder with random weights, if any; needed for a ``seed``.
        trained: An encoder with trained weights, if any.
        seed: Decides the weights of ``random attention``; without it that map is left out.

    Returns:
        The function. It takes what the encoders take.

    Raises:
        ValueError: There is no encoder, or none for the ``seed``, or that is none.
    """

    def maps(inputs: Inputs) -> dict[str, Tensor]:
        found = {}
        for name, encoder in (("random", random), ("trained", trained)):
            layers = encoder(inputs) if encoder else []
            found |= {f"{name} L{depth}": tokens for depth, tokens in enumerate(layers)}
        if seed is not None:
            embedded = found["random L0"]
            found["random attention"] = random_attention(embedded, embedded, seed=seed)
        return found

    return maps


class Seen(NamedTuple):
    """Of one feature map and ``T`` examples, what the assumptions speak about.

    Attributes:
        queries: The token that asks (Assumption 1).
        relaxed: That token plus the mean of all tokens (Assumption 3).
        ranks: The numerical rank of each context (Assumption 2); empty if not asked for.
        heads: What a random attention layer reads (see :func:`head_features`); empty likewise.
        positions: Of embeddings, the table of positions.
    """

    queries: Float[Tensor, "T d"]
    relaxed: Float[Tensor, "T d"]
    ranks: Int[Tensor, " T"]
    heads: Float[Tensor, "T k"]
    positions: Float[Tensor, "n d"] | None = None


def collect(
    maps: Maps,
    batches: Iterable[Inputs],
    *,
    query: int,
    ranks: bool = True,
    heads: int = 0,
    seed: int = 0,
) -> dict[str, Seen]:
    """Stream batches through feature maps and keep a few vectors and a rank of every example.

    Args:
        maps: What :func:`feature_maps` returns.
        batches: What the maps take.
        query: The place of the token that asks, as in :class:`Encoder`.
        ranks: Whether the ranks of contexts are computed.
        heads: The heads of the attention layer that reads the features; 0 for none.
        seed: Decides the weights of that layer.

    Returns:
        What was kept of each map, by its name.

    Raises:
        ValueError: There is no batch, or no such place in one.
    """
    kept: dict[str, Seen] = {}
    for inputs in batches:
        for name, tokens in maps(inputs).items():
            check_integer("query", query, least=-tokens.shape[1], most=tokens.shape[1] - 1)
            asking = tokens[:, query].clone()  # a view would keep all tokens
            rank = numerical_rank(tokens) if ranks else tokens.new_empty(0, dtype=torch.int64)
            read = (
                head_features(tokens, asking, heads, seed=seed) if heads else tokens.new_empty(0, 0)
            )
            new = Seen(asking, asking + tokens.mean(dim=1), rank, read)
            kept[name] = _extended(kept[name], new) if name in kept else new
    if not kept:
        refuse("batches", "none", "at least one batch")
    return kept


def _extended(seen: Seen, new: Seen) -> Seen:
    """Copied at once, since small pieces kept between large ones would break up free memory."""
    return Seen(*(torch.cat(pair) for pair in zip(seen[:4], new[:4], strict=True)))
