"""Which changes make another job, and how a difference is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle_batch.pipeline import InputIdentity, Pipeline, explain_difference, fingerprint, resolved
from tests.data.support import make_pipeline

INPUTS = (InputIdentity("a.parquet", 10, 3, "t1"), InputIdentity("b.parquet", 20, 4, "t2"))

FREE: dict[str, Any] = {
    "name": "other",
    "speculation": {"method": "eagle", "head": "heads/x", "depth": 2, "nodes": 3},
    "engine": {"slots": 2, "prefill_chunk": 64, "threads": 3},
    "workers": {"count": 3},
    "limits": {"max_error_rate": 1.0},
    "output.path": "elsewhere",
    "output.compression": "none",
    "output.row_group_rows": 2,
    "output.partition_by": ["topic"],
    "input.path": "moved/topics.parquet",
}
BOUND: dict[str, Any] = {
    "seed": 1,
    "input.id": None,
    "input.limit": 2,
    "input.columns": ["topic"],
    "input.format": "parquet",
    "target.model": "other/model",
    "target.revision": "main",
    "target.dtype": "bfloat16",
    "target.context": 512,
    "stages.0.name": "q",
    "stages.0.messages.0.content": "Ask!",
    "stages.0.messages.0.role": "system",
    "stages.1.sampling": {"temperature": 0.5},
    "samples": 2,
    "engine": {"kind": "vllm"},
    "deduplicate": {"column": "answer"},
    "decontaminate": {"stages": "answer", "against": "topics.parquet", "column": "topic"},
    "output.rows_per_shard": 8,
    "output.token_ids": True,
    "output.format": "arrow",
    "output.logprobs": True,
}


def made(folder: Path, **changes: Any) -> Pipeline:
    return make_pipeline(folder, {key.replace("__", "."): value for key, value in changes.items()})


@pytest.mark.parametrize("key", FREE)
def test_what_leaves_the_text_alone_leaves_the_fingerprint_alone(tmp_path: Path, key: str) -> None:
    old, new = make_pipeline(tmp_path), make_pipeline(tmp_path, {key: FREE[key]})
    assert old != new
    assert fingerprint(old, INPUTS) == fingerprint(new, INPUTS)
    assert explain_difference(resolved(old), resolved(new)) == []


def test_a_head_that_is_trained_beside_the_job_leaves_the_fingerprint_alone(tmp_path: Path) -> None:
    old = make_pipeline(tmp_path, {"speculation": {}})
    new = make_pipeline(tmp_path, {"speculation": {"adapt": True}})
    assert fingerprint(old, INPUTS) == fingerprint(new, INPUTS)
    assert explain_difference(resolved(old), resolved(new)) == []


@pytest.mark.parametrize("key", BOUND)
def test_what_can_change_a_row_changes_the_fingerprint_and_is_named(
    tmp_path: Path, key: str
) -> None:
    old, new = make_pipeline(tmp_path), make_pipeline(tmp_path, {key: BOUND[key]})
    assert fingerprint(old, INPUTS) != fingerprint(new, INPUTS)
    lines = explain_difference(resolved(old), resolved(new))
    assert any(line.startswith(key) for line in lines), lines


def test_the_draft_is_bound_where_another_engine_s_text_knows_it(tmp_path: Path) -> None:
    vllm = make_pipeline(tmp_path, {"engine": {"kind": "vllm"}})
    draft = {"method": "eagle", "head": "heads/x", "depth": 2, "nodes": 3}
    other = make_pipeline(tmp_path, {"engine": {"kind": "vllm"}, "speculation": draft})
    assert fingerprint(vllm, INPUTS) != fingerprint(other, INPUTS)
    lines = explain_difference(resolved(vllm), resolved(other))
    assert "speculation.depth: was 4, is now 2" in lines
    larger = make_pipeline(
        tmp_path, {"engine": {"kind": "vllm", "tensor_parallel": 2}, "workers": {"gpus": 2}}
    )
    assert fingerprint(vllm, INPUTS) == fingerprint(larger, INPUTS)


def test_the_compression_is_bound_where_it_is_part_of_the_names(tmp_path: Path) -> None:
    old = make_pipeline(tmp_path, {"output.format": "jsonl"})
    new = make_pipeline(tmp_path, {"output.format": "jsonl", "output.compression": "gzip"})
    assert fingerprint(old, INPUTS) != fingerprint(new, INPUTS)
    told = 'output.compression: was "zstd", is now "gzip"'
    assert explain_difference(resolved(old), resolved(new)) == [told]


def test_every_section_is_either_free_or_bound() -> None:
    """A new field must be put on one of the two lists above."""
    named = {key.partition(".")[0] for key in [*FREE, *BOUND]}
    assert set(Pipeline.model_fields) == named


@pytest.mark.parametrize(
    "inputs",
    [
        INPUTS[:1],
        INPUTS[::-1],
        (InputIdentity("a.parquet", 11, 3, "t1"), INPUTS[1]),
        (InputIdentity("a.parquet", 10, 4, "t1"), INPUTS[1]),
        (InputIdentity("a.parquet", 10, 3, "t0"), INPUTS[1]),
        (InputIdentity("c.parquet", 10, 3, "t1"), INPUTS[1]),
    ],
)
def test_another_input_is_another_job_and_is_explained(
    tmp_path: Path, inputs: tuple[InputIdentity, ...]
) -> None:
    pipeline = make_pipeline(tmp_path)
    assert fingerprint(pipeline, INPUTS) != fingerprint(pipeline, inputs)
    plain = resolved(pipeline)
    assert explain_difference(plain, plain, INPUTS, inputs) != []


def test_a_difference_shows_key_old_value_and_new_value(tmp_path: Path) -> None:
    old = made(tmp_path, stages__0__sampling={"temperature": 0.8}, samples=2)
    new = made(tmp_path, stages__0__sampling={"temperature": 0.2, "stop": ["x"]})
    changed_inputs = (InputIdentity("a.parquet", 10, 5, "t1"),)
    assert explain_difference(resolved(old), resolved(new), INPUTS, changed_inputs) == [
        "stages.0.sampling.temperature: was 0.8, is now 0.2",
        'stages.0.sampling.stop: was [], is now ["x"]',
        "samples: was 2, is now 1",
        "input.path: file a.parquet changed (rows: was 3, is now 5)",
        "input.path: file b.parquet is gone",
    ]


def test_the_fingerprint_is_stable_across_processes_and_releases(tmp_path: Path) -> None:
    """A changed value here means that no running job can be resumed by the new release."""
    pipeline = make_pipeline(tmp_path, {"target.model": "owner/model"})
    assert fingerprint(pipeline, INPUTS)[:16] == "70c02db02e8a7225"
