"""Models of the hub or a store: one request of a node, however many workers start at once."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from eagle_batch.data import weights
from eagle_batch.data.weights import fetch_hub, fetch_url
from eagle_batch.errors import ConfigError

#: A worker's start, with a store that notes what is asked of it and is slow to answer.
CHILD = """
import sys, time, fsspec
from fsspec.implementations.local import LocalFileSystem
class Noted(LocalFileSystem):
    protocol = "noted"
    def get_file(self, rpath, lpath, **kwargs):
        with open(sys.argv[2], "a") as notes:
            notes.write(rpath + "\\n")
        time.sleep(0.3)
        super().get_file(rpath, lpath, **kwargs)
    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("noted://"))
fsspec.register_implementation("noted", Noted)
from eagle_batch.data.weights import fetch_url
print(fetch_url("noted://" + sys.argv[1]))
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EAGLE_BATCH_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "training.log").write_text("long")
    return folder


def test_workers_that_start_together_copy_each_file_once(model: Path, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(model), str(notes)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    folders = {child.communicate(timeout=60)[0].strip() for child in children}
    assert len(folders) == 1
    assert sorted(notes.read_text().split()) == [
        str(model / "config.json"),
        str(model / "model.safetensors"),
    ]
    (folder,) = map(Path, folders)
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert not (folder / "training.log").exists()


def test_changed_weights_are_another_copy(model: Path) -> None:
    first = fetch_url(f"file://{model}")
    assert fetch_url(f"file://{model}") == first
    (model / "model.safetensors").write_bytes(b"other weights")
    second = fetch_url(f"file://{model}")
    assert second != first
    assert (second / "model.safetensors").read_bytes() == b"other weights"


def test_a_folder_that_is_no_model_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="found no file of a model"):
        fetch_url(f"file://{tmp_path}/empty")
    with pytest.raises(ConfigError, match="nowhere: cannot be read"):
        fetch_url(f"file://{tmp_path}/nowhere")


def test_the_hub_is_asked_once_a_node_and_again_later(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def snapshot_download(name: str, **options: Any) -> str:
        asked.append(name)
        return str(model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    threads = [threading.Thread(target=fetch_hub, args=("owner/name", None)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert asked == ["owner/name"]
    assert fetch_hub("owner/name", "v2") == model
    assert len(asked) == 2, "another revision is another question"
    monkeypatch.setattr(weights, "FRESH_S", 0.0)
    fetch_hub("owner/name", None)
    assert len(asked) == 3, "an old answer is not good for ever"
