"""The pipeline file: what is accepted, what it becomes, and how it is told when it is wrong."""

from __future__ import annotations

import json
import pickle
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from eagle_batch.engine.request import SamplingParams
from eagle_batch.errors import ConfigError
from eagle_batch.pipeline import Adapt, Pipeline, Sampling, load_pipeline, parse_pipeline, resolved
from eagle_batch.pipeline.overrides import apply_overrides
from eagle_batch.pipeline.strict_yaml import parse_yaml
from tests.data.support import BASE, changed, make_pipeline, write_pipeline

CONTRACT = """
name: synth
seed: 0
input: {path: data/topics.parquet, format: auto, id: id, columns: null, limit: null}
target: {model: "demo:smollm2-135m-instruct", revision: null, dtype: float32, context: null}
speculation:
  method: auto
  head: heads/smollm2-135m-instruct-eagle3
  tree: dynamic
  depth: 4
  width: 4
  nodes: 12
stages:
  - name: question
    messages:
      - {role: system, content: "You are curious."}
      - {role: user, content: "Write one question about {{ topic }}."}
    sampling: {temperature: 0.8, top_p: 0.95, top_k: null, min_p: null, max_tokens: 48,
               min_tokens: 0, stop: [], stop_token_ids: [], ignore_eos: false}
  - name: answer
    messages: [{role: user, content: "{{ question }}"}]
samples: 1
engine: {slots: 16, prefill_chunk: 512, threads: null}
workers: {count: auto, cpus: 1, gpus: auto}
output: {path: runs/synth, rows_per_shard: 32, compression: zstd, token_ids: false}
limits: {max_error_rate: 0.1, worker_attempts: 3, shard_attempts: 3, stall_seconds: 600}
"""


def models(model: type[BaseModel] = Pipeline) -> Iterator[type[BaseModel]]:
    yield model
    for field in model.model_fields.values():
        for inner in inner_models(field.annotation):
            yield from models(inner)


def inner_models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from inner_models(argument)


def test_every_field_of_every_section_is_described() -> None:
    seen = {model.__name__ for model in models()}
    assert {"Pipeline", "Input", "Stage", "Message", "Sampling", "Limits"} <= seen
    bare = [
        f"{model.__name__}.{name}"
        for model in models()
        for name, field in model.model_fields.items()
        if not field.description
    ]
    assert bare == []


def test_the_documented_file_equals_one_that_leaves_the_defaults_out(tmp_path: Path) -> None:
    full, short = tmp_path / "full.yaml", tmp_path / "short.yaml"
    full.write_text(CONTRACT)
    data = yaml.safe_load(CONTRACT)
    keep = {
        "name": data["name"],
        "input": {"path": data["input"]["path"], "id": "id"},
        "target": {"model": data["target"]["model"]},
        "speculation": {"head": data["speculation"]["head"]},
        "stages": data["stages"],
        "output": {"path": data["output"]["path"]},
    }
    short.write_text(yaml.safe_dump(keep))
    assert load_pipeline(full) == load_pipeline(short)


def test_sampling_has_the_fields_and_defaults_of_the_engine() -> None:
    values = Sampling.model_validate({}).fixed()
    assert values.pop("logit_bias") == {}
    assert SamplingParams(**values) == SamplingParams()


