"""Real images and real text for the tests of assumptions, from packages on the machine or a hub.

Images and token numbers come ``batch`` at a time, ``count`` in all. What is drawn depends on
``seed`` and its own number alone, so batches do not matter. Published data are files of Parquet, as
:mod:`~attnmem.features.hub` fetches them.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import itertools
import os
import pathlib
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Int, UInt8
from torch import Tensor

from ..checks import Range, Seed, checked, need, reading, refuse

Images = UInt8[Tensor, "B 3 size size"]
Tokens = Int[Tensor, "B n"]
Inputs = Tensor | Mapping[str, Any]  # of a model: a tensor, or several by name
CLS, SEP, MASK = 256, 257, 258  # after the 256 bytes
_MARKS = 3  # CLS and two SEP, in a pair
BYTES = 259  # the size of that vocabulary
_SMALLEST_CROP = 96  # pixels: large enough that a crop shows something
_DEBIAN = "ATTNMEM_DEBIAN"  # names a folder where Debian's packages are unpacked, if none has them


def _of_debian(package: str, path: str) -> pathlib.Path:
    """A file or folder that a package of Debian installs."""
    installed = pathlib.Path(os.environ.get(_DEBIAN, "/"), "usr", "share", path)
    if not installed.exists():
        remedy = f"apt-get install {package}, or unpack it to a folder and name that in {_DEBIAN}"
        raise FileNotFoundError(f"{installed} is missing: {remedy}")
    return installed


def _stacked(items: Iterable[Tensor], size: int) -> Iterator[Tensor]:
    items = iter(items)
    while block := [*itertools.islice(items, size)]:
        yield torch.stack(block)


def _picture(image: Any) -> UInt8[Tensor, "3 h w"]:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


# --- images ---------------------------------------------------------------------------------------


@functools.cache
def photographs() -> tuple[UInt8[Tensor, "3 h w"], ...]:
    """The colour photographs that scikit-image and scikit-learn carry in their packages: seven."""
    data, io = need("skimage.data"), need("skimage.io")
    samples = need("sklearn.datasets")
    arrays = [data.astronaut(), data.cat(), data.coffee(), data.rocket()]
    arrays += [io.imread(pathlib.Path(data.data_dir) / "motorcycle_left.png")]
    arrays += samples.load_sample_images().images
    return tuple(map(_picture, arrays))


@functools.cache
def nature() -> tuple[UInt8[Tensor, "3 h w"], ...]:
    """Twelve colour photographs of Debian's ``mate-backgrounds`` (GPL), scaled to a third."""
    folder, image = _of_debian("mate-backgrounds", "backgrounds/mate/nature"), need("PIL.Image")
    return tuple(_picture(image.open(path).reduce(3)) for path in sorted(folder.glob("*.jpg")))


@checked
def photograph_crops(
    count: int,
    *,
    size: int = 224,
    batch: int = 64,
    seed: Seed,
    source: Callable[[], tuple[UInt8[Tensor, "3 h w"], ...]] = photographs,
) -> Iterator[Images]:
    """Random square crops of photographs in turn, of 96 pixels or more, some mirrored, scaled."""

    def crop(i: int) -> UInt8[Tensor, "3 size size"]:
        image, random = source()[i % len(source())], np.random.default_rng([seed, i])
        side = random.integers(_SMALLEST_CROP, min(image.shape[1:]), endpoint=True)
        y, x = (random.integers(0, extent - side, endpoint=True) for extent in image.shape[1:])
        square = image[:, y : y + side, x : x + side]
        if random.random() < 0.5:
            square = square.flip(-1)
        return resized(square, size)

    return _stacked(map(crop, range(count)), batch)


def resized(image: UInt8[Tensor, "3 h w"], size: int) -> UInt8[Tensor, "3 size size"]:
    """Scale an image bilinearly, with antialiasing, as image processors do; to whole levels."""
    scaled = F.interpolate(image[None].float(), (size, size), mode="bilinear", antialias=True)
    return scaled[0].round().clamp(0, 255).to(torch.uint8)


