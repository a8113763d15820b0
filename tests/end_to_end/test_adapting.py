"""A head that a job trains for itself: the same text, a better draft, a head for the next job."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from eagle_batch.engine.testing import byte_tokenizer, tiny_model
from eagle_batch.job import adapting
from eagle_batch.job.adapting import Round, Text
from eagle_batch.job.driver import run_job
from eagle_batch.job.heads import TrainingJob
from eagle_batch.job.job import Job, JobResult, SizedPool
from eagle_batch.job.ray_trainer import RayTrainer
from eagle_batch.job.reports import Failure
from eagle_batch.job.session import ray_session
from eagle_batch.job.spec import WorkerSpec, build_real_engine
from eagle_batch.job.verify import verify
from eagle_batch.training import online
from eagle_batch.training.learnt import Learnt
from tests.job.fake_job import CrashError, InProcessPool, Watch, load_job

ROWS = 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target and rows for it."""
    folder = tmp_path_factory.mktemp("adapt")
    tokenizer = byte_tokenizer()
    tiny_model(vocab=len(tokenizer), layers=8).save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    rows = {"id": [f"r{n}" for n in range(ROWS)], "word": [f"{n * n % 97}" for n in range(ROWS)]}
    pq.write_table(pa.table(rows), folder / "in.parquet")
    return folder


def write(folder: Path, out: Path, adapt: object, **speculation: Any) -> Path:
    document = {
        "name": "adapting",
        "input": {"path": "in.parquet", "id": "id"},
        "target": {"model": "target", "context": 128},
        "speculation": {"adapt": adapt, "nodes": 6, "depth": 3, **speculation},
        "stages": [
            {"name": "one", "prompt": "{{ word }}", "sampling": {"max_tokens": 24}},
            {
                "name": "two",
                "prompt": "{{ one }}",
                "sampling": {"max_tokens": 16, "temperature": 0.8},
            },
        ],
        "engine": {"slots": 4, "threads": 1},
        "workers": {"count": 1, "gpus": 0},
        "output": {"path": str(out), "rows_per_shard": 8},
    }
    path = folder / f"{out.name}.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def texts(out: Path) -> list[dict[str, Any]]:
    files = sorted((out / "data").glob("*.parquet"))
    columns = ["id", "one", "two"]
    return [row for file in files for row in pq.read_table(file, columns=columns).to_pylist()]


class Inline:
    """A trainer in this process that takes the time it needs."""

    def __init__(self, job: Job) -> None:
        spec = WorkerSpec(job.pipeline, job.plan, 0.0, "cpu", 1, build_real_engine)
        self._job = TrainingJob(spec)
        self._due: Learnt | Failure | None = None

    def begin(self, work: Round) -> None:
        self._due = self._job.round(replace(work, seconds=60.0))

    def poll(self) -> Learnt | Failure | None:
        due, self._due = self._due, None
        return due

    def close(self) -> None:
        pass


def run(path: Path, watch: Watch | None = None, **options: Any) -> JobResult:
    job = load_job(path)

    def make_pool(started: float) -> SizedPool:
        return InProcessPool(job.pipeline, job, started, build=build_real_engine, **options)

    return run_job(job, make_pool, watch or Watch(), make_trainer=lambda _started: Inline(job))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job is over in seconds, and what a tiny random target writes nobody can learn."""
    monkeypatch.setattr(adapting, "LEAST_S", 0.0)
    monkeypatch.setattr(online, "LEAST", 0.0)
    monkeypatch.setattr(online, "MORE", 0.0)


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[dict[str, Any]]:
    """The texts without any draft."""
    run(write(folder, folder / "plain", None, method="none"))
    return texts(folder / "plain")


BUDGET = {"share": 1.0, "tokens": 200}


@pytest.mark.usefixtures("quick")
def test_a_head_is_trained_switched_in_and_leaves_no_trace_in_the_text(
    folder: Path, tmp_path: Path, plain: list[dict[str, Any]]
) -> None:
    result = run(write(folder, tmp_path / "adapt", BUDGET))
    assert texts(tmp_path / "adapt") == plain
    assert verify(str(tmp_path / "adapt")).ok
    assert result.metrics is not None
    events = result.metrics["adaptation"]["events"]
    assert [event["kind"] for event in events] == ["switch"] * len(events)
    assert len(events) >= 2
    assert events[0]["before"] is None
    trees = [name for name, _ in result.metrics["engine"]["passes_by_shape"] if ",4," in name]
    assert trees, "n-grams draft no trees: the head never drafted"
    card = (tmp_path / "adapt/head/README.md").read_text("utf-8")
    assert f"head: {tmp_path}/adapt/head" in card

    # The next job begins with the head, and improves it.
    again = run(write(folder, tmp_path / "next", BUDGET, head=str(tmp_path / "adapt/head")))
    assert texts(tmp_path / "next") == plain
    assert again.metrics is not None
    assert again.metrics["adaptation"]["events"][0]["before"] is not None


@pytest.mark.usefixtures("quick")
def test_a_worker_that_dies_after_a_switch_costs_no_row(
    folder: Path, tmp_path: Path, plain: list[dict[str, Any]]
) -> None:
    watch, crashes = Watch(), iter([True])

    def sabotage(worker: int, pump: int) -> None:
        switched = any("is used from now on" in line for line in watch.lines)
        if switched and worker == 0 and next(crashes, False):
            raise CrashError

    run(write(folder, tmp_path / "died", BUDGET), watch, sabotage=sabotage)
    assert texts(tmp_path / "died") == plain
    assert [line for line in watch.lines if "was lost" in line]
    assert not [line for line in watch.lines if "is not used" in line]


def waited(trainer: RayTrainer, seconds: float = 120.0) -> Learnt | Failure:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = trainer.poll()
        if found is not None:
            return found
        time.sleep(0.1)
    raise AssertionError("the trainer does not answer")


@pytest.mark.slow
def test_on_ray_the_trainer_is_a_process_of_its_own(folder: Path, tmp_path: Path) -> None:
    """It learns, says what it cannot do, and its end is told and no more than that."""
    job = load_job(write(folder, tmp_path / "ray", BUDGET))
    spec = WorkerSpec(job.pipeline, job.plan, 0.0, "cpu", 1, build_real_engine)
    some = tuple(Text.of(range(5, 5 + n % 4), range(40, 60)) for n in range(30))
    with ray_session(job.pipeline.workers, 1, print, beside={"CPU": 1.0}):
        trainer = RayTrainer(spec, cpus=1, gpus=0.0)
        trainer.begin(Round(some[:1], 1.0))
        refused = waited(trainer)
        assert isinstance(refused, Failure)
        assert refused.message.startswith("1 texts are too few")
        trainer.begin(Round(some, 2.0))
        found = waited(trainer)
        assert isinstance(found, Learnt)
        assert (found.before, found.tokens > 400) == (None, True)
        assert found.used == (tmp_path / "ray/head/model.safetensors").exists()
        trainer.close()
        trainer.begin(Round(some, 1.0))
        gone = waited(trainer)
        assert isinstance(gone, Failure)
        assert gone.message.startswith("its process is gone")
