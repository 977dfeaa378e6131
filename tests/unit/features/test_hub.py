"""Files of a hub: fetched whole from a server that speaks as one does, known, refused if damaged.

Processes of their own read the server's address, since ``huggingface_hub`` does so when imported.
"""

import errno
import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest

from attnmem.features import hub

import stand_ins

COMMIT = stand_ins.COMMIT
CHUNK = 10 * 2**20  # bytes that the library stores at once
LARGE = bytes(range(256)) * 50_000
FILES = {
    "config.json": b"{}",
    "model.safetensors": LARGE,
    "pytorch_model.bin": b"a pickle",
    "data/train-00000-of-00002.parquet": LARGE[::-1],
    "data/train-00001-of-00002.parquet": b"more",
}


class OneHub(BaseHTTPRequestHandler):
    """Every repository has these files, but ``no/such`` and ``with/terms``; a line once breaks."""

    breaks: list[str]  # the files that are cut off in the middle, the next time
    asked: list[str]

    def do_GET(self):
        path = self.path.partition("?")[0]
        self.asked.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
        if "no/such" in path or ("with/terms" in path and "/resolve/" in path):
            code = "GatedRepo" if "terms" in path else "RepoNotFound"
            return self.answer(b"", 401, {"X-Error-Code": code})
        if "/tree/" in path:
            return self.answer(json.dumps([*map(self.told, FILES)]).encode())
        if "/resolve/" not in path:
            return self.answer(json.dumps({"id": "who/what", "sha": COMMIT}).encode())
        name = path.partition(f"/resolve/{COMMIT}/")[2]
        content, told = FILES[name], self.told(name)
        etag = told["lfs"]["oid"] if "lfs" in told else told["oid"]
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        if first := self.headers.get("Range", "").removeprefix("bytes=").removesuffix("-"):
            return self.answer(content[int(first) :], 206, headers)
        return self.answer(content, 200, headers, cut=name in self.breaks)

    do_HEAD = do_GET

    def answer(self, content, status=200, headers=(), cut=False):
        self.send_response(status)
        for name, value in {**dict(headers), "Content-Length": len(content)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            if cut:
                self.breaks.clear()
                content = content[: CHUNK + 1000]
                self.close_connection = True
            self.wfile.write(content)

    def log_message(self, *_):
        pass

    @staticmethod
    def told(name):
        content = FILES[name]
        oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        entry = {"type": "file", "path": name, "size": len(content), "oid": oid}
        if not name.endswith(".json"):
            digest = hashlib.sha256(content).hexdigest()
            entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 130}
        return entry


@pytest.fixture
def server():
    handler = type("Hub", (OneHub,), {"breaks": ["model.safetensors"], "asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        yield handler, f"http://127.0.0.1:{served.server_port}"
        served.shutdown()
        thread.join()


ASKS = """
import sys
from attnmem.features import hub
for name in sys.argv[1:]:
    try:
        print("model", hub.model(name))
        print("data", hub.dataset(name, "data/train-00000-*.parquet"))
    except OSError as error:
        print(type(error).__name__, error)
"""


def ask(home, *names, **environment):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    command = [sys.executable, "-c", ASKS, *names]
    options = {"env": kept | {"HF_HOME": str(home)} | environment, "text": True}
    done = subprocess.run(command, capture_output=True, check=True, **options)
    return done.stdout.splitlines()


def test_a_hub_is_fetched_from_once(server, tmp_path):
    handler, address = server
    names = ("who/what", "with/terms", "no/such")
    model, data, terms, unknown = ask(tmp_path, *names, HF_ENDPOINT=address)
    large = {name: hashlib.sha256(FILES[name]).hexdigest() for name in FILES}
    assert model == f"model who/what@{COMMIT} model.safetensors={large['model.safetensors']}"
    one = "data/train-00000-of-00002.parquet"
    assert data == f"data who/what@{COMMIT} {one}={large[one]}", "and no other file of the data"
    assert terms.startswith("PermissionError with/terms has terms: accept them on the hub's page")
    assert unknown.startswith("ConnectionError the hub knows no model no/such")
    whole = f"GET /who/what/resolve/{COMMIT}/model.safetensors"
    again = [line for line in handler.asked if line.startswith(whole)]
    assert again == [whole, f"{whole} bytes={CHUNK}-"], "it goes on where the line broke"
    assert not any("pytorch_model" in line or "00001-of" in line for line in handler.asked)
    handler.asked.clear()
    *before, missing = ask(tmp_path, *names[:1], "who/else", HF_HUB_OFFLINE="1")
    assert (before, handler.asked) == ([model, data], [])
    assert missing.startswith(f"ConnectionError the model who/else is not whole in {tmp_path}")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "files"
    (folder / "data").mkdir(parents=True)
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    stand_ins.into_cache(tmp_path, "model", "who/what", folder)
    stand_ins.into_cache(tmp_path, "dataset", "who/what", folder)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_damaged_files_are_refused(name, cache):
    assert set(hub.model("who/what").digests) == {"config.json", "model.safetensors"}
    [path] = cache.glob(f"models--*/snapshots/*/{name}")
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    hub._fetched.cache_clear()
    with pytest.raises(ValueError, match=rf"{name} is damaged: delete \S+{path.resolve().name}"):
        hub.model("who/what")


def test_missing_files_are_named(cache):
    Path(next(cache.glob("models--*/snapshots/*/model.safetensors"))).unlink()
    with pytest.raises(ConnectionError, match=r"who/what is not whole .*model.safetensors is miss"):
        hub.model("who/what")


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No room"), RuntimeError("I/O: No space left on device (os error 28)")],
)
def test_a_full_disk_is_said(error, cache, monkeypatch):
    def download(*_, **__):
        raise RuntimeError("in a thread") from error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(OSError, match=rf"no space is left for who/new in {cache}") as raised:
        hub.model("who/new")
    assert raised.value.errno == errno.ENOSPC
