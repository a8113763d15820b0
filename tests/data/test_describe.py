"""`validate` and `plan`: everything that is wrong at once, or what would happen; quickly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle_batch.data.describe import check, describe
from eagle_batch.errors import ConfigError
from tests.data.support import make_pipeline, topics, write_pipeline


def test_the_summary_says_what_would_happen(tmp_path: Path) -> None:
    pq.write_table(topics(10), tmp_path / "topics.parquet", row_group_size=6)
    pipeline = make_pipeline(
        tmp_path, {"output.rows_per_shard": 4, "samples": 3, "workers": {"count": 2}}
    )
    summary = describe(pipeline)
    assert (summary.rows, summary.output_rows, summary.shards, summary.rows_per_shard) == (
        10,
        30,
        3,
        4,
    )
    assert summary.first_prompt == (
        "<|im_start|>user\nAsk about topic 0.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [file.name for file in summary.files] == ["topics.parquet"]
    assert (summary.first_key, summary.last_key) == (
        "data/part-00000.parquet",
        "data/part-00002.parquet",
    )
    assert summary.stages == ("question", "answer")
    assert summary.output_columns[:5] == (
        ("id", "string"),
        ("sample", "int32"),
        ("topic", "string"),
        ("question", "string"),
        ("answer", "string"),
    )
    assert summary.workers == "2, each with 1 CPUs and a GPU if there is one"
    assert "3 samples at temperature 0 are all the same text" in summary.notes[0]
    assert not (tmp_path / "out").exists()


def test_a_first_row_without_a_prompt_is_shown_as_such(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"id": [1], "topic": pa.nulls(1, pa.string())}), tmp_path / "topics.parquet"
    )
    summary = describe(make_pipeline(tmp_path))
    assert summary.first_prompt.startswith(
        "(row 1 has no prompt: template_error: stages.0.messages.0"
    )


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    table = pa.table({"id": [1, 1], "topic": ["a", "b"], "model": ["x", "y"], "answer": ["", ""]})
    pq.write_table(table, tmp_path / "topics.parquet")
    (tmp_path / "file").write_text("in the way")
    pipeline = make_pipeline(
        tmp_path,
        {
            "stages.0.messages.0.content": "{{ topik }}",
            "target.model": "./gone",
            "speculation": {"head": "heads/gone"},
            "output.path": str(tmp_path / "file/out"),
        },
    )
    with pytest.raises(ConfigError) as caught:
        check(pipeline)
    assert [line.split(": ")[0] for line in caught.value.problems] == [
        "target.model",
        "speculation.head",
        "output.path",
        "input.columns",
        "stages.1.name",
        "stages.0.messages.0.content",
        "input.id",
    ]


def test_a_good_pipeline_passes_and_writes_nothing(tmp_path: Path) -> None:
    pipeline = make_pipeline(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    check(pipeline)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("head", "message"),
    [("gone", "is no folder"), (".", "has no config.json"), ("topics.parquet", "is no folder")],
)
def test_a_missing_head_says_what_to_do(tmp_path: Path, head: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(make_pipeline(tmp_path, {"speculation": {"head": head}}))
    assert caught.value.problems[0].startswith("speculation.head: ")
    assert message in str(caught.value)
    assert "speculation.method: none" in str(caught.value)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("topics.parquet", "is a file; expected a folder"),
        ("topics.parquet/x", "is a file; expected a folder"),
        ("nope://bucket/x", "output.path: nope://bucket/x: Protocol not known: nope"),
    ],
)
def test_an_output_that_cannot_be_written_is_told(
    tmp_path: Path, output: str, message: str
) -> None:
    path = output if "://" in output else str(tmp_path / output)
    with pytest.raises(ConfigError, match=r"output\.path") as caught:
        check(make_pipeline(tmp_path, {"output.path": path}))
    assert message in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_output_folder_without_permission_is_told(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(ConfigError, match="is not writable"):
        check(make_pipeline(tmp_path, {"output.path": str(tmp_path / "locked/x")}))


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_planning_is_quick_and_loads_nothing_heavy(tmp_path: Path, format: str) -> None:
    changes: dict[str, Any] = {}
    if format == "jsonl":
        lines = [json.dumps(row) for row in topics(2000).to_pylist()]
        (tmp_path / "x.jsonl").write_text("\n".join(lines))
        changes = {"input.path": "x.jsonl"}
    path = write_pipeline(tmp_path, changes)
    code = (
        "import sys, time\n"
        "from eagle_batch.data.describe import check, describe\n"
        "from eagle_batch.pipeline import load_pipeline\n"
        "start = time.process_time()\n"
        f"pipeline = load_pipeline({str(path)!r})\n"
        "check(pipeline); describe(pipeline)\n"
        "heavy = {'torch', 'transformers', 'ray', 'datasets', 'pandas'} & set(sys.modules)\n"
        "print(heavy or '', time.process_time() - start < 1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True"], done.stdout + done.stderr


def test_the_first_prompt_of_a_loop_is_that_of_its_first_turn(tmp_path: Path) -> None:
    prompt = "{{ turn }}: {{ answer or topic }}"
    stages = [
        {"name": "question", "prompt": prompt},
        {"name": "answer", "prompt": "{{ question }}", "repeat": {"first": "question"}},
    ]
    assert describe(make_pipeline(tmp_path, {"stages": stages})).first_prompt == "1: topic 0"


def test_the_prompt_of_each_stage_is_shown_with_names_for_texts_to_come(tmp_path: Path) -> None:
    stages = [
        {"name": "question", "prompt": "Ask about {{ topic }}."},
        {"name": "answer", "prompt": "{{ topic }}? {{ question }}"},
        {"name": "grade", "prompt": "{{ answer.points + 1 }}"},
    ]
    summary = describe(make_pipeline(tmp_path, {"stages": stages}))
    assert summary.first_prompt == "Ask about topic 0."
    (answer, grade) = summary.later_prompts
    assert answer == ("answer", "topic 0? <question>")
    assert grade[1].startswith("(row 0 has no prompt: it depends on what earlier stages write: ")


def test_a_hundred_files_are_planned_in_less_than_a_second(tmp_path: Path) -> None:
    for number in range(100):
        table = pa.table({"id": [f"{number}:{n}" for n in range(50)], "topic": ["t"] * 50})
        pq.write_table(table, tmp_path / f"{number:03}.parquet")
    pipeline = make_pipeline(tmp_path, {"input.path": "[0-9]*.parquet"})
    begun = time.process_time()  # A busy machine must not decide.
    assert describe(pipeline).rows == 5000
    assert time.process_time() - begun < 1.0
