"""What travels to a cluster with a submission: pipeline, local files, modules, package versions."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from eagle_batch.data.contamination import given_files
from eagle_batch.data.files import FoundFile
from eagle_batch.data.finding import WHOLE, Choice, find_files
from eagle_batch.data.hub import is_data_set
from eagle_batch.errors import ConfigError
from eagle_batch.job import launch
from eagle_batch.pipeline import Pipeline
from eagle_batch.pipeline.fingerprint import resolved
from eagle_batch.pipeline.locations import is_demo, is_url
from eagle_batch.pipeline.modules import places

#: Packages on which texts depend.
PACKAGES = (launch.OURS, "ray", "torch", "transformers", "tokenizers", "llguidance")
#: Ray refuses a working directory of more than 500 MiB.
MOST_BYTES = 400 << 20
#: Arguments of Python that run a pipeline.
COMMAND = ("-m", "eagle_batch", "submit")


@dataclass(frozen=True, slots=True)
class Parcel:
    """A folder that is ready to travel."""

    folder: Path
    output: str
    name: str
    #: Digest of the pipeline and its input: the same for the same work.
    digest: str
    #: What the user should know about paths that do not travel.
    notes: tuple[str, ...]


def pack(pipeline: Pipeline, folder: Path, command: Sequence[str] = COMMAND) -> Parcel:
    """Fill an empty folder; raises DataError about the input, ConfigError about its size."""
    # Paths in a store stay: the cluster may be the only one that can read them.
    patterns = [path for path in pipeline.input.path if not is_url(path)]
    choice = _choice(pipeline)
    local = find_files(patterns, pipeline.input.format, choice) if patterns else ()
    against = _against(pipeline)
    _refuse_too_much([*local, *against])
    travelling = _names(local, "input") | _names(against, "against")
    for path, name in travelling.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
    document = resolved(pipeline)
    document["input"]["path"] = _paths(pipeline, travelling)
    if pipeline.decontaminate is not None:
        known = pipeline.decontaminate.against
        document["decontaminate"]["against"] = _travelled(known, "auto", travelling)
    if not any(is_data_set(path) for path in pipeline.input.path):
        document["input"]["split"] = None  # The files of the split travel, and no others.
    text = json.dumps(document, sort_keys=True)
    (folder / "pipeline.yaml").write_text(text, encoding="utf-8")
    manifest = {
        "versions": _versions(),
        "command": list(command),
        "changed": {name: Path(path).stat().st_mtime_ns for path, name in travelling.items()},
    }
    (folder / launch.MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    shutil.copy(launch.__file__, folder / "launch.py")
    tags = [file.tag for file in (*local, *against)] + _copy_modules(pipeline, folder)
    digest = hashlib.sha256(json.dumps([document, tags], sort_keys=True).encode()).hexdigest()[:32]
    return Parcel(folder, pipeline.output.path, pipeline.name, digest, _notes(pipeline))


def _paths(pipeline: Pipeline, travelling: dict[str, str]) -> list[str]:
    """Return `input.path` as it is in the parcel."""
    form, choice = pipeline.input.format, _choice(pipeline)
    return _travelled(pipeline.input.path, form, travelling, choice)


def _travelled(
    patterns: Sequence[str], form: str, travelling: dict[str, str], choice: Choice = WHOLE
) -> list[str]:
    """Return paths as they are in the parcel, in the order of the pipeline."""
    paths: list[str] = []
    for pattern in patterns:
        if is_url(pattern):
            paths.append(pattern)
        else:
            paths += (travelling[file.path] for file in find_files([pattern], form, choice))
    return list(dict.fromkeys(paths))


def _against(pipeline: Pipeline) -> Sequence[FoundFile]:
    """Return the local files that texts are compared with; raises ConfigError where one is not."""
    section = pipeline.decontaminate
    patterns = () if section is None else section.against
    return given_files([path for path in patterns if not is_url(path)])


def _copy_modules(pipeline: Pipeline, folder: Path) -> list[str]:
    """Put the user's own modules beside the pipeline file; return a digest of each file."""
    digests = []
    for name, place in places(pipeline).items():
        if place.is_dir():
            shutil.copytree(place, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(place, folder / place.name)
        files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
        digests += [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    return digests


def _choice(pipeline: Pipeline) -> Choice:
    return Choice(pipeline.input.config, pipeline.input.split, pipeline.input.revision)


def _refuse_too_much(files: Sequence[FoundFile]) -> None:
    size = sum(file.size for file in files)
    if size > MOST_BYTES:
        raise ConfigError(
            f"input.path: found {size >> 20} MiB of local files; at most {MOST_BYTES >> 20} MiB "
            "travel with a submission; put them where all nodes can read them (s3://, gs://, az://)"
        )


def _names(files: Sequence[FoundFile], folder: str) -> dict[str, str]:
    """Return the name of each file in the parcel; their places to each other stay as they are."""
    if not files:
        return {}
    parents = [str(Path(file.path).parent) for file in files]
    common = os.path.commonpath(parents)
    return {
        file.path: f"{folder}/{Path(file.path).relative_to(common).as_posix()}" for file in files
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _notes(pipeline: Pipeline) -> tuple[str, ...]:
    places = {
        "target.model": pipeline.target.model,
        "speculation.head": pipeline.speculation.head,
        "speculation.draft": pipeline.speculation.draft,
        "output.path": pipeline.output.path,
    }
    return tuple(
        f"{key}: {path} does not travel; it is taken for a folder that every node has"
        for key, path in places.items()
        if path is not None and not is_url(path) and not is_demo(path) and Path(path).is_absolute()
    )
