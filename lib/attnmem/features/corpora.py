"""Real images and real text for the assumption checks, from packages that lie on the machine.

Where a hub can be reached, :func:`published_images` and :func:`published_texts` give the paper's
own data instead. Images are ``uint8 (B, 3, size, size)`` and come in batches, so that thousands of
them are never in memory at once; text comes as token numbers ``(B, n)``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import pathlib
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Int, UInt8
from torch import Tensor

from ..checks import check_integer, check_number, checked_by

Images = UInt8[Tensor, "B 3 size size"]
Tokens = Int[Tensor, "B n"]
SMALLEST_CROP = 96  # pixels; half of what it is scaled up to at least
CLS, SEP, MASK = 256, 257, 258  # after the 256 bytes
BYTES = 259  # the size of that vocabulary


def need(package: str) -> Any:
    """A package of the extra ``hub``, imported where it is used."""
    try:
        with warnings.catch_warnings():
            # A progress bar that finds no widgets in a notebook falls back to text.
            warnings.filterwarnings("ignore", message="IProgress not found")
            return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(f"{package} is missing: pip install 'attnmem[hub]'") from error


# --- images ---------------------------------------------------------------------------------------


@functools.cache
def photographs() -> tuple[UInt8[Tensor, "3 h w"], ...]:
    """The colour photographs that scikit-image and scikit-learn carry in their packages: seven."""
    data, io = need("skimage.data"), need("skimage.io")
    samples = need("sklearn.datasets")
    arrays = [data.astronaut(), data.cat(), data.coffee(), data.rocket()]
    arrays += [io.imread(pathlib.Path(data.data_dir) / "motorcycle_left.png")]
    arrays += samples.load_sample_images().images
    return tuple(torch.from_numpy(np.array(a)).permute(2, 0, 1) for a in arrays)


def _check_count(count, batch, seed, size=1) -> None:
    sizes = {"count": count, "batch": batch, "size": size}
    for name, value in sizes.items():
        check_integer(name, value)
    check_integer("seed", seed, least=0)


@checked_by(_check_count)
def photograph_crops(
    count: int, *, size: int = 224, batch: int = 64, seed: int
) -> Iterator[Images]:
    """Random square crops of the :func:`photographs`, some mirrored, scaled to one size.

    Photographs take turns; the side of a crop is uniform from 96 pixels to the whole height. Crop
    ``i`` depends on ``seed`` and ``i`` alone, so batches do not matter.

    Args:
        count: How many crops.
        size: Height and width of a crop, in pixels.
        batch: How many crops at a time.
        seed: Decides the places, the sides and which crops are mirrored.

    Yields:
        Batches of images; the last one may be smaller.

    Raises:
        ValueError: A number is below 1, or the seed below 0.

    Example:
        >>> [len(images) for images in photograph_crops(5, size=32, batch=2, seed=0)]
        [2, 2, 1]
    """
    for start in range(0, count, batch):
        chosen = range(start, min(start + batch, count))
        yield torch.stack([_crop(photographs(), size, seed, i) for i in chosen])


def _crop(images: tuple[Tensor, ...], size: int, seed: int, i: int) -> UInt8[Tensor, "3 s s"]:
    image = images[i % len(images)]
    random = np.random.default_rng([seed, i])
    side = random.integers(SMALLEST_CROP, min(image.shape[1:]), endpoint=True)
    top, left = (random.integers(0, extent - side, endpoint=True) for extent in image.shape[1:])
    part = image[:, top : top + side, left : left + side]
    return resized(part.flip(-1) if random.random() < 0.5 else part, size)


def resized(image: UInt8[Tensor, "3 h w"], size: int) -> UInt8[Tensor, "3 size size"]:
    """Scale an image bilinearly, with antialiasing, as image processors do.

    Args:
        image: Levels from 0 to 255.
        size: Height and width of the result, in pixels.

    Returns:
        The image, rounded to whole levels.
    """
    scaled = F.interpolate(image[None].float(), (size, size), mode="bilinear", antialias=True)
    return scaled[0].round().clamp(0, 255).to(torch.uint8)


def digits() -> tuple[UInt8[Tensor, "T 3 8 8"], Int[Tensor, " T"]]:
    """scikit-learn's 1797 handwritten digits, 16 levels of grey spread over 0 to 255."""
    found = need("sklearn.datasets").load_digits()
    grey = torch.from_numpy(found.images * 255 / 16).round().to(torch.uint8)
    return grey[:, None].expand(-1, 3, -1, -1), torch.from_numpy(found.target)


def published_images(
    source: str, count: int, *, size: int = 224, batch: int = 64, split: str = "train"
) -> Iterator[Images]:
    """The colour images among the first of a data set with a column ``image``.

    Grey images are passed over, as in the paper: 1973 of its 2000 have colour.

    Args:
        source: A folder that ``datasets`` has saved, or a name on a hub such as ``imagenet-1k``,
            which is read as a stream. A configuration may follow after a colon.
        count: How many images are looked at.
        size: Height and width that they are scaled to, in pixels.
        batch: How many images at a time.
        split: The part of the data set.

    Yields:
        Batches of images; the last one may be smaller.

    Raises:
        ConnectionError: There is neither such a folder nor a hub that gives the data.
    """
    rows = itertools.islice(_rows(source, split), count)
    colour = (row["image"] for row in rows if row["image"].mode == "RGB")
    for images in _batched(colour, batch):
        arrays = [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images]
        yield torch.stack([resized(array, size) for array in arrays])


