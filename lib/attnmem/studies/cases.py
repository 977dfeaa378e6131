"""What the assumptions are tested on: models, data and sizes of each tier, as data.

Tiers: ``published``, the paper's models and data, which need a hub; ``shipped``, random models of
the same size on what lies on every machine; ``trained``, small models that are trained here first;
``deeper``, every layer of the small models; ``quick``, a tiny model, a smoke test.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ..checks import refuse
from ..features import Encoder, corpora, pretrained, random_encoder, trained_encoder

DEPTH = 4  # of the small models
SEED = 0


class Case(NamedTuple):
    """One architecture and its data; ``random`` and ``trained`` take ``dtype`` and ``device``.

    ``T`` examples of ``n`` tokens of dimension ``d``. ``samples``: subsets that a test of size up
    to ``n`` draws, and subsets that general position draws, where each costs a hundred times more:
    300 without a failure leave less than 1% with 95% confidence. ``sizes``: of further tests, on
    the queries of the maps in ``curves``; a random attention layer is looked at only if it is
    among them. ``positions``: whether the position table is tested, too. ``depth``: blocks looked
    at. ``labels``: numbers of examples whose random labels a read-out of the next attention layer
    is trained to meet.
    """

    source: str
    architecture: str
    T: int
    n: int
    d: int
    batches: Callable[[], Iterable[corpora.Inputs]]
    random: Callable[..., Encoder]
    trained: Callable[..., Encoder] | None = None
    samples: tuple[int, int] = (5000, 300)
    sizes: tuple[int, ...] = ()
    curves: tuple[str, ...] = ("random attention",)
    positions: bool = False
    depth: int = 1
    labels: tuple[int, ...] = ()

    @property
    def maps(self) -> list[str]:
        """Names of the feature maps, as :func:`attnmem.features.feature_maps` gives them."""
        layers = range(self.depth + 1)
        random = [f"random L{at}" for at in layers] + ["random attention"] * self.attention
        return random + [f"trained L{at}" for at in layers] * bool(self.trained)

    @property
    def attention(self) -> bool:
        """Whether one random attention layer is among the maps."""
        return "random attention" in self.curves


def _random(architecture: str | tuple[str, dict]) -> Callable[..., Encoder]:
    return functools.partial(random_encoder, architecture, seed=SEED)


def _trained_here(train: Callable[..., float], least: float) -> Callable[..., Encoder]:
    return lambda **options: trained_encoder(_made(train, least), **options)


@functools.cache
def _made(train: Callable[..., float], least: float) -> str:
    """The folder of a model that :mod:`attnmem.features.pretrained` has made, once a process.

    Raises ``ValueError`` if it is worse than ``least``: no rows come from a model that failed.
    """
    folder = tempfile.mkdtemp(prefix="attnmem-")
    reached = train(folder, seed=SEED)
    if reached < least:
        refuse(train.__name__, f"{reached:.4f} on data held out", f"at least {least}")
    return folder


TINY_SIZES = {"hidden_size": 24, "num_attention_heads": 4, "intermediate_size": 40}
TINY_VIT = ("vit", TINY_SIZES | {"image_size": 32, "patch_size": 8})
WIKIPEDIA = "wikimedia/wikipedia:20231101.en"


def _deeper(trained: Case) -> Case:
    """Every layer of a small model, and what the next attention layer can memorize from it.

    Its heads read ``d`` numbers, which separate ``2 d`` random labels every other time if they are
    in general position.
    """
    n, d = trained.n, trained.d
    layers = range(DEPTH + 1)
    return trained._replace(
        samples=(5000, 300),
        sizes=tuple(size for size in (*range(8, d, 8), d - 4, d - 1) if size != n),
        curves=tuple(f"{kind} L{at}" for kind in ("random", "trained") for at in layers),
        positions=False,
        depth=DEPTH,
        labels=(d, 3 * d // 2, 2 * d, 5 * d // 2),
    )


FULL, QUICK = (5000, 5000), (200, 100)  # samples, if the features are small


def _vision(
    source: str, hub: str, architecture: str, shape: tuple[int, int], sizes: tuple[int, ...]
) -> dict[str, Case]:
    """The tiers of a ViT; ``source``: the published images, ``hub``: the trained weights.

    ``architecture``: the published one, of so many tokens and dimensions (``shape``), whose random
    attention is tested at further ``sizes``.
    """
    published = Case(
        *(source, architecture, 1973, *shape),
        lambda: corpora.published_images(source, 2000),
        _random(architecture),
        functools.partial(trained_encoder, hub),
        samples=FULL,
        sizes=sizes,
    )
    shipped = Case(
        *("photographs", architecture, 2000, *shape),
        lambda: corpora.photograph_crops(2000, seed=SEED),
        _random(architecture),
        sizes=sizes,
    )
    trained = Case(
        *("digits", "vit-digits", 1797, 17, 64),
        lambda: corpora.digits()[0].split(256),
        _random(("vit", pretrained.DIGITS_VIT)),
        _trained_here(pretrained.digits_vit, least=0.97),
        samples=FULL,
        sizes=tuple(range(20, 64, 4)),
    )
    quick = Case(
        *("photographs", "vit-tiny", 60, 17, 24),
        lambda: corpora.photograph_crops(60, size=32, seed=SEED),
        _random(TINY_VIT),
        samples=QUICK,
        sizes=(10, 20),
    )
    return _tiers(published, shipped, trained, quick)


def _language(
    kind: str,
    source: str,
    hub: str,
    architecture: str,
    shape: tuple[int, int],
    sizes: tuple[int, ...],
    train: Callable[..., float],
    least: float,
) -> dict[str, Case]:
    """The tiers of a BERT or a GPT-2, as for :func:`_vision`.

    ``sizes``: of further tests after the first block. ``train``: makes the one that is trained
    here, refused below ``least``.
    """
    n, pairs = shape[0], kind == "bert"
    read = functools.partial(corpora.library_passages, seed=SEED, pairs=pairs)
    tiny = kind, pretrained.language_sizes(kind, length=20, d=24, layers=1)
    first = {"curves": ("random L1",), "positions": True}
    both = {"curves": ("random L1", "trained L1"), "positions": True, "samples": FULL}
    published = Case(
        *(source, architecture, 2000, *shape),
        lambda: corpora.published_texts(source, hub, 2000, length=n, batch=4, pairs=pairs),
        _random(architecture),
        functools.partial(trained_encoder, hub),
        sizes=sizes,
        **both,
    )
    shipped = Case(
        *("library", architecture, 2000, *shape),
        lambda: read(2000, length=n, batch=4),
        _random(architecture),
        sizes=sizes,
        **first,
    )
    trained = Case(
        *("library", f"{kind}-library", 2000, 64, 96),
        lambda: read(2000, length=64, batch=100),
        _random((kind, pretrained.LIBRARY[kind])),
        _trained_here(train, least),
        sizes=(*range(8, 64, 8), 72, 80, 88, 95),
        **both,
    )
    quick = Case(
        *("library", f"{kind}-tiny", 60, 20, 24),
        lambda: read(60, length=20),
        _random(tiny),
        samples=QUICK,
        sizes=(10, 15, 23),
        **first,
    )
    return _tiers(published, shipped, trained, quick)


def _tiers(published: Case, shipped: Case, trained: Case, quick: Case) -> dict[str, Case]:
    tiers = {"published": published, "shipped": shipped, "trained": trained}
    return tiers | {"deeper": _deeper(trained), "quick": quick}


CASES: dict[str, dict[str, Case]] = {
    "assumptions-bert": _language(
        *("bert", WIKIPEDIA, "bert-large-uncased", "bert-large", (512, 1024)),
        sizes=(*range(25, 401, 25), 800, 1023),
        train=pretrained.library_bert,
        least=0.4,
    ),
    "assumptions-gpt2": _language(
        *("gpt2", WIKIPEDIA, "gpt2-large", "gpt2-large", (1024, 1280)),
        sizes=(25, 50, 100, 200, 400, 600, 800, 1152),
        train=pretrained.library_gpt2,
        least=0.5,
    ),
    "assumptions-vision": _vision(
        *("imagenet-1k", "google/vit-base-patch16-224-in21k", "vit-base", (197, 768)),
        sizes=(*range(25, 401, 25), 500, 600, 700),
    ),
}
