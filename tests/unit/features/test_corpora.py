"""Images and texts, from whatever the machine carries and from folders made here."""

import gzip
from functools import partial

import numpy as np
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from attnmem.features import corpora, encoders


def test_crops_do_not_depend_on_batches():
    crops = torch.cat([*corpora.photograph_crops(9, size=32, batch=4, seed=1)])
    assert crops.shape == (9, 3, 32, 32)
    again = torch.cat([*corpora.photograph_crops(6, size=32, batch=6, seed=1)])
    assert torch.equal(crops[:6], again)
    assert len({crop.numpy().tobytes() for crop in crops}) == 9
    assert len(corpora.photographs()) == 7


def test_passages_do_not_depend_on_batches():
    texts = torch.cat([*corpora.library_passages(9, length=30, batch=4, seed=1)])
    again = torch.cat([*corpora.library_passages(5, length=30, batch=5, seed=1)])
    assert torch.equal(texts[:5], again)
    text = corpora.library_text()
    assert all(bytes(passage.tolist()) in text for passage in texts)
    [late] = corpora.library_passages(5, length=200, batch=5, seed=0, within=(0.9, 1.0))
    assert all(text.rfind(bytes(passage.tolist())) >= int(0.9 * len(text)) for passage in late)


def test_the_manuals_words_have_no_paragraph_twice(monkeypatch):
    topics = {"if": "The *if* word.\n\nSee 2.1.", "else": "Else:\n no.\n\n\nThe *if* word.\n"}
    monkeypatch.setattr("pydoc_data.topics.topics", topics)
    expected = ["the", "*", "if", "*", "word", ".", "see", "2", ".", "1", ".", "else", ":", "no"]
    assert corpora.manual_words() == [*expected, "."]


@pytest.mark.parametrize("length", [11, 12])
def test_pairs_are_marked_as_by_berts_tokenizer(length, berts_tokenizer):
    [pairs] = corpora.library_passages(2, length=length, batch=2, seed=0, pairs=True)
    [plain] = corpora.library_passages(2, length=length - 3, batch=2, seed=0)
    second = (length - 3) // 2  # tokens; the first may have one more
    words = berts_tokenizer(" ".join(["one"] * (length - 3 - second)), " ".join(["two"] * second))
    assert pairs["token_type_ids"].tolist() == [words["token_type_ids"]] * 2
    ids, marks = pairs["input_ids"], torch.tensor(words["input_ids"])
    assert (ids[:, marks == 2] == corpora.CLS).all()
    assert (ids[:, marks == 3] == corpora.SEP).all()
    assert torch.equal(ids[:, marks > 3], plain)


def test_clothes_of_debian_are_read_where_unpacked(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNMEM_DEBIAN", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="apt-get install dataset-fashion-mnist"):
        corpora.clothes()
    grey = np.arange(2 * 28 * 28).reshape(2, 28, 28) % 251
    folder = tmp_path / "usr/share/datasets/fashion-mnist"
    folder.mkdir(parents=True)
    header = np.array([2051, 2, 28, 28], dtype=">i4").tobytes()
    packed = gzip.compress(header + grey.astype(np.uint8).tobytes())
    (folder / "t10k-images-idx3-ubyte.gz").write_bytes(packed)
    images = corpora.clothes()
    assert images.shape == (2, 3, 28, 28)
    assert torch.equal(images[1, 2], torch.from_numpy(grey[1]))
    [large] = corpora.enlarged(images, 56)
    assert torch.equal(large[1], corpora.resized(images[1], 56))


def test_nature_of_debian_is_read_where_unpacked(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNMEM_DEBIAN", str(tmp_path))
    folder = tmp_path / "usr/share/backgrounds/mate/nature"
    folder.mkdir(parents=True)
    for i in range(2):
        Image.new("RGB", (390, 300), (i, 100, 200)).save(folder / f"{i}.jpg")
    corpora.nature.cache_clear()
    assert [picture.shape for picture in corpora.nature()] == [(3, 100, 130)] * 2
    [crops] = corpora.photograph_crops(2, size=32, seed=0, source=corpora.nature)
    corpora.nature.cache_clear()
    assert (crops[:, 2].float().mean() - 200).abs() < 3


@pytest.mark.parametrize("told", [True, False], ids=["an image", "bytes"])
def test_published_images_have_colour(told, tmp_path, save_data):
    arrays = np.random.default_rng(0).integers(0, 256, (5, 40, 50, 3), dtype=np.uint8)
    images = [*map(Image.fromarray, arrays)]
    images[1] = images[1].convert("L")
    file = save_data(tmp_path / "images", image=images)
    if not told:  # by the file itself, as a hub's may be
        table = pyarrow.parquet.read_table(file)
        pyarrow.parquet.write_table(table.replace_schema_metadata(None), file)
    batches = list(corpora.published_images([file], 3, size=32, batch=2))
    assert [len(b) for b in batches] == [2, 1], "the second one has no colour"
    for i, array in enumerate(arrays[[0, 2, 3]]):
        expected = corpora.resized(torch.from_numpy(array).permute(2, 0, 1), 32)
        assert torch.equal(torch.cat(batches)[i], expected)


def test_texts_are_read_from_a_folder_or_a_string(tmp_path, save_words, save_data):
    words = ["[UNK]", "[CLS]", "[SEP]", "one", "two", "three"]
    save_words(tmp_path / "words", words, cls_token="[CLS]", sep_token="[SEP]")
    texts = ["one two", "one two three one two three", "three three three three three"]
    text = save_data(tmp_path / "text", text=texts * 2)
    read = partial(corpora.published_texts, [text], str(tmp_path / "words"))
    [found] = read(3, length=5)
    assert found.tolist() == [[3, 4, 5, 3, 4], [5] * 5, [3, 4, 5, 3, 4]]
    [pairs] = read(2, length=7, pairs=True)
    assert pairs["input_ids"].tolist() == [[1, 3, 4, 2, 5, 3, 2], [1, 5, 5, 2, 5, 5, 2]]
    whole = "one two three two one two three two three three"
    distinct = partial(corpora.distinct_passages, whole, str(tmp_path / "words"), length=5)
    for count in (5, 1):
        [found] = distinct(count)
        assert found["input_ids"].tolist() == [[1, 3, 2, 4, 2], [1, 5, 2, 4, 2]][:count]
    with pytest.raises(ValueError, match=r"^source: \S+train.parquet cannot be read .* 'image'"):
        next(corpora.published_images([text], 3))


@pytest.mark.parametrize(
    "load",
    [
        lambda: next(corpora.distinct_passages("text", "no/such-words", 3, length=9)),
        lambda: encoders.trained_encoder("no/such-model"),
    ],
)
def test_missing_source_is_said_in_one_line(load):
    with pytest.raises(ConnectionError, match=r"^source 'no/such-\w+' is no folder here") as error:
        load()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("length", "within"), [(2, (0.0, 1.0)), (9, (0.0, 0.0))])
def test_passages_refuse_lengths_by_name(length, within):
    with pytest.raises(ValueError, match=rf"^length: got {length};"):
        next(corpora.library_passages(3, length=length, seed=0, within=within))
