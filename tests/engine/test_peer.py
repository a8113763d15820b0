"""What vLLM is told; here it is a stand-in that keeps what it is told, for there are no GPUs."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from transformers import LlamaConfig

from eagle_batch.engine import peer
from eagle_batch.errors import ConfigError
from eagle_batch.job.pool import RayPool
from eagle_batch.job.resources import choose_resources
from eagle_batch.job.spec import WorkerSpec, engine_spec
from tests.job.fake_engine import build_fake
from tests.job.fake_job import load_job, write_job

NODE = {"CPU": 32.0, "GPU": 8.0, "memory": 2.0**38}


class FakeArgs:
    """vLLM's EngineArgs."""

    def __init__(self, **options: Any) -> None:
        self.options = options


class FakeEngine:
    """vLLM's LLMEngine."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options

    @classmethod
    def from_engine_args(cls, args: FakeArgs) -> FakeEngine:
        return cls(args.options)

    def get_metrics(self) -> list[Any]:
        return []


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A vLLM for CUDA; returns its platform."""
    platform = SimpleNamespace(device_type="cuda")
    modules: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.platforms": {"current_platform": platform},
        "vllm.engine": {},
        "vllm.engine.arg_utils": {"EngineArgs": FakeArgs},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.llm_engine": {"LLMEngine": FakeEngine},
    }
    for name, values in modules.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    name = "eagle_batch.engine.peer.AutoTokenizer.from_pretrained"
    monkeypatch.setattr(name, lambda *_, **__: object())
    for name in peer.ENVIRONMENT:
        monkeypatch.setenv(name, "as it was")
    return platform


def worker(folder: Path, gpus: float | str, **engine: Any) -> WorkerSpec:
    """Return what a worker is built from on a cluster of two nodes with eight GPUs each."""
    path = write_job(
        folder,
        ["a"],
        engine={"kind": "vllm", "slots": 48} | engine,
        workers={"gpus": gpus, "count": "auto"},
        target={"context": 96, "dtype": "bfloat16"},
    )
    LlamaConfig(max_position_embeddings=128).save_pretrained(folder)
    job = load_job(path)
    resources = choose_resources(job.pipeline.workers, None, [NODE, NODE])
    return WorkerSpec(job.pipeline, job.plan, 0.0, resources.device, None, build_fake)


@pytest.mark.parametrize(
    ("gpus", "engine", "expected"),
    [
        (4, {"tensor_parallel": 4}, {"tensor_parallel_size": 4, "executor": "mp"}),
        ("auto", {}, {"tensor_parallel_size": 1, "executor": "uni"}),
        (1, {}, {"tensor_parallel_size": 1, "executor": "uni"}),
    ],
)
def test_vllm_is_told_what_the_pipeline_says(
    gpus: Any, engine: Any, expected: dict[str, Any], vllm: SimpleNamespace, tmp_path: Path
) -> None:
    built = peer.build_vllm_engine(engine_spec(worker(tmp_path, gpus, **engine)))
    told = built._engine.options
    assert told["tensor_parallel_size"] == expected["tensor_parallel_size"]
    assert told["distributed_executor_backend"] == expected["executor"]
    assert (told["model"], told["dtype"], told["revision"]) == (str(tmp_path), "bfloat16", None)
    assert (told["max_model_len"], told["max_num_seqs"]) == (96, 48)
    assert told["speculative_config"] is None
    assert not told["enforce_eager"], "on GPUs graphs are worth their capture"


def test_an_n_gram_draft_is_a_chain_of_the_depth_that_is_asked_for(
    vllm: SimpleNamespace, tmp_path: Path
) -> None:
    spec = worker(tmp_path, 1)
    document = yaml.safe_load((tmp_path / "pipeline.yaml").read_text())
    document["speculation"] = {"method": "ngram", "depth": 5}
    (tmp_path / "pipeline.yaml").write_text(yaml.safe_dump(document))
    job = load_job(tmp_path / "pipeline.yaml")
    spec = WorkerSpec(job.pipeline, job.plan, 0.0, "cuda", None, build_fake)
    told = peer.build_vllm_engine(engine_spec(spec))._engine.options
    assert told["speculative_config"] == {
        "method": "ngram",
        "prompt_lookup_max": 4,
        "num_speculative_tokens": 5,
    }


def test_a_worker_of_four_gpus_gets_them_on_one_node(tmp_path: Path) -> None:
    """Ray gives an actor all that it asks for on one node, where vLLM's processes share memory."""
    spec = worker(tmp_path, 4, tensor_parallel=4)
    resources = choose_resources(spec.pipeline.workers, None, [NODE, NODE, {"GPU": 3.0}])
    assert (resources.count, resources.gpus, resources.device) == (4, 4.0, "cuda")
    options = RayPool(spec, resources, 60.0)._options()
    assert (options["num_gpus"], options["num_cpus"]) == (4.0, 1.0)


def test_a_vllm_for_another_device_is_refused(vllm: SimpleNamespace, tmp_path: Path) -> None:
    vllm.device_type = "cpu"
    with pytest.raises(ConfigError, match="built for cpu, and the workers run on cuda"):
        peer.build_vllm_engine(engine_spec(worker(tmp_path, 1)))
