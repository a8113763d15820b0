"""The output file of an OpenAI batch says how likely each token was, where the job kept that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer

import eagle_batch
from eagle_batch.cli import main
from eagle_batch.data.spelling import Spelling
from eagle_batch.engine.testing import save_tiny_target
from eagle_batch.job.spec import build_real_engine
from tests.job.fake_job import load_job, run_in_process, write_job

STAGES = [
    {
        "name": "one",
        "prompt": "ask {{ topic }}",
        "sampling": {"max_tokens": 12, "temperature": 0.7},
    }
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("tiny") / "model")


def written(folder: Path, model: Path, **output: Any) -> tuple[list[dict[str, Any]], str]:
    """Run a job; return the choices of its OpenAI file, and what the command said of them."""
    target = {"model": str(model)}
    path = write_job(folder, ["a", "bc"], target=target, stages=STAGES, output=output, samples=1)
    run_in_process(load_job(path), build=build_real_engine)
    result = CliRunner().invoke(main, ["openai-files", f"{folder}/out", f"{folder}/files"])
    assert result.exit_code == 0, result.output
    lines = (folder / "files" / "output.jsonl").read_text().splitlines()
    bodies = [json.loads(line)["response"]["body"] for line in lines]
    return [choice for body in bodies for choice in body["choices"]], result.stderr


@pytest.mark.parametrize("logprobs", [True, 3])
def test_each_token_is_spelled_and_has_its_logprob(
    model: Path, tmp_path: Path, logprobs: bool | int
) -> None:
    choices, said = written(tmp_path, model, token_ids=True, logprobs=logprobs)
    rows = eagle_batch.read(f"{tmp_path}/out").to_arrow().to_pylist()
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert said == ""
    for row, choice in zip(rows, choices, strict=True):
        [ids], [kept] = row["token_ids"], row["logprobs"]
        content = choice["logprobs"]["content"]
        assert [item["logprob"] for item in content] == kept["chosen"]
        # One token is one byte of this tokenizer, and none of these bytes is a letter beyond ASCII.
        spelled = [tokenizer.decode([token]) for token in ids["ids"]]
        assert [item["token"] for item in content] == spelled
        for item in content:
            broken = "\ufffd" in item["token"]
            assert item["bytes"] == (None if broken else list(item["token"].encode()))
        if logprobs == 3:
            for item, best, values in zip(content, kept["best_ids"], kept["best"], strict=True):
                found = item["top_logprobs"]
                assert [other["token"] for other in found] == [tokenizer.decode([t]) for t in best]
                assert [other["logprob"] for other in found] == values
        else:
            assert {str(item["top_logprobs"]) for item in content} == {"[]"}


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ({"logprobs": True}, "logprobs are null: they need the column token_ids too"),
        ({"token_ids": True}, ""),
    ],
)
def test_without_the_tokens_or_their_logprobs_there_are_none(
    model: Path, tmp_path: Path, output: dict[str, Any], words: str
) -> None:
    choices, said = written(tmp_path, model, **output)
    assert {choice["logprobs"] for choice in choices} == {None}
    assert said.startswith(words)
    assert bool(said) == bool(words)


def test_a_model_that_is_gone_costs_the_logprobs_alone(tmp_path: Path) -> None:
    model = save_tiny_target(tmp_path / "model")
    written(tmp_path / "job", model, token_ids=True, logprobs=True)
    (model / "config.json").unlink()
    command = ["openai-files", f"{tmp_path}/job/out", f"{tmp_path}/again"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0
    assert "logprobs are null: target.model: " in result.stderr
    choice = json.loads((tmp_path / "again/output.jsonl").read_text().splitlines()[0])
    assert choice["response"]["body"]["choices"][0]["logprobs"] is None


def test_the_token_that_ends_a_text_is_left_out(model: Path, tmp_path: Path) -> None:
    rows = [{"stage": "one", "ids": [70, 71, 2]}]
    from eagle_batch.job.openai_logprobs import choice_logprobs

    row = {"token_ids": rows, "logprobs": [{"stage": "one", "chosen": [-1.0, -2.0, -3.0]}]}
    spelling = Spelling(str(model), None)
    for finish, count in (("eos", 2), ("length", 3)):
        found = choice_logprobs(row, "one", spelling, finish)
        assert found is not None
        assert len(found["content"]) == count
    assert choice_logprobs(row, "two", spelling, "eos") is None, "left out by a condition"


def test_a_space_before_a_word_is_kept_but_at_the_start_of_a_text(tmp_path: Path) -> None:
    """The decoder of SentencePiece strips it from the first token of whatever it is given."""
    vocab = {"▁the": 0, "▁sun": 1, "s": 2, "<unk>": 3}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.decoder = decoders.Metaspace()
    core.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}")
    spelling = Spelling(str(tmp_path), None)
    ids = [0, 1, 2]
    found = [spelling.text(token, before) for before, token in zip([None, *ids], ids, strict=False)]
    assert found == ["the", " sun", "s"]
    assert "".join(found) == core.decode(ids)
