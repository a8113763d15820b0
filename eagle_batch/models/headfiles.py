"""Finds the files of a head and reads them: folder, URL or hub id; safetensors or torch archives.

Knows nothing of layouts: what comes out is the configuration and the tensors as they were written.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_batch.errors import HeadError
from eagle_batch.folders import cache_folder

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_SHIPPED = Path(__file__).parent.parent / "shipped"


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """A head as it lies on disk; `source` names the file that messages point to."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    source: str


def resolve_head(path: str) -> Path:
    """Return the local folder of a head: a folder, `demo:<name>`, an fsspec URL or a hub id.

    Raises HeadError where nothing is found under that name.
    """
    if path.startswith("demo:"):
        return _shipped(path.removeprefix("demo:"))
    if "://" in path:
        return _download(path)
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or not _HUB_ID.fullmatch(path):
        raise HeadError(
            f"{path}: not a folder; a head is a folder with config.json and model.safetensors, "
            "a URL of such a folder, or a hub id `owner/name`"
        )
    return _from_hub(path)


def _shipped(name: str) -> Path:
    for folder in (_SHIPPED / name, _SHIPPED / f"{name}-eagle3"):
        if (folder / "config.json").is_file():
            return folder
    known = sorted(p.parent.name for p in _SHIPPED.glob("*/config.json"))
    raise HeadError(f"demo:{name}: no such head is shipped; there are {known}")


def _download(url: str) -> Path:
    """Copy a remote folder under the user's cache, once for each state of its files."""
    import fsspec

    cache = cache_folder() / "heads"
    try:
        fs, root = fsspec.core.url_to_fs(url)
        names = sorted(
            str(name)
            for name in fs.ls(root, detail=False)
            if str(name).endswith((".json", ".safetensors", ".bin"))
        )
        state = "\n".join([url, *(f"{name} {fs.ukey(name)}" for name in names)])
        final = cache / hashlib.sha256(state.encode()).hexdigest()[:16]
        if final.is_dir():
            return final
        cache.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{final.name}.", dir=cache))
        for name in names:
            fs.get_file(name, str(partial / Path(name).name))
    except (OSError, ImportError, ValueError) as error:
        raise HeadError(f"{url}: cannot be read: {error}") from error
    try:
        partial.rename(final)
    except OSError:  # another process was first; its copy is as good
        shutil.rmtree(partial)
    return final


def _from_hub(name: str) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            huggingface_hub.snapshot_download(
                name, allow_patterns=["*.json", "*.safetensors", "*.bin"]
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise HeadError(
            f"{name}: neither a local folder nor a head that the hub gives us: {error}"
        ) from error


def read_files(folder: Path) -> HeadFiles:
    """Read config.json and all weights of a head; raises HeadError naming the damaged file."""
    config = _read_json(folder / "config.json")
    for name in _WEIGHTS:
        if (folder / name).is_file():
            return HeadFiles(folder, config, read_tensors(folder / name), str(folder / name))
        if (folder / f"{name}.index.json").is_file():
            tensors = _read_parts(folder / f"{name}.index.json")
            return HeadFiles(folder, config, tensors, str(folder / f"{name}.index.json"))
    raise HeadError(f"{folder}: holds no weights; expected one of {', '.join(_WEIGHTS)}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise HeadError(f"{path}: not found; a head needs its config.json") from None
    except (OSError, ValueError) as error:
        raise HeadError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise HeadError(f"{path}: holds a {type(value).__name__}, expected an object")
    return value


def _read_parts(index: Path) -> dict[str, Tensor]:
    """Read a sharded checkpoint; its index must list exactly what the parts hold."""
    listed = _read_json(index).get("weight_map")
    if not isinstance(listed, dict):
        raise HeadError(f"{index}: has no weight_map; expected one that maps tensors to files")
    tensors: dict[str, Tensor] = {}
    for part in sorted(set(listed.values())):
        tensors |= read_tensors(index.parent / Path(part).name)
    if set(tensors) != set(listed):
        different = sorted(set(tensors) ^ set(listed))
        raise HeadError(f"{index}: does not match its parts; they differ in {different}")
    return tensors


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read one weights file without executing anything in it; raises HeadError when damaged."""
    if path.suffix == ".safetensors":
        return _guarded(path, _read_safetensors)
    return _guarded(path, _read_archive)


def _guarded(path: Path, read: Callable[[Path], dict[str, Tensor]]) -> dict[str, Tensor]:
    from safetensors import SafetensorError

    try:
        tensors = read(path)
    except (SafetensorError, OSError, RuntimeError, EOFError, ValueError) as error:
        raise HeadError(f"{path}: damaged or truncated: {error}; fetch the file again") from error
    except pickle.UnpicklingError as error:
        raise HeadError(f"{path}: not a plain file of tensors, refused: {error}") from error
    if not tensors:
        raise HeadError(f"{path}: holds no tensors")
    return tensors


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def _read_archive(path: Path) -> dict[str, Tensor]:
    value = torch.load(path, map_location="cpu", weights_only=True)
    if isinstance(value, dict) and isinstance(value.get("state_dict"), dict):
        value = value["state_dict"]
    if not isinstance(value, dict) or not all(isinstance(t, Tensor) for t in value.values()):
        raise ValueError("holds something other than named tensors")
    return value
