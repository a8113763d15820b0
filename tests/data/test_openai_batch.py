"""The OpenAI batch format: requests in, and output and error files out."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from eagle_batch.cli import main
from eagle_batch.data.openai_batch import SCHEMA
from eagle_batch.errors import DataError
from tests.data.support import write_jsonl
from tests.data.test_sources import read_all, surveyed
from tests.job.fake_engine import LONG
from tests.job.fake_job import load_job, run_in_process, write_job

ASK = [{"role": "user", "content": "Why?"}]


def line(name: str, messages: Any = ASK, **body: Any) -> dict[str, Any]:
    return {
        "custom_id": name,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "m", "messages": messages, **body},
    }


def test_requests_become_rows_with_the_defaults_of_the_api(tmp_path: Path) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    rows = [
        line("a"),
        line("b", parts, temperature=0, max_completion_tokens=5, stop="x", user="me", stream=False),
        line("c", top_p=0.5, max_tokens=7, stop=["x", "y"], presence_penalty=1, n=1, tools=[]),
    ]
    write_jsonl(tmp_path / "x.jsonl", rows)
    (tmp_path / "y.jsonl.gz").write_bytes(gzip.compress((tmp_path / "x.jsonl").read_bytes()))
    table = read_all(surveyed(tmp_path, ["x.jsonl", "y.jsonl.gz"], input__format="openai_batch"))
    assert table.schema.equals(SCHEMA)
    found = table.to_pylist()
    assert found[:3] == found[3:]
    usual = {"temperature": 1.0, "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    turn = {"role": "user", "content": "Why?", "name": None}
    first = {
        "custom_id": "a",
        "requested_model": "m",
        "messages": [turn],
        "max_tokens": None,
        "stop": [],
    }
    assert found[0] == {**first, **usual}
    assert found[1] == {
        **first,
        **usual,
        "custom_id": "b",
        "temperature": 0.0,
        "max_tokens": 5,
        "stop": ["x"],
        "messages": [{"role": "user", "content": "a", "name": None}],
    }
    assert (found[2]["max_tokens"], found[2]["stop"], found[2]["top_p"]) == (7, ["x", "y"], 0.5)


@pytest.mark.parametrize(
    ("request_line", "message"),
    [
        ({"body": {}}, "line 2: custom_id: found None; expected text"),
        ({**line("a"), "url": "/v1/embeddings"}, "url: found '/v1/embeddings'; expected /v1/chat/"),
        ({"custom_id": "a"}, "body: is missing"),
        (line("a", None), "body.messages: found null; expected a list"),
        (line("a", [{"role": "user"}]), "body.messages: turn 0 has no content"),
        (
            line("a", [{"role": "user", "content": [{"type": "image_url"}]}]),
            "part of type image_url",
        ),
        (line("a", [{**ASK[0], "tool_calls": []}]), "turn 0: tool_calls is not supported"),
        (line("a", temperature="hot"), "body.temperature: found 'hot'; expected a number"),
        (line("a", max_tokens=0), "body.max_tokens: found 0; expected a whole number"),
        (line("a", stop=[""]), "body.stop: found ['']; expected a text or a list"),
        (line("a", n=3), "body.n: cannot be set by a request here; set samples of the pipeline"),
        (
            line("a", tools=[{}]),
            "body.tools: cannot be set by a request here; set template_options",
        ),
        (line("a", reasoning="x"), "body.reasoning: cannot be set by a request here; remove it"),
    ],
)
def test_a_request_that_cannot_be_met_is_told_with_its_line(
    tmp_path: Path, request_line: dict[str, Any], message: str
) -> None:
    write_jsonl(tmp_path / "x.jsonl", [line("ok"), request_line])
    with pytest.raises(DataError) as caught:
        surveyed(tmp_path, "x.jsonl", input__format="openai_batch")
    assert f"{tmp_path}/x.jsonl: line 2: " in str(caught.value)
    assert message in str(caught.value)


def test_a_batch_goes_in_and_its_two_files_come_out(tmp_path: Path) -> None:
    path = write_job(tmp_path, ["unused"], limits={"max_error_rate": 1.0})
    requests = [
        line(f"q{n}", [{"role": "user", "content": f"text {n}"}], max_tokens=n) for n in (1, 2)
    ]
    requests.append(line("bad", [{"role": "user", "content": LONG}]))
    write_jsonl(tmp_path / "batch.jsonl", requests)
    document = yaml.safe_load(path.read_text())
    document["input"] = {"path": "batch.jsonl", "format": "openai_batch", "id": "custom_id"}
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    sampling = {"max_tokens": "{{ max_tokens or 3 }}", "temperature": "{{ temperature }}"}
    document["stages"] = [{"name": "response", "messages": "{{ messages }}", "sampling": sampling}]
    path.write_text(yaml.safe_dump(document))
    result = run_in_process(load_job(path))
    assert (result.rows, result.quarantined) == (4, 2)
    outcome = CliRunner().invoke(
        main, ["openai-files", str(tmp_path / "out"), str(tmp_path / "files")]
    )
    assert outcome.exit_code == 0, outcome.output
    good = [
        json.loads(text) for text in (tmp_path / "files" / "output.jsonl").read_text().splitlines()
    ]
    bad = [
        json.loads(text) for text in (tmp_path / "files" / "error.jsonl").read_text().splitlines()
    ]
    assert [item["custom_id"] for item in good] == ["q1", "q2"]
    body = good[1]["response"]["body"]
    assert good[1]["error"] is None
    assert good[1]["response"]["status_code"] == 200
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert [len(choice["message"]["content"]) for choice in body["choices"]] == [8, 8]
    assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}
    assert body["usage"] == {"prompt_tokens": 6, "completion_tokens": 4, "total_tokens": 10}
    assert (body["object"], body["model"]) == ("chat.completion", str(tmp_path))
    assert [(item["custom_id"], item["response"]) for item in bad] == [("bad", None)]
    assert bad[0]["error"] == {"code": "prompt_too_long", "message": "the prompt is too long"}
    assert len({item["id"] for item in (*good, *bad)}) == 3
    wrong = CliRunner().invoke(
        main, ["openai-files", str(tmp_path / "out"), str(tmp_path / "x"), "--stage", "respose"]
    )
    assert (wrong.exit_code, "did you mean 'response'?" in wrong.output) == (2, True)
