"""How pytest runs the notebooks: in kernels that start at once."""

import pytest
from jupyter_client.provisioning import local_provisioner

from tools import kernels


def pytest_configure(config):
    """A cell is no function, for which a fixture could do it."""
    patch = pytest.MonkeyPatch()
    patch.setenv("MPLBACKEND", kernels.BACKEND)
    patch.setattr(local_provisioner, "launch_kernel", kernels.Kernel)
    config.add_cleanup(patch.undo)
