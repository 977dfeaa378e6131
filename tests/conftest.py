"""Every shape that the library's signatures state is checked while the tests run."""

import os

import pytest


def pytest_configure(config):
    """Before a test is imported; a process that only hands tests to others imports nothing."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    hands_on = getattr(config.option, "numprocesses", None)
    if hands_on and not config.getoption("--hypothesis-profile", None):
        return
    import torch
    from hypothesis import settings

    import shapes

    torch.set_num_threads(1)  # as `make test` does; a fork of one with more can wait for ever
    shapes.check("attnmem")
    # The same examples every time; others with --hypothesis-profile=explore, as once a week in CI.
    settings.register_profile("same", deadline=None, derandomize=True, database=None)
    settings.register_profile("explore", deadline=None)
    settings.load_profile("same")


@pytest.fixture(autouse=True)
def _same_random_numbers_whatever_the_order():
    import torch

    torch.default_generator.manual_seed(0)  # that of the CPU; the others would cost a millisecond
