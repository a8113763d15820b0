"""Which model a name stands for: a folder's content, a hub id's commit, the state of a URL's files.

A folder is known by its configuration and tokenizer, by the name, type and shape of every tensor,
and by some of its bytes. Where the folder lies, and how its tensors are spread over files, does not
count, so that a copy is the same model; gigabytes are not read. Weights that were trained again
differ in every tensor; what spares the first, middle and last kilobyte of each goes unseen.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from eagle_batch.data.chat import model_folder
from eagle_batch.data.weights import url_state
from eagle_batch.errors import ConfigError
from eagle_batch.pipeline import Pipeline
from eagle_batch.pipeline.fingerprint import COMMIT, CONTENT, STORED
from eagle_batch.pipeline.locations import is_demo, is_url

#: Files besides the weights on which texts depend.
SETTINGS = ("config.json", "generation_config.json", "*token*.json", "*.jinja", "*.model", "*.py")
VOCABULARIES = ("vocab.json", "vocab.txt", "merges.txt", "chat_template.json")
#: Weights in other formats than safetensors, which are known by their size and bytes alone.
OTHER_WEIGHTS = ("*.bin", "*.gguf", "*.pt", "*.pth")
#: Bytes that are read at one place; and places in a file whose tensors are not known.
PIECE = 1024
PLACES = 256
#: Longest header of a safetensors file, as the format has it.
MOST_HEADER = 100 << 20


def target_identity(pipeline: Pipeline) -> str:
    """Return what tells whether `target.model` is still the same; empty where its name says it.

    Raises ConfigError where there is no such model.
    """
    model = pipeline.target.model
    if is_demo(model):
        return ""
    if is_url(model):
        return STORED + url_state(model)
    folder = model_folder(model, pipeline.target.revision)
    if Path(model).is_absolute():
        return CONTENT + folder_digest(folder)
    return COMMIT + folder.name if folder.parent.name == "snapshots" else ""


def check_target(pipeline: Pipeline, planned: str) -> None:
    """Raise ConfigError where this machine finds another model than the job was planned with."""
    if planned.startswith((CONTENT, STORED)) and target_identity(pipeline) != planned:
        raise ConfigError(
            f"target.model: {pipeline.target.model} on {socket.gethostname()} holds another model "
            "than where and when the job was planned; every node needs one and the same"
        )


def folder_digest(folder: Path) -> str:
    """Return a digest of a model's folder; raises ConfigError where a file cannot be read."""
    digest = hashlib.sha256()
    try:
        for part in (*sorted(_settings(folder)), *sorted(_weights(folder))):
            digest.update(json.dumps(part).encode() + b"\n")
    except OSError as error:
        raise ConfigError(
            f"target.model: {error.filename}: cannot be read ({error.strerror})"
        ) from error
    return digest.hexdigest()


def _settings(folder: Path) -> Iterator[tuple[str, str]]:
    files = {path for pattern in (*SETTINGS, *VOCABULARIES) for path in folder.glob(pattern)}
    for path in files:
        yield path.name, hashlib.sha256(path.read_bytes()).hexdigest()


def _weights(folder: Path) -> Iterator[tuple[str, str]]:
    tensors = sorted(folder.glob("*.safetensors"))
    for path in tensors:
        with path.open("rb") as file:
            yield from _tensors(file)
    if tensors:
        return
    for path in {path for pattern in OTHER_WEIGHTS for path in folder.glob(pattern)}:
        size = path.stat().st_size
        step = max(1, size // PLACES)
        with path.open("rb") as file:
            yield path.name, f"{size} {_pieces(file, range(0, size, step))}"


def _tensors(file: BinaryIO) -> Iterator[tuple[str, str]]:
    """Yield each tensor's name, and what it is; a damaged file is for the loader to refuse."""
    size = int.from_bytes(file.read(8), "little")
    try:
        header = json.loads(file.read(min(size, MOST_HEADER)))
        for name, tensor in header.items():
            if name != "__metadata__":
                begin, end = (8 + size + int(offset) for offset in tensor["data_offsets"])
                places = (begin, max(begin, (begin + end - PIECE) // 2), max(begin, end - PIECE))
                bytes_ = _pieces(file, places, end)
                yield name, f"{tensor['dtype']} {tensor['shape']} {end - begin} {bytes_}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        yield file.name, f"damaged: {type(error).__name__}"


def _pieces(file: BinaryIO, places: range | tuple[int, ...], end: int | None = None) -> str:
    digest = hashlib.sha256()
    for place in places:
        file.seek(place)
        digest.update(file.read(PIECE if end is None else min(PIECE, end - place)))
    return digest.hexdigest()
