"""What tests of features need around them: no hub, and a tokenizer."""

import pytest
import transformers


@pytest.fixture(autouse=True)
def _without_a_hub(no_hub):
    pass


@pytest.fixture
def berts_tokenizer():
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two", "three"]
    return transformers.BertTokenizer(vocab={word: i for i, word in enumerate(words)})
