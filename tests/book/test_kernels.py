"""The kernels that re-run the notebooks are those that a reader starts, but for their speed."""

import ast
import os
import signal

import pytest
from jupyter_client.manager import KernelManager, start_new_kernel
from jupyter_client.provisioning import local_provisioner

from tools import kernels

STATE = """
import os, re, sys
there = {"torch": "torch" in sys.modules, "attnmem": "attnmem" in sys.modules}
import matplotlib.pyplot, pandas, torch
print(there)
options = pandas.describe_option("", _print_desc=False)
print({
    "path": sys.path,
    "folder": os.getcwd(),
    "main": sys.modules["__main__"].__name__,
    "variables": {k: v for k, v in os.environ.items() if not k.startswith("JPY_")},
    "group": os.getpgid(0) == os.getpid(),
    "backend": matplotlib.get_backend(),
    "threads": torch.get_num_threads(),
    "options": re.findall(r"currently: (.*)]", options.lower()),
    "kind": str(torch.get_default_dtype()),
})
"""


def printed(client, code):
    said = []
    client.execute_interactive(
        code, timeout=120, output_hook=lambda m: said.append(m["content"].get("text", ""))
    )
    return [ast.literal_eval(line) for line in "".join(said).splitlines()]


@pytest.fixture
def forked(monkeypatch):
    monkeypatch.setenv("MPLBACKEND", kernels.BACKEND)
    monkeypatch.setattr(local_provisioner, "launch_kernel", kernels.Kernel)


def state(folder):
    manager, client = start_new_kernel(kernel_name="python3", cwd=str(folder))
    try:
        return printed(client, STATE)
    finally:
        client.stop_channels()
        manager.shutdown_kernel()


def test_a_forked_kernel_is_as_a_new_one_with_torch_imported_and_no_library(tmp_path, request):
    plain, expected = state(tmp_path)
    request.getfixturevalue("forked")
    forked, found = state(tmp_path)
    assert plain == {"torch": False, "attnmem": False}
    assert forked == {"torch": True, "attnmem": False}
    assert found == expected
    assert "20" in found["options"]  # columns of a table in a notebook, 0 in a terminal


@pytest.mark.usefixtures("forked")
def test_a_forked_kernel_can_be_interrupted_and_killed():
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=60)
    request = client.execute("print('asleep'); import time; time.sleep(60)")

    def answer(receive, kind):
        """The next message of that kind that answers the request."""
        while True:
            message = receive(timeout=60)
            if (message["parent_header"].get("msg_id"), message["msg_type"]) == (request, kind):
                return message["content"]

    answer(client.get_iopub_msg, "stream")
    pid = manager.provisioner.pid
    manager.interrupt_kernel()
    assert answer(client.get_shell_msg, "execute_reply")["ename"] == "KeyboardInterrupt"
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
