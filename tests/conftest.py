"""The same random numbers in every test; with ``--shapes`` every stated shape is checked."""

import os

import pytest

SHAPED = ["core", "theory", "lab.data"]


def pytest_addoption(parser):
    parser.addoption("--shapes", action="store_true", help="check types and shapes in every call")


def pytest_configure(config):
    """Before a test is imported; a process that only hands tests to others imports nothing."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    hands_on = getattr(config.option, "numprocesses", None)
    if hands_on and not config.getoption("--hypothesis-profile", None):
        return
    import torch
    from hypothesis import settings
    from jaxtyping import install_import_hook

    torch.set_num_threads(1)  # as `make test` does; a fork of one with more can wait for ever
    if config.getoption("--shapes"):
        install_import_hook([f"attnmem.{room}" for room in SHAPED], "beartype.beartype")
    # The same examples every time; others with --hypothesis-profile=explore, as once a week in CI.
    settings.register_profile("same", deadline=None, derandomize=True, database=None)
    settings.register_profile("explore", deadline=None)
    settings.load_profile("same")


@pytest.fixture(autouse=True)
def _same_random_numbers_whatever_the_order():
    import torch

    torch.default_generator.manual_seed(0)  # that of the CPU; the others would cost a millisecond