def enlarged(images: Images, size: int = 224, batch: int = 64) -> Iterator[Images]:
    """Small images, such as :func:`digits`, scaled up to what a large model reads."""
    return _stacked((resized(image, size) for image in images), batch)


def normalized(images: Tensor, dtype: torch.dtype) -> Tensor:
    """Levels from 0 to 255 as numbers from -1 to 1, as in the published image processor."""
    return images.to(dtype) * (2 / 255) - 1


def standardized(images: UInt8[Tensor, "B 3 h w"]) -> Tensor:
    """Levels from 0 to 255 less ImageNet's mean, in units of its deviation, as for DINOv2."""
    mean, deviation = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]).double()
    return (images / 255.0 - mean[:, None, None]) / deviation[:, None, None]


def digits() -> tuple[UInt8[Tensor, "T 3 8 8"], Int[Tensor, " T"]]:
    """scikit-learn's 1797 handwritten digits, 16 levels of grey spread over 0 to 255."""
    data = need("sklearn.datasets").load_digits()
    grey = torch.from_numpy(data.images * 255 / 16).round().to(torch.uint8)
    return grey[:, None].expand(-1, 3, -1, -1), torch.from_numpy(data.target)


def clothes() -> UInt8[Tensor, "T 3 28 28"]:
    """The 10,000 test images of Fashion-MNIST, of Debian's ``dataset-fashion-mnist`` (MIT)."""
    folder = _of_debian("dataset-fashion-mnist", "datasets/fashion-mnist")
    raw = gzip.decompress((folder / "t10k-images-idx3-ubyte.gz").read_bytes())
    grey = torch.frombuffer(bytearray(raw), dtype=torch.uint8, offset=16)  # after the sizes
    return grey.view(-1, 1, 28, 28).expand(-1, 3, -1, -1)


def published_images(
    files: Sequence[pathlib.Path], count: int, *, size: int = 224, batch: int = 64
) -> Iterator[Images]:
    """The first ``count`` colour images of a column ``image``, scaled to one ``size``.

    Images of another mode than RGB are passed over, as in the paper: 1973 of its 2000 have colour.
    """
    images = (image for image in _column(files, "image") if image.mode == "RGB")
    coloured = map(_picture, itertools.islice(images, count))
    return _stacked((resized(image, size) for image in coloured), batch)


def _column(files: Sequence[pathlib.Path], name: str) -> Iterator[Any]:
    """The values of a column of files of Parquet, one by one."""
    library, names = need("datasets"), [str(path) for path in files]
    with reading(f"source: {', '.join(names)}", f"Parquet with a column {name!r}"):
        rows = library.load_dataset("parquet", data_files=names, split="train", streaming=True)
        rows = rows.select_columns(name)
        if name == "image":  # whose files need not say that their bytes are one
            rows = rows.cast_column(name, library.Image())
        for row in rows:
            yield row[name]


@contextlib.contextmanager
def reaching(source: str) -> Iterator[None]:
    """One line for the many errors of a name that no hub gives, or of a folder with faults."""
    try:
        with reading(f"source: {source}", "a saved model or data set"):
            yield
    except (OSError, ValueError) as error:  # offline, unknown or gated: libraries raise either
        if pathlib.Path(source).is_dir():
            raise
        message = f"source {source!r} is no folder here, and of a hub: {error}"
        raise ConnectionError(message) from error


# --- text -----------------------------------------------------------------------------------------


@functools.cache
def library_text() -> bytes:
    """The sources of the standard library's top modules; it differs a bit between versions."""
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    return b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))


