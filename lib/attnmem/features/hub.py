"""Files of a hub: fetched by its own library, and known by the hub's commit and by digests.

They lie in the cache of ``huggingface_hub``, which ``HF_HOME`` moves. A line that breaks is taken
up again; after a kill every whole file is kept. What is there needs no hub any more, so who reaches
one for an hour fetches first, and computes later or elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..checks import need

_MODEL = ("config.json", "model.safetensors")  # no code, no pickle
_TOKENIZER = ("tokenizer*.json", "vocab.*", "merges.txt", "special_tokens_map.json")
_LARGE = (".safetensors", ".parquet")  # files that a row names with their digests
_SMALL = 2**25  # bytes; what is larger has no name from git
_FULL = "no space left"  # how every library says so


class Fetched(NamedTuple):
    """Files of one repository of a hub, as they lie in the cache."""

    name: str
    commit: str  # of the repository, as the cache names it
    folder: Path
    digests: dict[str, str]  # of each file, by its path in the folder: SHA-256

    def __str__(self) -> str:
        """What a row says of it: small files follow from the commit, of large ones the digest."""
        words = [f"{self.name}@{self.commit}"]
        for path, digest in self.digests.items():
            if path.endswith(_LARGE):
                words.append(f"{path}={digest}")
        return " ".join(words)


def model(name: str) -> Fetched:
    """The configuration and the weights of a model, and its tokenizer, if it has one."""
    return _fetched(name, "model", _MODEL, _TOKENIZER, _cache())


def dataset(name: str, files: str) -> Fetched:
    """Those files of a data set that fit a pattern."""
    return _fetched(name, "dataset", (files,), (), _cache())


def _cache() -> str:
    return str(need("huggingface_hub.constants").HF_HUB_CACHE)


@functools.cache  # asked for again by every test of the same features
def _fetched(
    name: str, kind: str, needed: tuple[str, ...], useful: tuple[str, ...], cache: str
) -> Fetched:
    """The files of a repository that fit patterns; what the cache lacks is fetched.

    The hub says what the digest of each file is, and the cache calls the file so: a file of another
    one is refused. ``ConnectionError`` if the hub is out of reach and the cache lacks a file,
    ``PermissionError`` if its terms are to be accepted first.
    """
    patterns = [*needed, *useful]
    with _in_one_line(name, kind, cache):
        folder = need("huggingface_hub").snapshot_download(
            name, repo_type=kind, allow_patterns=patterns, cache_dir=cache
        )
        folder = Path(folder)
        for pattern in needed:
            if not any(folder.glob(pattern)):
                raise FileNotFoundError(f"{pattern} is missing")
    paths = sorted({path for pattern in patterns for path in folder.glob(pattern)})
    digests = {path.relative_to(folder).as_posix(): _digest(path) for path in paths}
    return Fetched(name, folder.name, folder, digests)


@contextlib.contextmanager
def _in_one_line(name: str, kind: str, cache: str) -> Iterator[None]:
    """What a person has to do, in place of the many errors of a download."""
    errors = need("huggingface_hub.errors")
    try:
        yield
    except errors.GatedRepoError as error:
        steps = f"accept them on the hub's page of the {kind} {name}, logged in"
        token = "give this machine a token that may read it (`hf auth login`, or HF_TOKEN)"
        again = "some are granted at once, some after a while"
        message = f"{name} has terms: {steps}, and {token}; {again}, then run this again"
        raise PermissionError(message) from error
    except errors.RepositoryNotFoundError as error:
        reason = f"the hub knows no {kind} {name} that it may show you"
        raise ConnectionError(f"{reason}: look at its name, and at your token") from error
    except Exception as error:  # the library raises a dozen kinds, of its own and of others
        if _is_full(error):
            message = f"no space is left for {name} in {cache}: make room, or name a folder of "
            message += "another disk in HF_HOME; a new run goes on from what is there"
            raise OSError(errno.ENOSPC, message) from error
        reason = " ".join(str(error).split())[:120]
        remedy = "a new run goes on from what is there; without a network, copy the cache of a "
        remedy += f"machine that has it, and name its folder in HF_HOME ({reason})"
        message = f"the {kind} {name} is not whole in {cache}, and no hub gives it: {remedy}"
        raise ConnectionError(message) from error


def _is_full(error: BaseException | None) -> bool:
    """Whether an error, or what led to it, says that a disk is full."""
    while error is not None:
        if getattr(error, "errno", None) == errno.ENOSPC or _FULL in str(error).lower():
            return True
        error = error.__cause__ or error.__context__
    return False


def _digest(path: Path) -> str:
    """The SHA-256 of a file; refused if the hub named the file by another digest."""
    blob = path.resolve()
    with open(blob, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    found = {64: digest}  # by the length of the name
    if (size := blob.stat().st_size) < _SMALL:  # as git does
        found[40] = hashlib.sha1(b"blob %d\0" % size + blob.read_bytes()).hexdigest()
    is_digest = not blob.name.strip("0123456789abcdef")  # else the cache has no links
    if is_digest and found.get(len(blob.name), blob.name) != blob.name:
        raise ValueError(f"{path} is damaged: delete {blob}, and run this again to fetch it")
    return digest
