"""Kernels that start at once: forks of a process that has imported the large packages.

The import of the same packages in a new process for each notebook was a third of the time of
``make nbval``. The library itself is imported by each kernel, as by a reader's.
"""

import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Mapping

PACKAGES = ["torch", "scipy.optimize", "scipy.stats", "matplotlib.pyplot", "pandas", "jaxtyping"]
PACKAGES += ["torch._dynamo"]  # which torch imports, for seconds, when it makes an optimizer
PACKAGES += ["ipykernel.kernelapp", "ipykernel.debugger"]
PACKAGES += ["IPython.core.completerlib", "sqlite3", "psutil"]  # as a kernel does when it starts
BACKEND = "module://matplotlib_inline.backend_inline"  # matplotlib's in any kernel
forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(PACKAGES)


class Kernel(forks.Process):
    """A forked kernel, with what Jupyter asks of the ``subprocess.Popen`` of another."""

    stdin = stdout = stderr = None

    def __init__(self, command: list[str], cwd: str | None = None, env: Mapping = os.environ, **_):
        arguments = command[command.index("ipykernel_launcher") + 1 :]
        super().__init__(target=_run, args=(arguments, _path(), cwd, {**env}))
        self.start()
        while self.poll() is None and os.getpgid(self.pid) != self.pid:
            time.sleep(0.001)  # Jupyter signals the whole group, so that it has to be its own

    def poll(self) -> int | None:
        """The exit status, once there is one."""
        return self.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        """The exit status, when there is one, or after so many seconds."""
        self.join(timeout)
        return self.exitcode

    def send_signal(self, number: int) -> None:
        """Send the process a signal."""
        os.kill(self.pid, number)


def _path() -> list[str]:
    """Where a new interpreter looks for packages; this one looks in folders of the tests, too."""
    command = [sys.executable, "-c", "import json, sys; print(json.dumps(sys.path[1:]))"]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


def _run(arguments: list[str], path: list[str], cwd: str | None, variables: dict) -> None:
    """What ``python -m ipykernel_launcher`` does, in the new process."""
    os.setsid()
    of_debugger = {k: v for k, v in os.environ.items() if k.startswith("PYDEVD_")}
    os.environ.clear()
    os.environ.update(of_debugger | variables)
    os.chdir(cwd or os.curdir)
    sys.path[:] = path
    import pandas
    from ipykernel.kernelapp import launch_new_instance

    pandas.set_option("display.max_columns", 20)  # as its import in a notebook does
    launch_new_instance(arguments)