def _as_pairs(passages: Int[Tensor, "B m"], cls: int, sep: int) -> dict[str, Tokens]:
    """Each passage cut in two, with marks and types, under the names that a tokenizer gives."""
    first, second = passages.tensor_split(2, dim=1)
    start, end = (passages.new_full((len(passages), 1), mark) for mark in (cls, sep))
    ids = torch.cat([start, first, end, second, end], dim=1)
    types = torch.zeros_like(ids)
    types[:, first.shape[1] + 2 :] = 1
    return {"input_ids": ids, "token_type_ids": types}


@checked
def library_passages(
    count: int,
    *,
    length: Annotated[int, Range(8)],
    batch: int = 16,
    seed: Seed,
    pairs: bool = False,
    within: tuple[float, float] = (0.0, 1.0),
) -> Iterator[Tokens | dict[str, Tokens]]:
    """Passages of the :func:`library_text` at random positions, a token a byte.

    They lie between two shares of its length, ``within``. With ``pairs`` a batch is what BERT's
    tokenizer gives: ``CLS``, a passage, ``SEP``, the next one, ``SEP``, all within the ``length``.
    """
    library = torch.frombuffer(bytearray(library_text()), dtype=torch.uint8)
    first, last = (int(share * len(library)) for share in within)
    text = library[first:last]
    n_marks = _MARKS if pairs else 0
    if length - n_marks > len(text):
        refuse("length", length, f"at most {len(text) + n_marks}, as the text is no longer")

    def passage(i: int) -> Int[Tensor, " m"]:
        random = np.random.default_rng([seed, i])
        start = int(random.integers(0, len(text) - (length - n_marks), endpoint=True))
        return text[start : start + length - n_marks].long()

    for passages in _stacked(map(passage, range(count)), batch):
        yield _as_pairs(passages, CLS, SEP) if pairs else passages


def manual() -> str:
    """Python's manual, as ``help`` shows it."""
    from pydoc_data.topics import topics

    return "\n".join(topics.values())


def manual_words() -> list[str]:
    """The words and signs of the :func:`manual` in small letters, every paragraph of it once."""
    paragraphs = dict.fromkeys(paragraph.strip() for paragraph in manual().split("\n\n"))
    return re.findall(r"\w+|[^\w\s]", "\n".join(paragraphs).lower())


def _tokenizer(source: str) -> Any:
    with reaching(source):
        return need("transformers").AutoTokenizer.from_pretrained(source, trust_remote_code=False)


def distinct_passages(
    text: str, tokenizer: str, count: int, *, length: int, batch: int = 100
) -> Iterator[dict[str, Tokens]]:
    """The first distinct passages of a text, none overlapping, as pairs for a BERT.

    The ``tokenizer`` is a folder that ``transformers`` has saved, or a name on a hub.
    """
    bert = _tokenizer(tokenizer)
    ids = torch.tensor(bert(text, add_special_tokens=False, verbose=False)["input_ids"])
    passages = ids.split(length - _MARKS)[:-1]  # the last one may be shorter
    distinct = {tuple(passage.tolist()): passage for passage in passages}
    for block in _stacked(itertools.islice(distinct.values(), count), batch):
        yield _as_pairs(block, bert.cls_token_id, bert.sep_token_id)


def published_texts(
    files: Sequence[pathlib.Path],
    tokenizer: str,
    count: int,
    *,
    length: int,
    batch: int = 16,
    pairs: bool = False,
) -> Iterator[Tokens | dict[str, Tokens]]:
    """The first tokens of the first texts of a column ``text`` with so many, as passages."""
    bert = _tokenizer(tokenizer)
    n_tokens = length - _MARKS if pairs else length

    def passages() -> Iterator[Int[Tensor, " m"]]:
        for text in _column(files, "text"):
            ids = bert(text, add_special_tokens=False)["input_ids"]
            if len(ids) >= n_tokens:
                yield torch.tensor(ids[:n_tokens], device="cpu")

    for block in _stacked(itertools.islice(passages(), count), batch):
        yield _as_pairs(block, bert.cls_token_id, bert.sep_token_id) if pairs else block