def _rows(source: str, split: str) -> Iterator[dict[str, Any]]:
    data = need("datasets")
    with reaching(source):
        if pathlib.Path(source).is_dir():
            table = data.load_from_disk(source)
            yield from table[split] if isinstance(table, dict) else table
        else:
            name, _, part = source.partition(":")
            yield from data.load_dataset(name, part or None, split=split, streaming=True)


@contextlib.contextmanager
def reaching(source: str) -> Iterator[None]:
    """One line for the many errors of a name that is no folder and that no hub gives."""
    try:
        yield
    except (OSError, ValueError) as error:  # offline, unknown or gated: libraries raise either
        if pathlib.Path(source).is_dir():
            raise
        reason = str(error).split("\n")[0]
        raise ConnectionError(
            f"source {source!r} is no folder here and came from no hub: {reason}"
        ) from error


def _batched(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    left = iter(items)
    while block := list(itertools.islice(left, size)):
        yield block


# --- text -----------------------------------------------------------------------------------------


@functools.cache
def library_text() -> bytes:
    """The sources of the Python standard library's top modules, by name, as one long text.

    It differs a little between versions of Python.
    """
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    return b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))


def _check_passages(count, length, batch, seed, pairs=False, within=(0.0, 1.0)) -> None:
    _check_count(count, batch, seed)
    check_number("within[0]", within[0], least=0.0, most=1.0)
    check_number("within[1]", within[1], least=within[0], most=1.0)
    check_integer(
        "length", length, least=8, most=int((within[1] - within[0]) * len(library_text()))
    )


@checked_by(_check_passages)
def library_passages(
    count: int,
    *,
    length: int,
    batch: int = 16,
    seed: int,
    pairs: bool = False,
    within: tuple[float, float] = (0.0, 1.0),
) -> Iterator[Tokens]:
    """Passages of the :func:`library_text` at random places, a token a byte.

    A passage depends on ``seed`` and its number alone.

    Args:
        count: How many passages.
        length: Tokens of a passage, at least 8, with the marks of a pair.
        batch: How many passages at a time.
        seed: Decides the places.
        pairs: Whether they are as BERT reads them: ``CLS``, a passage, ``SEP``, the one after it,
            ``SEP``.
        within: The part of the text that they are taken from, as shares of its length.

    Yields:
        Batches of token numbers ``(B, length)``; the last one may be smaller.

    Raises:
        ValueError: A number is out of range, or the part of the text is shorter than a passage.

    Example:
        >>> [tokens.shape for tokens in library_passages(3, length=10, batch=2, seed=0)]
        [torch.Size([2, 10]), torch.Size([1, 10])]
    """
    whole = torch.frombuffer(bytearray(library_text()), dtype=torch.uint8)
    text = whole[slice(*(int(share * len(whole)) for share in within))]
    read = length - 3 if pairs else length
    for start in range(0, count, batch):
        found = []
        for i in range(start, min(start + batch, count)):
            at = int(np.random.default_rng([seed, i]).integers(0, len(text) - read, endpoint=True))
            found.append(text[at : at + read].long())
        passages = torch.stack(found)
        yield _as_pairs(passages, CLS, SEP) if pairs else passages


def _as_pairs(passages: Int[Tensor, "B m"], cls: int, sep: int) -> Tokens:
    first, second = passages.tensor_split(2, dim=1)
    start, end = (passages.new_full((len(passages), 1), mark) for mark in (cls, sep))
    return torch.cat([start, first, end, second, end], dim=1)


def pair_types(length: int) -> Int[Tensor, " n"]:
    """0 for each token up to the first ``SEP`` of a pair of that length, 1 from there on."""
    [ends] = _as_pairs(torch.zeros(1, length - 3, dtype=torch.int64), cls=0, sep=1)
    return (ends.cumsum(dim=0) - ends).clamp(max=1)


def published_texts(
    source: str,
    tokenizer: str,
    count: int,
    *,
    length: int,
    batch: int = 16,
    split: str = "train",
    pairs: bool = False,
) -> Iterator[Tokens]:
    """The first texts of a data set with a column ``text`` that are long enough.

    Texts that are too short are passed over; of the others the first ``length`` tokens count.

    Args:
        source: A folder that ``datasets`` has saved, or a name on a hub. A configuration may follow
            after a colon, as in ``wikimedia/wikipedia:20231101.en``.
        tokenizer: A folder that ``transformers`` has saved, or a name on a hub.
        count: How many texts.
        length: Tokens of a text, with the marks of a pair.
        batch: How many texts at a time.
        split: The part of the data set.
        pairs: Whether each text is cut in two, with marks as BERT reads them.

    Yields:
        Batches of token numbers ``(B, length)``; the last one may be smaller.

    Raises:
        ConnectionError: There is neither such a folder nor a hub that gives data or tokenizer.
    """
    with reaching(tokenizer):
        words = need("transformers").AutoTokenizer.from_pretrained(tokenizer)
    read = length - 3 if pairs else length
    encoded = (
        words(row["text"], add_special_tokens=False)["input_ids"] for row in _rows(source, split)
    )
    long_enough = (ids[:read] for ids in encoded if len(ids) >= read)
    for block in _batched(itertools.islice(long_enough, count), batch):
        passages = torch.tensor(block)
        marks = words.cls_token_id, words.sep_token_id
        yield _as_pairs(passages, *marks) if pairs else passages
