"""What several unit tests need around them."""

import pytest


@pytest.fixture
def store(tmp_path, monkeypatch):
    """An empty store, with nothing shipped."""
    from attnmem import results

    monkeypatch.setenv("ATTNMEM_MEASUREMENTS", str(tmp_path / "new"))
    monkeypatch.setattr(results, "SHIPPED", tmp_path / "shipped")
    return tmp_path / "new"


@pytest.fixture
def no_hub(monkeypatch):
    """As if no hub could be reached, at once."""
    import datasets

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
