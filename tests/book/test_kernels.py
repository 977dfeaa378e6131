"""The kernels that re-run the notebooks are those that a reader starts, but for their speed."""

import ast
import contextlib
import os
import signal

import pytest
from jupyter_client.manager import start_new_kernel
from jupyter_client.provisioning import local_provisioner

from tools import kernels

STATE = """
import os, re, sys
there = {"torch": "torch" in sys.modules, "attnmem": "attnmem" in sys.modules}
import matplotlib.pyplot, pandas, torch
print(there)
formatted = get_ipython().display_formatter.format
options = pandas.describe_option("", _print_desc=False)
print({
    "path": sys.path,
    "folder": os.getcwd(),
    "main": sys.modules["__main__"].__name__,
    "variables": {k: v for k, v in os.environ.items() if not k.startswith("JPY_")},
    "group": os.getpgid(0) == os.getpid(),
    "backend": matplotlib.get_backend(),
    "drawn": "image/png" in formatted(matplotlib.pyplot.subplots()[0])[0],
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


@contextlib.contextmanager
def kernel(folder):
    manager, client = start_new_kernel(kernel_name="python3", cwd=str(folder))
    try:
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_a_forked_kernel_is_as_a_new_one(tmp_path, monkeypatch):
    with kernel(tmp_path) as (_, client):
        plain, expected = printed(client, STATE)
    monkeypatch.setenv("MPLBACKEND", kernels.BACKEND)
    monkeypatch.setattr(local_provisioner, "launch_kernel", kernels.Kernel)
    with kernel(tmp_path) as (manager, client):
        forked, found = printed(client, STATE)
        assert plain == {"torch": False, "attnmem": False}
        assert forked == {"torch": True, "attnmem": False}
        assert found == expected
        assert found["drawn"]
        assert "20" in found["options"]  # columns of a table in a notebook, 0 in a terminal
        pid = manager.provisioner.pid
        client.execute("print('asleep'); import time; time.sleep(60)")
        while client.get_iopub_msg(timeout=60)["msg_type"] != "stream":
            pass
        manager.interrupt_kernel()
        reply = client.get_shell_msg(timeout=30)["content"]
        assert reply["ename"] == "KeyboardInterrupt"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
