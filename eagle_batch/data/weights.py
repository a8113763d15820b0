"""Models that are not in a folder: fetched once for each node, however many workers start there.

A hub id or a URL (`s3://bucket/models/mine`) becomes a folder of the node's cache. The first
process that asks fetches; the others wait for it at a lock and take what is there, so that neither
hub nor store is asked for the same file twice by one node.
"""

from __future__ import annotations

import fnmatch
import hashlib
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from eagle_batch.errors import ConfigError
from eagle_batch.folders import cache_folder

#: Files of a target that are read, wherever it comes from.
TARGET_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken")
#: Seconds for which one answer of the hub is good for all processes of a node.
FRESH_S = 600.0


def fetch_url(url: str, patterns: Sequence[str] = TARGET_FILES) -> Path:
    """Return the node's copy of a remote folder's files; made once for each state of them.

    Raises ConfigError where the folder cannot be read or holds none of those files.
    """
    fs, names, state = _look(url, patterns)
    final = cache_folder() / "targets" / state
    with node_lock(final.name):
        if not final.is_dir():
            _copy(fs, names, final, url)
    return final


def url_state(url: str) -> str:
    """Return a digest of the state of a remote folder's files, by what its store tells of them.

    Raises ConfigError as `fetch_url` does.
    """
    return _look(url, TARGET_FILES)[2]


def _look(url: str, patterns: Sequence[str]) -> tuple[object, list[str], str]:
    """Return the filesystem, the files that are wanted, and a digest of their state."""
    import fsspec

    try:
        fs, root = fsspec.core.url_to_fs(url)
        names = sorted(name for name in fs.ls(root, detail=False) if _is_wanted(name, patterns))
        state = "\n".join([url, *patterns, *(f"{name} {fs.ukey(name)}" for name in names)])
    except (OSError, ImportError, ValueError) as error:
        raise ConfigError(f"{url}: cannot be read: {error}") from error
    if not names:
        raise ConfigError(f"{url}: found no file of a model; expected config.json and safetensors")
    return fs, names, _digest(state)


def _copy(fs: object, names: Sequence[str], final: Path, url: str) -> None:
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{final.name}.", dir=final.parent))
    try:
        for name in names:
            fs.get_file(name, str(partial / Path(name).name))  # type: ignore[attr-defined]
        partial.rename(final)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ConfigError(f"{url}: cannot be copied to {final.parent}: {error}") from error


def fetch_hub(model: str, revision: str | None, patterns: Sequence[str] = TARGET_FILES) -> Path:
    """Return the folder of a hub id in the hub's own cache; raises what the hub's client raises."""
    from huggingface_hub import snapshot_download

    name = _digest(f"{model}@{revision} {patterns}")
    with node_lock(name):
        answer = cache_folder() / "locks" / f"{name}.answer"
        found = _fresh(answer)
        if found is None:
            found = Path(snapshot_download(model, revision=revision, allow_patterns=list(patterns)))
            answer.write_text(str(found), "utf-8")
        return found


def _fresh(answer: Path) -> Path | None:
    """Return the folder that another process of this node was given a moment ago."""
    try:
        recent = time.time() - answer.stat().st_mtime < FRESH_S
        folder = Path(answer.read_text("utf-8"))
    except FileNotFoundError:
        return None
    return folder if recent and folder.is_dir() else None


@contextmanager
def node_lock(name: str) -> Iterator[None]:
    """Let one process of this node in at a time; released when its holder dies."""
    from filelock import FileLock

    folder = cache_folder() / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"{name}.lock"):
        yield


def _is_wanted(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(Path(name).name, pattern) for pattern in patterns)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
