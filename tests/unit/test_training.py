"""A run in a stack is the same run alone; the protocols are the published ones."""

import dataclasses
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from attnmem import experiments, training
from attnmem.attention import AoTWeights, MHAWeights, aot, mha
from attnmem.results import Run

CPU = torch.device("cpu")


def bigram_run(**changes):
    sizes = {"model": "aot", "variant": "code", "d": 5, "d_h": 5, "H": 3, "layers": 1}
    sizes |= {"N": 7, "n": 2, "T": 128, "steps": 100, "batch": 32, "width": None, "seed": 0}
    protocol = {"task": "bigrams", "context": None, "schedule": "linear"}
    protocol |= {"lr": 0.1, "lr_start": 0.1, "lr_end": 0.005}
    return Run(experiment="test", profile="test", **(sizes | protocol | changes))


def memorization_run(**changes):
    sizes = {"model": "mha", "variant": "code", "d": 8, "d_h": 6, "H": 3, "layers": 1, "N": 5}
    sizes |= {"n": 4, "T": 50, "steps": 100, "batch": 16, "width": None, "seed": 0}
    protocol = {"task": "classes", "context": "shared", "schedule": "warmup-cosine"}
    protocol |= {"lr": 1e-2, "lr_start": 0.01, "lr_end": 0.0}
    protocol |= {"evaluate_every": 50, "early_stop": False}
    return Run(experiment="test", profile="test", **(sizes | protocol | changes))


def association_run(**changes):
    protocol = {"task": "associations", "T": 30, "batch": 30, "evaluate_every": 10}
    protocol |= {"lr": 1e-2, "lr_start": 1.0, "lr_end": 0.1, "early_stop": True}
    return bigram_run(**(protocol | changes))


