"""How pytest runs the notebooks: in kernels that start at once, comparing all that pages show."""

import pytest
from jupyter_client.provisioning import local_provisioner

from tools import kernels, pictures


def pytest_configure(config):
    """A cell is no function, for which a fixture could do it."""
    patch = pytest.MonkeyPatch()
    patch.setenv("MPLBACKEND", kernels.BACKEND)
    patch.setattr(local_provisioner, "launch_kernel", kernels.Kernel)
    config.add_cleanup(patch.undo)


def pytest_itemcollected(item):
    """Compare metadata, with the names of quoted numbers and the verdicts, and pictures.

    nbval leaves out both.
    """
    notebook, compare = item.parent, item.compare_outputs
    compared = {"metadata", "image/png"}
    notebook.skip_compare = [
        key for key in notebook.skip_compare if key not in compared
    ]

    def compare_all(outputs, stored):
        pictures.settle_cell(outputs, stored)
        return compare(outputs, stored)

    item.compare_outputs = compare_all
