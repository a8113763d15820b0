"""What makes two folders the same model, and what a job does when it is another."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from eagle_batch.data.identity import folder_digest
from eagle_batch.errors import ConfigError, LedgerError
from tests.job.fake_job import Watch, load_job, run_in_process, write_job

NAMES = ["embed", "layer.0.q", "layer.1.q", "norm"]


def tensors(change: str = "") -> dict[str, np.ndarray]:
    chance = np.random.default_rng(1)
    made = {name: chance.standard_normal((64, 64), dtype=np.float32) for name in NAMES}
    if change:
        made[change] = made[change] * np.float32(1.01)
    return made


def write(folder: Path, change: str = "", *, files: int = 1) -> Path:
    """A model's folder, its tensors spread over so many files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    items = list(tensors(change).items())
    for number in range(files):
        name = f"model-{number}-of-{files}.safetensors" if files > 1 else "model.safetensors"
        save_file(dict(items[number::files]), folder / name, {"format": "pt"})
    return folder


def test_a_copy_at_another_time_and_place_is_the_same_model(tmp_path: Path) -> None:
    first = write(tmp_path / "a")
    copy = Path(shutil.copytree(first, tmp_path / "b/c"))
    for path in copy.iterdir():
        os.utime(path, (0, 0))
    assert folder_digest(copy) == folder_digest(first)


def test_tensors_in_other_files_are_the_same_model(tmp_path: Path) -> None:
    assert folder_digest(write(tmp_path / "a")) == folder_digest(write(tmp_path / "b", files=2))


def test_what_no_text_depends_on_does_not_count(tmp_path: Path) -> None:
    first = write(tmp_path / "a")
    before = folder_digest(first)
    (first / "README.md").write_text("a card")
    (first / "model.safetensors.index.json").write_text("{}")
    assert folder_digest(first) == before


def edit(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_that_was_trained_again_makes_another_model(tmp_path: Path, name: str) -> None:
    assert folder_digest(write(tmp_path / "a")) != folder_digest(write(tmp_path / "b", name))


@pytest.mark.parametrize(
    "change",
    [
        edit("config.json", '{"model_type": "llama", "rope_theta": 2.0}'),
        edit("tokenizer.json", '{"model": {}}'),
        edit("chat_template.jinja", "{{ messages }}"),
        edit("generation_config.json", '{"eos_token_id": 3}'),
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "model.safetensors").write_bytes(b"\x05\0\0\0\0\0\0\0[1,2]"),
        lambda folder: (folder / "model.safetensors").write_bytes(b"short"),
    ],
)
def test_a_change_of_a_file_makes_another_model(
    tmp_path: Path, change: Callable[[Path], object]
) -> None:
    folder = write(tmp_path / "a")
    before = folder_digest(folder)
    change(folder)
    assert folder_digest(folder) != before


def test_weights_of_other_formats_are_known_by_samples(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    (folder / "model.safetensors").unlink()
    weights = np.random.default_rng(2).bytes(3_000_000)
    (folder / "pytorch_model.bin").write_bytes(weights)
    before = folder_digest(folder)
    (folder / "pytorch_model.bin").write_bytes(bytes(b ^ 1 for b in weights))
    assert folder_digest(folder) != before


def test_a_large_folder_is_not_read(tmp_path: Path) -> None:
    """A hole of 64 GiB: to read it would take a minute."""
    folder = write(tmp_path / "a")
    header = json.dumps({"w": {"dtype": "U8", "shape": [1 << 36], "data_offsets": [0, 1 << 36]}})
    with (folder / "large.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header.encode())
        file.truncate(8 + len(header) + (1 << 36))
    assert len(folder_digest(folder)) == 64


TOPICS = ["a", "b"]


def test_a_job_whose_weights_were_trained_again_is_refused_and_a_moved_model_resumes(
    tmp_path: Path,
) -> None:
    model = write(tmp_path / "model")
    path = write_job(tmp_path / "job", TOPICS, target={"model": str(model)})
    run_in_process(load_job(path))
    moved = shutil.copytree(model, tmp_path / "elsewhere")
    assert run_in_process(load_job(path, f"target.model={moved}")).already_complete
    write(model, "norm")
    with pytest.raises(LedgerError, match=r"target\.model: another model has this name") as caught:
        run_in_process(load_job(path))
    assert str(caught.value).count("target.model") == 1


def test_a_head_is_no_part_of_the_job(tmp_path: Path) -> None:
    model = write(tmp_path / "model")
    path = write_job(tmp_path / "job", TOPICS, target={"model": str(model)})
    run_in_process(load_job(path))
    (tmp_path / "head").mkdir()
    (tmp_path / "head/config.json").write_text("{}")
    options = (f"speculation.head={tmp_path / 'head'}", "speculation.method=eagle")
    assert run_in_process(load_job(path, *options)).already_complete


def test_a_worker_whose_machine_has_another_model_ends_the_job(tmp_path: Path) -> None:
    model = write(tmp_path / "model")
    job = load_job(write_job(tmp_path / "job", TOPICS, target={"model": str(model)}))
    write(model, "embed")
    with pytest.raises(ConfigError, match="holds another model than where and when"):
        run_in_process(job, Watch())


def test_all_workers_load_the_commit_that_was_planned(tmp_path: Path) -> None:
    from dataclasses import replace

    from eagle_batch.job.spec import WorkerSpec, engine_spec
    from tests.job.fake_engine import build_fake

    job = load_job(write_job(tmp_path, TOPICS))
    plan = replace(job.plan, target="commit 0123abc")
    spec = WorkerSpec(job.pipeline, plan, 0.0, "cpu", 1, build_fake)
    assert engine_spec(spec).revision == "0123abc"
    assert engine_spec(replace(spec, plan=job.plan)).revision is None


def test_a_target_in_a_store_is_known_by_the_state_of_its_files(tmp_path: Path) -> None:
    import fsspec

    folder = write(tmp_path / "model")
    memory = fsspec.filesystem("memory")
    url = f"memory://{tmp_path.name}/model"
    memory.put(str(folder), url, recursive=True)
    path = write_job(tmp_path / "job", TOPICS, target={"model": url})
    run_in_process(load_job(path))
    assert run_in_process(load_job(path)).already_complete
    memory.pipe_file(f"{url}/model.safetensors", b"trained again")
    with pytest.raises(LedgerError, match=r"target\.model: another model has this name"):
        run_in_process(load_job(path))
