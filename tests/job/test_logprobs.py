"""The column `logprobs`: what the model itself says of the tokens, however they were drafted."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import eagle_batch
from eagle_batch.data.describe import describe
from eagle_batch.engine.testing import save_tiny_target
from eagle_batch.errors import ConfigError
from eagle_batch.job.spec import build_real_engine
from eagle_batch.job.verify import verify
from eagle_batch.pipeline import load_pipeline
from tests.job.fake_engine import fake_logprobs
from tests.job.fake_job import CrashError, load_job, run_in_process, write_job

TOPICS = ["aaaa aaaa", "b", "cd cd cd"]
STAGE = {
    "name": "one",
    "prompt": "ask {{ topic }}",
    "sampling": {"max_tokens": 12, "temperature": 0.1, "ignore_eos": True},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("tiny") / "model")


def rows(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = eagle_batch.read(str(folder / "out")).to_arrow().to_pylist()
    return found


def made(folder: Path, model: Path, speculation: dict[str, Any], **output: Any) -> list[Any]:
    path = write_job(
        folder,
        TOPICS,
        target={"model": str(model)},
        stages=[STAGE],
        speculation=speculation,
        output={"token_ids": True, **output},
    )
    run_in_process(load_job(path), build=build_real_engine)
    return rows(folder)


def plainly(model: Path, prompt: str, ids: list[int]) -> Any:
    """One pass over prompt and text: log p of every token at each place of the text."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    before = AutoTokenizer.from_pretrained(model).encode(prompt, add_special_tokens=True)
    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = target(torch.tensor([[*before, *ids]])).logits[0]
    return logits[len(before) - 1 : -1].log_softmax(-1)


def test_each_token_has_what_the_model_says_of_it(model: Path, tmp_path: Path) -> None:
    """With drafts and without, with the best ones beside it and without."""
    drafted = made(tmp_path / "drafted", model, {"method": "ngram"}, logprobs=3)
    plain = made(tmp_path / "plain", model, {"method": "none"}, logprobs=3)
    alone = made(tmp_path / "alone", model, {"method": "ngram"}, logprobs=True, format="jsonl")
    assert sum(item["drafted"] for row in drafted for item in row["generation"]) > 0
    for row, other, bare in zip(drafted, plain, alone, strict=True):
        [ids], [found], [same] = row["token_ids"], row["logprobs"], other["logprobs"]
        log_p = plainly(model, f"ask {row['topic']}", ids["ids"])
        chosen = [log_p[place, token].item() for place, token in enumerate(ids["ids"])]
        assert len(chosen) == 12
        assert found["chosen"] == pytest.approx(chosen, abs=1e-4)
        assert same["chosen"] == pytest.approx(found["chosen"], abs=1e-4)
        assert len(found["best"]) == 12
        for place, best in enumerate(found["best"]):
            own = [log_p[place, token].item() for token in found["best_ids"][place]]
            assert best == pytest.approx(own, abs=1e-4)
            assert best == pytest.approx(log_p[place].topk(3).values.tolist(), abs=1e-4)
        assert bare["logprobs"] == [{"stage": "one", "chosen": pytest.approx(found["chosen"])}]


@pytest.mark.parametrize("form", ["parquet", "arrow", "jsonl"])
@pytest.mark.parametrize("logprobs", [True, 2])
def test_every_kept_text_has_them_after_a_crash_and_a_resume_too(
    tmp_path: Path, form: str, logprobs: bool | int
) -> None:
    """Best of two candidates: of those, one text is kept."""
    stages = [
        {"name": "one", "prompt": "ask {{ topic }}", "samples": 2, "keep": "best"},
        {"name": "two", "prompt": "{{ one }}", "when": "topic != 'b'"},
    ]
    output = {"format": form, "logprobs": logprobs, "compression": "none"}
    job = load_job(write_job(tmp_path, TOPICS, stages=stages, output=output))

    def sabotage(worker: int, pump: int) -> None:
        if worker == 0 and pump == 2:
            raise CrashError

    run_in_process(job, sabotage=sabotage)
    wanted = rows(tmp_path)
    for row in wanted:
        assert [item["stage"] for item in row["logprobs"]] == (
            ["one"] if row["topic"] == "b" else ["one", "two"]
        )
        for item in row["logprobs"]:
            exact = fake_logprobs(row[item["stage"]])
            assert item["chosen"] == pytest.approx(exact, rel=1e-6)
            assert len(exact) == 4
            if logprobs == 2:
                assert item["best_ids"] == [[0, 1]] * 4
                assert item["best"] == [[0.0, -1.0]] * 4
            else:
                assert item.keys() == {"stage", "chosen"}
    assert verify(str(tmp_path / "out")).ok
    [*_, last] = sorted((tmp_path / "out/data").iterdir())
    last.unlink()
    shutil.rmtree(tmp_path / "out/_job/commits")
    run_in_process(job)
    assert rows(tmp_path) == wanted
    assert dict(describe(job.pipeline).output_columns)["logprobs"].startswith("list<")


def test_they_are_not_there_unless_somebody_asks(tmp_path: Path) -> None:
    run_in_process(load_job(write_job(tmp_path, TOPICS)))
    assert "logprobs" not in rows(tmp_path)[0]


@pytest.mark.parametrize("value", ["0", "21", "yes", "-1", "1.5"])
def test_a_number_that_is_none_of_best_tokens_is_told(tmp_path: Path, value: str) -> None:
    path = write_job(tmp_path, ["a"])
    with pytest.raises(ConfigError, match=r"output\.logprobs"):
        load_pipeline(path, [f"output.logprobs={value}"])


def test_row_groups_have_as_many_rows_as_was_asked_for(tmp_path: Path) -> None:
    path = write_job(tmp_path, [f"t{n}" for n in range(10)], output={"rows_per_shard": 10})
    run_in_process(load_job(path, "output.row_group_rows=8"))
    [file] = (tmp_path / "out" / "data").iterdir()
    metadata = pq.ParquetFile(file).metadata
    groups = [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)]
    assert groups == [8, 8, 4]
    assert verify(str(tmp_path / "out")).ok
    assert run_in_process(load_job(path)).already_complete


def test_row_groups_of_a_form_that_has_none_are_told(tmp_path: Path) -> None:
    path = write_job(tmp_path, ["a"], output={"format": "arrow", "row_group_rows": 4})
    with pytest.raises(ConfigError, match="found 4 and arrow, which has no row groups"):
        load_pipeline(path)


def test_the_declared_schema_is_that_of_every_shard(tmp_path: Path) -> None:
    topics = ["a", "b", "c", "d", "{long}"]
    output = {"logprobs": 1, "rows_per_shard": 4}
    run_in_process(
        load_job(write_job(tmp_path, topics, output=output, limits={"max_error_rate": 1.0}))
    )
    schemas = {pq.read_schema(file).remove_metadata() for file in (tmp_path / "out/data").iterdir()}
    assert len(schemas) == 1
    item = schemas.pop().field("logprobs").type.value_type
    assert item.field("best").type.value_type.value_type == pa.float32()