def test_paths_resolve_against_the_file_and_the_output_against_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "p").mkdir()
    path = write_pipeline(
        tmp_path / "p",
        {
            "input.path": ["../rows/*.parquet", "/abs/x.jsonl", "s3://bucket/y.parquet"],
            "speculation": {"head": "heads/one"},
            "output.path": "runs/one",
        },
    )
    monkeypatch.chdir(work)
    pipeline = load_pipeline(path)
    assert pipeline.input.path == (
        str(tmp_path / "rows/*.parquet"),
        "/abs/x.jsonl",
        "s3://bucket/y.parquet",
    )
    assert pipeline.target.model == str(tmp_path / "p/model")
    assert pipeline.speculation.head == str(tmp_path / "p/heads/one")
    assert pipeline.output.path == str(work / "runs/one")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("demo:smollm2-135m-instruct", "demo:smollm2-135m-instruct"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("gpt2", "gpt2"),
        ("model", "{folder}/model"),
        ("./other", "{folder}/other"),
        ("a/b/c", "{folder}/a/b/c"),
        ("/models/x", "/models/x"),
    ],
)
def test_a_model_is_a_demo_a_folder_or_a_hub_id(tmp_path: Path, name: str, expected: str) -> None:
    pipeline = make_pipeline(tmp_path, {"target.model": name})
    assert pipeline.target.model == expected.format(folder=tmp_path)


def test_a_resolved_pipeline_is_read_back_unchanged_through_json_and_pickle(tmp_path: Path) -> None:
    sampling = {"temperature": 0.7, "stop": ["\n", "终"], "stop_token_ids": [2]}
    pipeline = make_pipeline(
        tmp_path, {"stages.0.sampling": sampling, "workers": {"gpus": 0.5}, "input.columns": ["id"]}
    )
    data = json.loads(json.dumps(resolved(pipeline)))
    assert parse_pipeline(data, "stored") == pipeline
    assert pickle.loads(pickle.dumps(pipeline)) == pipeline


def test_an_empty_section_means_its_defaults(tmp_path: Path) -> None:
    pipeline = make_pipeline(tmp_path, {"engine": None, "stages.0.sampling": None})
    assert pipeline == make_pipeline(tmp_path)


def test_a_pipeline_cannot_be_changed(tmp_path: Path) -> None:
    pipeline = make_pipeline(tmp_path)
    with pytest.raises(ValueError, match="frozen"):
        pipeline.seed = 3


def test_all_problems_come_at_once_with_file_key_found_and_expected(tmp_path: Path) -> None:
    path = write_pipeline(
        tmp_path,
        {
            "stages.0.sampling": {"temprature": 0.5, "top_p": 2},
            "stages.1.name": "Answer",
            "workers": {"count": 0},
            "speculation": {"head": None, "method": "eagle"},
            "bogus": [1],
        },
    )
    with pytest.raises(ConfigError) as caught:
        load_pipeline(path)
    lines = caught.value.problems
    assert all(line.startswith(f"{path}: ") for line in lines)
    assert {line.removeprefix(f"{path}: ").split(": ")[0] for line in lines} == {
        "stages.0.sampling.temprature",
        "stages.0.sampling.top_p",
        "stages.1.name",
        "workers.count",
        "speculation.head and speculation.method",
        "bogus",
    }
    text = str(caught.value)
    assert (
        "stages.0.sampling.temprature: unknown field (found 0.5); did you mean 'temperature'? "
        "expected one of temperature, top_p," in text
    )
    assert "top_p: found 2; expected a number of at most 1.0" in text
    assert "workers.count: found 0; expected a number of at least 1 or 'auto'" in text


