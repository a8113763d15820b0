"""A full memory halves the slots; the rows come out as if nothing had happened."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eagle_batch.engine.request import Completion, EngineSpec, Request, SamplingParams
from eagle_batch.job.elastic import ElasticEngine, is_out_of_memory
from eagle_batch.job.spec import EngineFactory
from eagle_batch.job.verify import verify
from tests.job.fake_engine import FakeEngine
from tests.job.fake_job import Watch, expected_rows, load_job, read_rows, run_in_process, write_job

TOPICS = [f"topic {n}" for n in range(20)]


class OutOfMemoryError(RuntimeError):
    """As torch.cuda has one, by name."""


FULL = [
    OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nand a page of advice"),
    MemoryError(),
    RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate"),
]


class Small(FakeEngine):
    """An engine whose memory is full with more than `fits` rows in slots."""

    fits = 2
    error: Exception
    at_build: bool
    living: weakref.WeakSet[FakeEngine]

    def __init__(self, spec: EngineSpec) -> None:
        gc.collect()
        assert not self.living, "two engines at once hold the memory twice"
        if self.at_build and spec.slots > self.fits:
            self.fill()
        super().__init__(spec)
        self.living.add(self)

    def step(self) -> list[Completion]:
        done = super().step()
        if len(self._active) > self.fits or not self.fits:
            self.fill()
        return done

    def fill(self) -> None:
        """A new exception each time: its frames, which hold this engine, go with it."""
        raise type(self.error)(*self.error.args)


def small(error: Exception, *, fits: int = 2, at_build: bool = False) -> EngineFactory:
    fields = {
        "error": error,
        "fits": fits,
        "at_build": at_build,
        "living": weakref.WeakSet(),
    }
    return type("Kind", (Small,), fields)


@pytest.mark.parametrize("at_build", [False, True])
@pytest.mark.parametrize("error", FULL, ids=lambda error: type(error).__name__)
def test_a_full_memory_halves_the_slots_and_changes_no_row(
    tmp_path: Path, error: Exception, at_build: bool
) -> None:
    job = load_job(write_job(tmp_path, TOPICS, engine={"slots": 8}))
    watch = Watch()
    result = run_in_process(job, watch, build=small(error, at_build=at_build))
    assert read_rows(tmp_path / "out") == expected_rows(TOPICS)
    assert verify(str(tmp_path / "out")).ok
    said = [line for line in watch.lines if "out of memory" in line]
    assert [line.partition(" slots")[0].rpartition(" ")[2] for line in said] == ["4", "2"]
    assert all(line.startswith("worker 0: ") and "\n" not in line for line in said)
    assert not any("lost" in line for line in watch.lines)
    assert result.metrics is not None
    [worker] = result.metrics["workers"]
    assert worker["slots"] == 2
    assert len(worker["notices"]) == 2


def test_one_slot_that_does_not_fit_loses_the_worker(tmp_path: Path) -> None:
    path = write_job(tmp_path, TOPICS[:1], samples=1, limits={"max_error_rate": 1.0})
    watch = Watch()
    job = load_job(path, "limits.shard_attempts=1")
    result = run_in_process(job, watch, build=small(MemoryError(), fits=0))
    assert (result.rows, result.quarantined) == (0, 1)
    assert any("was lost" in line for line in watch.lines)


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: an illegal access"), ValueError("x")])
def test_another_error_is_no_full_memory(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_a_real_allocation_that_cannot_be_is_known() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize("where", ["device", "host"])
def test_a_forward_that_runs_out_of_memory_halves_a_real_engine_and_changes_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The target's own forward pass raises what torch and Python raise, with more than two rows."""
    import torch

    from eagle_batch.engine.build import build_engine
    from eagle_batch.engine.testing import save_tiny_target
    from eagle_batch.models.target import Target, TargetOutput

    folder = str(save_tiny_target(tmp_path))
    spec = EngineSpec(model=folder, head=None, slots=8, context=64, threads=1)
    texts = run(ElasticEngine(build_engine, replace(spec, slots=2)))
    forward = Target.forward

    def full(self: Target, tokens_BN: torch.Tensor, *rest: Any) -> TargetOutput:
        if len(tokens_BN) > 2:
            device = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            raise device if where == "device" else MemoryError()
        return forward(self, tokens_BN, *rest)

    monkeypatch.setattr(Target, "forward", full)
    engine = ElasticEngine(build_engine, spec)
    assert run(engine) == texts
    assert len(set(texts.values())) > 4
    assert engine.slots == 2
    assert [notice.partition(" slots")[0][-1] for notice in engine.notices] == ["4", "2"]


def run(engine: ElasticEngine) -> dict[str, str]:
    """The texts of nine rows."""
    params = SamplingParams(temperature=1.0, max_tokens=9, ignore_eos=True)
    for number in range(9):
        prompt = engine.tokenizer.encode(f"row {number}", add_special_tokens=False)
        engine.add(Request(f"r{number}", tuple(prompt), params, number))
    found: dict[str, str] = {}
    while engine.has_work:
        found |= {done.request_id: done.text for done in engine.step()}
    return found


def test_an_engine_that_is_rebuilt_drafts_with_the_head_that_came(tmp_path: Path) -> None:
    """One that cannot be read is told and changes nothing; n-grams stay, as a branch."""

    class Full(FakeEngine):
        def step(self) -> list[Completion]:
            if self.slots > 2:
                raise MemoryError
            return super().step()

    specs: list[EngineSpec] = []

    def build(spec: EngineSpec) -> FakeEngine:
        specs.append(spec)
        return Full(spec)

    (tmp_path / "model.safetensors").write_text("head")
    engine = ElasticEngine(build, EngineSpec("m", None, slots=4, branch=3, ngram=True, adapt=True))
    engine.use_head(str(tmp_path))
    engine.use_head(str(tmp_path / "gone"))
    [notice] = engine.notices
    assert notice.startswith(f"the head {tmp_path}/gone is not used: HeadError")
    engine.add(Request("a", (97,), SamplingParams()))
    engine.step()
    drafts = [(spec.head, spec.ngram, spec.branch) for spec in specs]
    assert drafts == [(None, True, 3), (str(tmp_path), False, 3)]
