"""Every shape that the library's signatures state is checked while the tests run."""

import os

import pytest
import torch
from jaxtyping import install_import_hook

os.environ.setdefault("TQDM_DISABLE", "1")
install_import_hook("attnmem", "beartype.beartype")


@pytest.fixture(autouse=True)
def _same_random_numbers_whatever_the_order():
    torch.manual_seed(0)