def test_a_problem_of_an_override_is_named_after_the_option(tmp_path: Path) -> None:
    path = write_pipeline(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_pipeline(path, ["limits.max_error_rate=2", "engine.slots=none"])
    slots, rate = caught.value.problems
    assert slots.startswith(
        "--set: engine.slots: found 'none'; expected a whole number or 'auto' ("
    )
    assert rate.startswith("--set: limits.max_error_rate: found 2; expected a number of at most 1")


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("stages.0.sampling.temperature=0", 0.0),
        ("stages.0.sampling.temperature=1e-1", 0.1),
        ("stages.1.sampling.max_tokens=7", 7),
        ("stages.1.sampling.stop=['a=b', '']", None),
        ("stages.1.sampling.stop=['a=b']", ("a=b",)),
        ("input.limit=10", 10),
        ("input.limit=null", None),
        ("input.limit=", None),
        ("name=no", "no"),
        ("speculation.method=none", "none"),
        ("target.revision='2024-01-01'", "2024-01-01"),
        ("target.revision=2024-01-01", "2024-01-01"),
    ],
)
def test_overrides_are_typed_as_in_the_file(tmp_path: Path, override: str, value: object) -> None:
    path = write_pipeline(tmp_path)
    if value is None and "stop" in override:
        with pytest.raises(ConfigError, match=r"stop\.1: found ''"):
            load_pipeline(path, [override])
        return
    node: Any = load_pipeline(path, [override])
    for part in override.partition("=")[0].split("."):
        node = node[int(part)] if part.isdigit() else getattr(node, part)
    assert node == value


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "expected key=value"),
        ("=3", "expected key=value"),
        ("a..b=3", "expected key=value"),
        ("stages.2.name=x", "found '2', expected an index from 0 to 1"),
        ("stages.-1.name=x", "found '-1', expected an index from 0 to 1"),
        ("stages.x=3", "found 'x', expected an index"),
        ("name.x=3", "name is 'synth', which has no key 'x'"),
        ("seed=[1", "--set seed: line 1"),
        ("sede=1", "--set: sede: unknown field (found 1); did you mean 'seed'?"),
    ],
)
def test_a_wrong_override_is_one_clear_error(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_pipeline(write_pipeline(tmp_path), [override])
    assert message in str(caught.value)
    assert "--set" in str(caught.value)


@pytest.mark.parametrize("switch", [True, False, None])
def test_an_override_reaches_into_a_section_that_is_written_as_a_switch(
    tmp_path: Path, switch: bool | None
) -> None:
    path = write_pipeline(tmp_path, {"speculation": {"adapt": switch}})
    adapt = load_pipeline(path, ["speculation.adapt.tokens=77"]).speculation.adapt
    assert adapt == Adapt(tokens=77)
    assert load_pipeline(path, ["speculation.adapt=false"]).speculation.adapt is None


def test_the_last_override_of_a_key_wins(tmp_path: Path) -> None:
    assert load_pipeline(write_pipeline(tmp_path), ["seed=1", "seed=2"]).seed == 2


@given(
    st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), st.integers(), min_size=1),
    st.one_of(st.integers(), st.booleans(), st.text(st.characters(codec="utf-8")), st.none()),
)
@settings(deadline=None)
def test_an_override_changes_its_key_and_nothing_else(
    data: dict[str, Any], value: int | bool | str | None
) -> None:
    key = next(iter(data))
    before = dict(data)
    result, keys = apply_overrides(data, [f"{key}={json.dumps(value, ensure_ascii=True)}"])
    assert result == {**before, key: value}
    assert keys == ((key,),)
    assert data == before


# A key of YAML ends within 1,024 characters, as escapes.
TEXT = st.text(st.characters(codec="utf-8"), max_size=50)
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=10,
)


@given(JSON_VALUES)
@settings(deadline=None)
def test_json_is_yaml(value: object) -> None:
    """YAML 1.1 reads 1e16 as text and "\\ud83d\\ude00" as two broken characters."""
    assert parse_yaml(json.dumps(value), "x") == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("on", "on"),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("1_000", "1_000"),
        ("1e3", 1000.0),
        ("0x10", 16),
        ("0o10", 8),
        ("010", 10),
        ("~", None),
        ("", None),
        ("true", True),
        (".5", 0.5),
        ("'5'", "5"),
        ("&a [1, 2]", [1, 2]),
        ("{a: &x {k: 1}, b: {<<: *x, j: 2}}", {"a": {"k": 1}, "b": {"k": 1, "j": 2}}),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    result = parse_yaml(text, "x")
    assert result == value
    assert type(result) is type(value)


def test_a_base_file_of_these_tests_is_itself_valid() -> None:
    assert parse_pipeline(changed(BASE, {}), "base").name == "synth"
