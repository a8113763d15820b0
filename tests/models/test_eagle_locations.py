"""A head is found in a folder, behind a URL, in the wheel or on the hub; nowhere is an error."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest
import torch

from eagle_batch.errors import HeadError
from eagle_batch.models.checkpoints import load_head
from eagle_batch.models.headfiles import resolve_head
from tests.models import tiny_heads as tiny


def upload(folder: Path, url: str) -> None:
    fs, root = fsspec.core.url_to_fs(url)
    fs.makedirs(root, exist_ok=True)
    for path in folder.iterdir():
        fs.put_file(str(path), f"{root}/{path.name}")


def fc_of(url: str) -> torch.Tensor:
    head = load_head(url, dtype=torch.float32, device="cpu", target_layers=12)
    return head.get_parameter("fc.weight")


def test_a_url_is_copied_once_and_again_when_its_files_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_BATCH_CACHE", str(tmp_path / "cache"))
    url = (tmp_path / "store").as_uri()
    first, second = tiny.eagle3(0), tiny.eagle3(1)
    upload(Path(first.write(tmp_path / "first")), url)
    assert torch.equal(fc_of(url), first.tensors["fc.weight"])
    copied = resolve_head(url)
    assert copied == resolve_head(url)
    assert copied.is_relative_to(tmp_path / "cache")
    upload(Path(second.write(tmp_path / "second")), url)
    assert torch.equal(fc_of(url), second.tensors["fc.weight"])


def test_a_url_without_files_or_protocol_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_BATCH_CACHE", str(tmp_path / "cache"))
    with pytest.raises(HeadError, match="cannot be read"):
        resolve_head((tmp_path / "nothing").as_uri())
    with pytest.raises(HeadError, match="cannot be read"):
        resolve_head("nosuchprotocol://bucket/head")


def test_an_unknown_shipped_head_names_those_there_are() -> None:
    with pytest.raises(HeadError, match="no such head is shipped"):
        resolve_head("demo:nothing")


def test_the_shipped_head_loads_and_fits_its_target() -> None:
    head = load_head("demo:smollm2-135m-instruct", dtype=torch.float32, device="cpu")
    assert head.config.aux_layers == (2, 15, 27)
    assert head.draft_to_target is not None
    assert len(head.draft_to_target) == head.config.draft_vocab
    weight = torch.zeros(49152, 576)
    head.bind(weight, weight)


def test_a_hub_that_does_not_answer_is_an_error_about_the_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*_args: object, **_options: object) -> str:
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(HeadError, match="someone/head"):
        resolve_head("someone/head")