FAMILIES = {
    **{variant: bigram_run(variant=variant) for variant in training.VARIANTS},
    **{f"{v}, narrow": bigram_run(variant=v, d_h=3) for v in training.VARIANTS},
    "three layers": bigram_run(layers=3),
    "three layers, paper": bigram_run(layers=3, variant="paper"),
    "mlp": bigram_run(model="mlp", H=1, width=12),
    "three mlp layers": bigram_run(model="mlp", H=1, width=12, layers=3),
    "all associations at once": association_run(d=3, d_h=2, H=1, T=40, batch=40),
    "shared context": memorization_run(),
    "own contexts": memorization_run(context="random"),
    "shared context, reals": memorization_run(task="reals", N=None),
    "own contexts, reals": memorization_run(task="reals", N=None, context="random"),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_run_in_a_stack_follows_the_run_alone(name, monkeypatch):
    """For 100 steps the losses agree within float32 rounding, grown by training."""
    paths = []

    def recorded(stack, loss, step=training.Stack.step):
        paths[-1].append(loss.detach().clone())
        step(stack, loss)

    monkeypatch.setattr(training.Stack, "step", recorded)
    runs = [dataclasses.replace(FAMILIES[name], seed=seed) for seed in range(3)]
    loop = training.LOOPS[runs[0].task]
    paths.append([])
    together = loop(runs, CPU)
    for i, run in enumerate(runs):
        paths.append([])
        [alone] = loop([run], CPU)
        stacked = torch.stack([losses[i] for losses in paths[0]])
        torch.testing.assert_close(stacked, torch.cat(paths[-1]), rtol=2e-3, atol=2e-5)
        torch.testing.assert_close(stacked[:10], torch.cat(paths[-1])[:10], rtol=1e-5, atol=1e-6)
        assert together[i].loss == pytest.approx(alone.loss, rel=2e-3, abs=2e-5)
    assert len({round(found.loss, 6) for found in together}) == 3  # three seeds, three runs


def test_the_paper_variant_is_the_papers_model():
    run = bigram_run(variant="paper", d_h=3)
    P = training.aot_parameters(run, training.generator(run, "weights"))
    tokens = torch.randint(run.N, (9, 2))
    names = ("W_Q.0", "W_K.0", "W_V.0", "W_O.0", "unembedding")
    weights = AoTWeights(P["embedding"], P["positions.0"][:2], *(P[name] for name in names))
    stacked = {name: W[None] for name, W in P.items()}
    ours = training.aot_logits(stacked, run, tokens[None])[0].T
    torch.testing.assert_close(ours, aot(weights, tokens))


class PublishedBigramModel(nn.Module):
    """The published architecture written as such code usually is, all places computed.

    One table of positions and one pair of maps for all layers, no bias in the last linear map; or,
    where the weights have them, a table and maps for every layer, and the bias.
    """

    def __init__(self, run, P):
        super().__init__()
        self.run, self.P = run, P
        self.heads = nn.ModuleList()
        for layer in range(run.layers):
            for h in range(run.H):
                head = nn.MultiheadAttention(run.d_h, 1, bias=False, batch_first=True)
                packed = [P[f"{name}.{layer}"][h] for name in ("W_Q", "W_K", "W_V")]
                head.in_proj_weight.data = torch.cat(packed)
                head.out_proj.weight.data = P[f"W_O.{layer}"][h]
                self.heads.append(head)

    def forward(self, tokens):
        run, P = self.run, self.P
        x = P["embedding"][tokens]
        mask = torch.ones(2, 2, dtype=torch.bool).triu(1)
        for layer in range(run.layers):
            at = layer if run.variant == "own-layers" else 0
            a = F.linear(x, P[f"down.{at}"]) if run.d_h != run.d else x
            a = a + P[f"positions.{at}"][:2]
            mine = self.heads[layer * run.H : (layer + 1) * run.H]
            out = sum(head(a, a, a, attn_mask=mask)[0] for head in mine)
            x = x + (F.linear(out, P[f"up.{at}"]) if run.d_h != run.d else out)
            if run.width:
                hidden = F.gelu(F.linear(x, P[f"W_1.{layer}"], P[f"b_1.{layer}"]))
                x = x + F.linear(hidden, P[f"W_2.{layer}"], P.get(f"b_2.{layer}"))
        return F.linear(x, P["unembedding"])[:, -1]


DEEP = {"layers": 3}
MLP = {"width": 12, "H": 1}


def test_layers_share_positions_and_maps_as_in_the_published_code():
    run = bigram_run(**DEEP | MLP | {"d_h": 3})
    names = training.aot_parameters(run, training.generator(run, "weights")).keys()
    assert {name for name in names if name.startswith(("positions", "down", "up", "b_"))} == {
        *("positions.0", "down.0", "up.0", "b_1.0", "b_1.1", "b_1.2")
    }
    own = dataclasses.replace(run, variant="own-layers")
    more = training.aot_parameters(own, training.generator(own, "weights")).keys() - names
    assert len(more) == 9  # tables and maps of two layers more, and three biases


@pytest.mark.parametrize("variant", ["code", "own-layers"])
@pytest.mark.parametrize("changes", [{}, {"d_h": 3}, MLP, DEEP, DEEP | {"d_h": 3}, DEEP | MLP])
def test_the_code_variant_is_the_published_model(changes, variant):
    run = bigram_run(variant=variant, **changes)
    P = training.aot_parameters(run, training.generator(run, "weights"))
    tokens = torch.randint(run.N, (9, 2))
    stacked = {name: W[None] for name, W in P.items()}
    ours = training.aot_logits(stacked, run, tokens[None])[0].T
    torch.testing.assert_close(ours, PublishedBigramModel(run, P)(tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("context", ["shared", "random"])
def test_the_trained_layer_of_mahdavi_against_the_equations(context):
    run = memorization_run(context=context)
    P = training.mha_parameters(run, training.generator(run, "weights"))
    contexts = torch.rand(4, run.d) if context == "shared" else torch.rand(9, 4, run.d)
    queries = torch.rand(9, run.d)
    stacked = {name: W[None] for name, W in P.items()}
    ours = training.mha_outputs(stacked, run, contexts[None], queries[None])[0]
    places = training.sinusoids(run.n + 1, run.d)
    for t in range(9):
        E = F.linear(contexts if context == "shared" else contexts[t], P["W_E"], P["b_E"])
        E = E + places[1:]
        e = F.linear(queries[t], P["W_E"], P["b_E"]) + places[0]
        o = [
            P["W_V"][h].T @ E.T @ torch.softmax(E @ P["W_K"][h] @ P["W_Q"][h].T @ e / 8, 0)
            for h in range(run.H)
        ]
        expected = F.linear(torch.cat(o) @ P["W_O"], P["W_D"], P["b_D"])
        torch.testing.assert_close(ours[t], expected, rtol=1e-4, atol=1e-5)


def test_sinusoids_are_the_usual_ones():
    table = training.sinusoids(5, 6)
    assert table.shape == (5, 6)
    assert table[3, 2] == pytest.approx(math.sin(3 / 10000 ** (2 / 6)), rel=1e-5)
    assert table[3, 5] == pytest.approx(math.cos(3 / 10000 ** (4 / 6)), rel=1e-5)


def test_initial_weights_have_the_published_bounds():
    run = bigram_run(d=16, d_h=4, H=50, N=50)
    P = training.aot_parameters(run, training.generator(run, "weights"))
    bounds = {"embedding": 16**-0.5, "down.0": 16**-0.5, "up.0": 4**-0.5, "W_O.0": 4**-0.5}
    bounds |= {"W_Q.0": math.sqrt(6 / 16), "W_V.0": math.sqrt(6 / 16), "positions.0": 4**-0.5}
    for name, bound in bounds.items():
        assert 0.8 * bound < P[name].abs().max() <= bound, name
    run = memorization_run(d=16, d_h=4, H=50, N=100)
    P = training.mha_parameters(run, training.generator(run, "weights"))
    bounds = {"W_E": 0.25, "b_E": 0.25, "W_D": 0.25, "W_Q": math.sqrt(6 / 20)}
    bounds |= {"W_V": math.sqrt(6 / 17), "W_O": math.sqrt(6 / 66)}
    for name, bound in bounds.items():
        assert 0.7 * bound < P[name].abs().max() <= bound, name


def test_the_learning_rate_of_dana_starts_at_a_hundredth():
    run = bigram_run(T=128, batch=32, steps=64 * 4)
    rates = [training.linear_by_epoch(run, epoch) for epoch in range(65)]
    assert rates[0] == pytest.approx(1e-2)
    assert rates[64] == pytest.approx(5e-4)
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    torchs = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 0.005, 64)
    for rate in rates:
        assert rate == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        torchs.step()


def test_the_learning_rate_of_mahdavi_warms_up_and_ends_at_zero():
    run = memorization_run(steps=1000, lr=1e-3)
    rates = [training.warmup_cosine(run, step) for step in range(1001)]
    assert rates[0] == pytest.approx(1e-5)
    assert max(rates) == rates[50] == pytest.approx(1e-3)
    assert rates[525] == pytest.approx(0.5e-3)
    assert rates[1000] == pytest.approx(0, abs=1e-12)


def test_every_epoch_sees_every_example_once():
    run = memorization_run(T=50, batch=16)
    batches = training._Examples([run, dataclasses.replace(run, seed=1)], CPU).batches()
    seen = torch.cat([next(batches) for _ in range(25)], dim=1)  # 400 indices: 8 epochs
    for epoch in seen.unflatten(1, (8, 50)).unbind(1):
        assert (epoch.sort(dim=1).values == torch.arange(50)).all()
    assert not torch.equal(seen[0], seen[1])


def test_runs_that_are_done_leave_the_stack_and_change_nothing_for_the_others(monkeypatch):
    easy = memorization_run(T=4, batch=4, lr=3e-2, steps=400, evaluate_every=10, early_stop=True)
    runs = [dataclasses.replace(easy, seed=seed) for seed in range(4)]
    sizes = []

    def recorded(stack, loss, step=training.Stack.step):
        sizes.append(len(stack.runs))
        step(stack, loss)

    monkeypatch.setattr(training.Stack, "step", recorded)
    together = training.train_memorization(runs, CPU)
    assert sizes[0] == 4 > sizes[-1]
    assert sorted(sizes, reverse=True) == sizes
    for run, found in zip(runs, together, strict=True):
        [alone] = training.train_memorization([run], CPU)
        assert found.accuracy == alone.accuracy == 1.0
        assert found.loss == pytest.approx(alone.loss, rel=1e-2)


def test_the_curve_is_the_accuracy_on_all_pairs():
    """One run by hand, and its accuracy by the published model after every epoch."""
    run = bigram_run(N=6, T=96, steps=9)
    [found] = training.train_bigrams([run], CPU)
    data = training.tasks.bigrams(training.generator(run, "data"), run.N, run.T)
    stack = training.Stack([run], CPU, training.aot_parameters)
    order = training.generator(run, "order")
    everything = torch.cartesian_prod(torch.arange(6), torch.arange(6))
    curve = []
    for epoch in range(3):
        stack.set_rate(training.linear_by_epoch(run, epoch))
        for part in torch.randperm(run.T, generator=order).split(run.batch):
            logits = training.aot_logits(stack.parameters, run, data.tokens[None, part])
            stack.step(F.cross_entropy(logits, data.next_tokens[None, part])[None])
        P = {name: W.detach()[0] for name, W in stack.parameters.items()}
        answers = PublishedBigramModel(run, P)(everything).argmax(dim=-1)
        curve.append((answers == data.table.flatten()).double().mean().item())
    assert found.curve == pytest.approx(curve, abs=6e-5)
    assert training.opening(run, 2) == pytest.approx(curve[:2], abs=6e-5)


def test_associations_that_fit_are_memorized_and_leave_the_stack(monkeypatch):
    sizes = []

    def counted(stack, loss, step=training.Stack.step):
        sizes.append(len(stack.runs))
        step(stack, loss)

    monkeypatch.setattr(training.Stack, "step", counted)
    easy = [association_run(d=8, d_h=8, H=4, steps=600, seed=seed) for seed in range(3)]
    assert [found.accuracy for found in training.train_associations(easy, CPU)] == [1.0] * 3
    assert len(sizes) < 600
    assert sizes == sorted(sizes, reverse=True)
    hard = association_run(d=1, d_h=1, H=1, T=49, batch=49, steps=50)
    [found] = training.train_associations([hard], CPU)
    assert 0 < found.accuracy < 1


@pytest.mark.parametrize("steps_before", [0, 5])
def test_a_rehearsal_leaves_no_trace(steps_before):
    """A capture runs a few steps first; weights and optimizer must be as they were."""
    run = bigram_run()
    data = training.tasks.bigrams(training.generator(run, "data"), run.N, run.T)
    paths = []
    for rehearsed in (False, True):
        stack = training.Stack([run], CPU, training.aot_parameters)
        stack.set_rate(1e-2)

        def step(stack=stack):
            outputs = training.aot_logits(stack.parameters, run, data.tokens[None])
            loss = F.cross_entropy(outputs, data.next_tokens[None], reduction="none").mean(dim=1)
            stack.step(loss)
            return loss.detach().item()

        path = [step() for _ in range(steps_before)]
        if rehearsed:
            training.rehearse(stack, step)
        paths.append(path + [step() for _ in range(10)])
    assert paths[0] == paths[1]


def test_best_weights_count_not_the_last(monkeypatch):
    run = memorization_run(steps=6, evaluate_every=1)
    found = iter(
        training.Found(*pair)
        for pair in [(0.1, 3.0), (0.5, 1.0), (0.2, 2.0), (0.3, 1.5), (0.1, 4.0), (0.4, 1.1)]
    )
    monkeypatch.setattr(training, "_evaluate", lambda stack, data: [next(found)])
    [best] = training.train_memorization([run], CPU)
    assert (best.accuracy, best.loss, best.best_step) == (0.5, 1.0, 2)


@pytest.mark.parametrize("context", ["shared", "random"])
def test_free_heads_are_counted_as_defined(context):
    """Weights large enough that some heads are saturated, against the definition."""
    runs = [memorization_run(context=context, seed=seed, H=4) for seed in range(2)]
    stack = training.Stack(runs, CPU, training.mha_parameters)
    data = training._Examples(runs, CPU)
    with torch.no_grad():
        stack.parameters["W_Q"] *= 100
    shares = training._free_heads(stack, data, chunk=16)
    places = training.sinusoids(5, 8)
    for r in range(2):
        P = {name: W.detach()[r] for name, W in stack.parameters.items()}
        free = []
        for t in range(50):
            tokens = data.contexts[r] if context == "shared" else data.contexts[r, t]
            E = F.linear(tokens, P["W_E"], P["b_E"]) + places[1:]
            e = F.linear(data.queries[r, t], P["W_E"], P["b_E"]) + places[0]
            alphas = [torch.softmax(E @ P["W_K"][h] @ P["W_Q"][h].T @ e / 8, 0) for h in range(4)]
            free.append(sum(1 for alpha in alphas if alpha.max() <= 0.99))
        assert 0 < sum(free) < 200
        expected = [free.count(k) / 50 for k in range(5)]
        assert shares[r].tolist() == pytest.approx(expected)


def test_saturation_is_followed_where_no_run_stops_early():
    [found] = training.train_memorization([memorization_run(steps=60, evaluate_every=10)], CPU)
    assert len(found.saturated) == len(found.served) == 6
    assert sum(found.serving) == pytest.approx(1, abs=3e-4)
    pairs = sum(heads * share for heads, share in enumerate(found.serving))
    assert found.saturated[-1] == pytest.approx(1 - pairs / 3, abs=3e-4)
    assert found.served[-1] == pytest.approx(1 - found.serving[0], abs=2e-4)
    stopped = memorization_run(steps=60, evaluate_every=10, early_stop=True)
    assert training.train_memorization([stopped], CPU)[0].saturated is None


def test_moments_are_evaluations_equally_spaced():
    run = memorization_run(steps=300_000, evaluate_every=500)
    moments = sorted(training._moments(run))
    assert len(moments) == 32
    assert moments[-1] == 300_000
    assert all(moment % 500 == 0 for moment in moments)
    gaps = [b - a for a, b in itertools.pairwise(moments)]
    assert max(gaps) - min(gaps) <= 500
    assert training._moments(memorization_run(steps=25, evaluate_every=10)) == {10, 20, 25}


def flushes() -> bool:
    """Whether this thread rounds numbers below the normal range to zero."""
    return bool(torch.full((1,), 1e-40, dtype=torch.float32).mul(1) == 0)


@pytest.mark.parametrize("default", [torch.float32, torch.float64])  # as the chapters set it
@pytest.mark.parametrize("before", [False, True])
def test_denormals_are_flushed_while_training_and_only_then(before, default, monkeypatch):
    inside = []

    def loop(runs, device):
        inside.append(flushes())
        raise RuntimeError("broken off")

    monkeypatch.setitem(training.LOOPS, "bigrams", loop)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        if not torch.set_flush_denormal(before):
            pytest.skip("this processor cannot flush denormals")
        with pytest.raises(RuntimeError, match="broken off"):
            training.train([bigram_run()])
        assert (inside, flushes()) == ([True], before)
    finally:
        torch.set_default_dtype(usual)
        torch.set_flush_denormal(False)


def test_an_outcome_says_where_it_comes_from():
    [outcome] = training.train([bigram_run(steps=104)])
    assert 0 <= outcome.accuracy <= 1
    assert (outcome.device, outcome.torch, outcome.tf32) == ("cpu", torch.__version__, False)
    assert outcome.commit


@pytest.mark.parametrize(
    "runs",
    [
        [bigram_run(), bigram_run(H=4)],
        [bigram_run(model="lstm")],
        [bigram_run(variant="codex")],
        [],
    ],
)
def test_what_cannot_be_stacked_is_refused(runs):
    with pytest.raises(ValueError, match=r"^runs: got "):
        training.train(runs)


def test_a_stack_reaches_the_same_accuracies_as_single_runs():
    """The distribution over seeds, after training that memorizes about half of the pairs."""
    [cell] = [r for r in experiments.runs("dana-exp1", "quick", 1) if (r.d, r.H) == (3, 6)]
    runs = [dataclasses.replace(cell, seed=seed) for seed in range(8)]
    stacked = [outcome.accuracy for outcome in training.train(runs)]
    alone = [training.train([run])[0].accuracy for run in runs]
    # Same seeds, so the same data and weights: only rounding can part them.
    assert max(abs(a - b) for a, b in zip(stacked, alone, strict=True)) < 0.05
    assert sum(stacked) / 8 == pytest.approx(sum(alone) / 8, abs=0.02)


def test_descent_is_adam_on_the_layer():
    """Against torch's own modules for two steps, and to the end on labels that fit."""
    torch.manual_seed(0)
    context, queries = torch.rand(4, 6), torch.rand(9, 6)
    labels = torch.rand(9)
    start = training.xavier(3, 6, 5, outputs=1, seed=0)
    _, losses = training.descend(start, context, queries, labels, steps=2, lr=1e-2)
    leaves = [W.clone().requires_grad_() for W in start]
    optimizer = torch.optim.Adam(leaves, lr=1e-2)
    for step, rate in enumerate((1e-2, 0.5e-2)):  # a cosine of two steps
        optimizer.param_groups[0]["lr"] = rate
        loss = (mha(MHAWeights(*leaves), context, queries)[:, 0] - labels).square().mean()
        assert losses[step] == pytest.approx(loss.item(), rel=1e-5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    weights, losses = training.descend(start, context, queries, labels, steps=2000, lr=1e-2)
    assert losses[-1] < 1e-6
    assert start.W_Q.equal(training.xavier(3, 6, 5, outputs=1, seed=0).W_Q)
    outputs = mha(weights, context, queries)[:, 0]
    torch.testing.assert_close(outputs, labels, rtol=0, atol=1e-2)


def test_descent_takes_classes():
    torch.manual_seed(0)
    context, queries, classes = torch.rand(4, 6), torch.rand(9, 6), torch.randint(5, (9,))
    start = training.xavier(3, 6, 5, outputs=5, seed=1)
    weights, losses = training.descend(start, context, queries, classes, steps=800, lr=1e-2)
    assert losses[0] == pytest.approx(F.cross_entropy(mha(start, context, queries), classes).item())
    assert (mha(weights, context, queries).argmax(-1) == classes).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "^steps: got 0"),
        ({"lr": -1.0}, "^lr: got -1.0"),
        ({"labels": torch.rand(8)}, "^labels: got shape"),
        ({"queries": torch.rand(9, 7)}, "^query: got"),
    ],
)
def test_descent_refuses_what_does_not_fit(changes, message):
    arguments = {
        "weights": training.xavier(3, 6, 5, outputs=1, seed=0),
        "contexts": torch.rand(4, 6),
        "queries": torch.rand(9, 6),
        "labels": torch.rand(9),
        "steps": 1,
        "lr": 1e-2,
    }
    with pytest.raises(ValueError, match=message):
        training.descend(**arguments | changes)


@pytest.mark.parametrize("changes", [{}, {"context": "random"}, {"task": "reals", "N": None}])
def test_operations_of_a_step_by_hand(changes):
    """The large products of a step: forward, and twice as much backward."""
    sizes = {"d": 64, "d_h": 64, "H": 20, "n": 32, "N": 100, "batch": 256}
    run = memorization_run(**sizes | changes)
    B, n, d, H = 256, 32, 64, 20
    large = 3 * B * n * d * H + 3 * 2 * n * d * d * H  # logits; shared keys and what asks them
    if run.context == "random":  # those were of the positions; now of own tokens
        large += 3 * B * H * d * d + 3 * 2 * H * d**3  # what asks them, by products of two maps
        large += 2 * 2 * B * H * n * d  # logits and values, without a gradient to the tokens
    assert training.operations(run) == pytest.approx(2 * large, rel=0.15)
