"""What several unit tests need around them."""

import time

import pytest


@pytest.fixture
def store(tmp_path, monkeypatch):
    """An empty store, with nothing shipped."""
    from attnmem.lab import store as storage

    monkeypatch.setenv("ATTNMEM_MEASUREMENTS", str(tmp_path / "new"))
    monkeypatch.setattr(storage, "SHIPPED", tmp_path / "shipped")
    return tmp_path / "new"


@pytest.fixture
def instant(monkeypatch):
    """Training that takes no time and returns what depends on the run only."""
    from attnmem.lab import training
    from attnmem.lab.store import RESULTS

    def train(runs, *, device, checkpoints):
        time.sleep(0.002)
        of_run = [(run, RESULTS[type(run)]) for run in runs]
        return [kind(run.seed / 10, float(run.H), 0.0, device, "2", "abc") for run, kind in of_run]

    monkeypatch.setattr(training, "train", train)


@pytest.fixture
def save_words():
    """A function that saves a tokenizer of whole words to a folder, as a hub would have it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def save(folder, words, **marks):
        ids = {word: i for i, word in enumerate(words)}
        plain = Tokenizer(models.WordLevel(ids, unk_token=words[0]))
        plain.pre_tokenizer = pre_tokenizers.Whitespace()
        whole = PreTrainedTokenizerFast(tokenizer_object=plain, unk_token=words[0], **marks)
        whole.save_pretrained(folder)

    return save


@pytest.fixture
def save_data():
    """A function that saves columns to a file of a folder, as a hub would have it."""
    import datasets

    def save(folder, **columns):
        folder.mkdir()
        datasets.Dataset.from_dict(columns).to_parquet(folder / "train.parquet")
        return folder / "train.parquet"

    return save


@pytest.fixture
def no_hub(monkeypatch, tmp_path):
    """As if no hub could be reached, at once, and nothing had ever come from one."""
    import datasets

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "no-hub"))

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
