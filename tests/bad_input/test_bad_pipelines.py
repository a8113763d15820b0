"""Malformed pipeline files: one clear error that names the file and the place, nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from eagle_batch.data.describe import check
from eagle_batch.errors import ConfigError
from eagle_batch.pipeline import Pipeline, load_pipeline, parse_pipeline, resolved
from tests.data.support import BASE, changed, write_model, write_pipeline

LONG = "x" * 200

#: key -> (value, what the message says)
BAD_VALUES: list[tuple[str, Any, str]] = [
    ("name", ..., "is missing"),
    ("name", "Has Capitals", "expected text that matches"),
    ("name", "", "expected text that matches"),
    ("name", LONG, "at most 100 characters"),
    ("name", 5, "found 5; expected text"),
    ("name", ["a"], "expected text"),
    ("name", "../escape", "expected text that matches"),
    ("name", "line\n", "expected text that matches"),
    ("seed", -1, "at least 0"),
    ("seed", 2**63, "at most 9223372036854775807"),
    ("seed", 1.5, "expected a whole number"),
    ("seed", True, "expected a whole number"),
    ("seed", "0", "expected a whole number"),
    ("input", ..., "is missing"),
    ("input", "topics.parquet", "expected a mapping of keys"),
    ("input.path", ..., "is missing"),
    ("input.path", [], "a list that is not empty"),
    ("input.path", "", "text that is not empty"),
    ("input.path", {"a": 1}, "expected a list"),
    ("input.format", "xml", "'auto', 'parquet', 'arrow', 'jsonl'"),
    ("input.sample", 0, "at least 1"),
    ("input.sample", 1.5, "below 1"),
    ("input.delimiter", "::", "at most 1 character"),
    ("input.columns", "topic", "expected a list"),
    ("input.columns", [1], "expected text"),
    ("input.limit", 0, "at least 1"),
    ("input.limt", 5, "did you mean 'limit'?"),
    ("target.model", ..., "is missing"),
    ("target.model", "", "text that is not empty"),
    ("target.dtype", "float64", "'float32', 'bfloat16' or 'float16'"),
    ("target.dtype", 16, "'float32', 'bfloat16' or 'float16'"),
    ("target.context", 1, "at least 16"),
    ("target.quantization", "int8", "unknown field"),
    ("speculation", {"method": "magic"}, "'auto', 'eagle', 'draft_model', 'ngram' or 'none'"),
    ("speculation", {"method": "eagle"}, "name a head's folder"),
    ("speculation", {"method": "none", "head": "x"}, "remove the head"),
    ("speculation", {"method": "none", "depth": 0}, "at least 1"),
    ("speculation", {"method": "draft_model"}, "found no draft model"),
    ("speculation", {"method": "ngram", "draft": "x"}, "found a draft model with 'ngram'"),
    ("speculation", {"ngram_branch": 2}, "found neither head nor draft model"),
    ("speculation", {"head": "x", "draft": "x"}, "expected a head or a draft model"),
    ("speculation", {"draft": "x", "tree": "static", "method": "draft_model"}, "needs a head"),
    ("speculation", {"head": "x", "nodes": 2}, "at least one node a level"),
    ("speculation", {"head": "x", "tree": "bush"}, "'dynamic', 'static' or 'chain'"),
    ("speculation", {"head": ["x"]}, "expected text"),
    ("speculation", "eagle", "expected a mapping of keys"),
    ("stages", ..., "is missing"),
    ("stages", [], "a list that is not empty"),
    ("stages", {"name": "x"}, "expected a list"),
    ("stages.0", "ask", "expected a mapping of keys"),
    ("stages.0", None, "expected a mapping of keys"),
    ("stages.0.name", "Question", "text that matches"),
    ("stages.0.name", "2nd", "text that matches"),
    ("stages.0.name", "with-dash", "text that matches"),
    ("stages.0.name", "id", "taken by the output"),
    ("stages.0.name", "generation", "taken by the output"),
    ("stages.0.name", "row", "taken by the output"),
    ("stages.1.name", "question", "twice"),
    ("stages.0.messages", [], "a list that is not empty"),
    ("stages.0.messages", ..., "exactly one of messages and prompt"),
    ("stages.0.prompt", "both", "exactly one of messages and prompt"),
    ("stages.0.messages.0.role", "human", "'system', 'developer', 'user'"),
    ("stages.0.messages.0.role", ..., "is missing"),
    ("stages.0.messages.0.content", None, "is missing; expected role and content, or turns"),
    ("stages.0.messages.0.content", 5, "expected text"),
    ("stages.0.messages.0.text", "x", "unknown field"),
    ("stages.0.sampling", {"temperature": -1}, "at least 0"),
    ("stages.0.sampling", {"temperature": "hot"}, "expected a number"),
    ("stages.0.sampling", {"temperature": float("inf")}, "a finite number"),
    ("stages.0.sampling", {"temperature": float("nan")}, "a finite number"),
    ("stages.0.sampling", {"top_p": 0}, "above 0"),
    ("stages.0.sampling", {"top_k": 0}, "at least 1"),
    ("stages.0.sampling", {"min_p": 1}, "below 1"),
    ("stages.0.sampling", {"max_tokens": 0}, "at least 1"),
    ("stages.0.sampling", {"max_tokens": 10, "min_tokens": 11}, "expected min <= max"),
    ("stages.0.sampling", {"stop": "###"}, "expected a list"),
    ("stages.0.sampling", {"stop": [""]}, "text that is not empty"),
    ("stages.0.sampling", {"stop_token_ids": [-1]}, "at least 0"),
    ("stages.0.sampling", {"ignore_eos": "yes"}, "true or false"),
    ("samples", 0, "at least 1"),
    ("engine", {"slots": 0}, "at least 1"),
    ("engine", {"threads": 0}, "at least 1"),
    ("engine", [1], "expected a mapping of keys"),
    ("workers", {"count": "all"}, "'auto'"),
    ("workers", {"count": 0}, "at least 1 or 'auto'"),
    ("workers", {"gpus": -1}, "or 'auto'"),
    ("workers", {"cpus": 0}, "above 0"),
    ("output", ..., "is missing"),
    ("output.path", ..., "is missing"),
    ("output.path", None, "expected text"),
    ("output.rows_per_shard", 0, "at least 1"),
    ("output.compression", "brotli", "'zstd', 'snappy'"),
    ("output.token_ids", 1, "true or false"),
    ("limits", {"max_error_rate": 1.5}, "at most 1"),
    ("limits", {"stall_seconds": 0}, "above 0"),
    ("limits", {"shard_attempts": 0}, "at least 1"),
]

BAD_TEXTS: list[tuple[bytes, str]] = [
    (b"", "the file is empty"),
    (b"# only a comment\n", "the file is empty"),
    (b"just text", "found a str at the top"),
    (b"- a\n- b\n", "found a list at the top"),
    (b"a: 1\na: 2\n", "line 2, column 1: key 'a' is written twice (first in line 1)"),
    (b"x: {b: 1, b: 1}\n", "key 'b' is written twice"),
    (b"a: [1\n", "line 2"),
    (b"a:\n\t- b\n", "line 2"),
    (b"a: b: c\n", "line 1"),
    (b"a: *nope\n", "undefined alias"),
    (b"a: 1\n---\nb: 2\n", "line 2"),
    (b"a: !!python/object/apply:os.system ['true']\n", "could not determine a constructor"),
    (b"a: !mine 3\n", "could not determine a constructor"),
    (b"a: \xff\n", "byte 3 is not UTF-8"),
    (b'a: "\\ud83d"\n', "half of a character"),
    (b"a: \x00\n", "not valid YAML"),
    (b"{[1]: 2}", "unhashable"),
    (b"a: " + b"[" * 1500, "nested too deeply"),
    (b"a: !!int x\n", "not valid YAML"),
    (b"a: !!float x\n", "not valid YAML"),
    (b"a: !!binary aGk=\n", "could not determine a constructor"),
    (b"a: !!timestamp 2024-01-01\n", "could not determine a constructor"),
    (b"a: !!set {b}\n", "could not determine a constructor"),
    (b"a: &a [*a]\nname: x\n", "a: unknown field"),
    (b"1: 2\n", "expected a key that is text"),
    (b"null: 2\n", "expected a key that is text"),
]


@pytest.mark.parametrize(("key", "value", "message"), BAD_VALUES)
def test_a_bad_value_names_file_key_and_what_was_expected(
    tmp_path: Path, key: str, value: Any, message: str
) -> None:
    path = write_pipeline(tmp_path, {key: value})
    with pytest.raises(ConfigError) as caught:
        load_pipeline(path)
    assert len(caught.value.problems) == 1
    line = caught.value.problems[0]
    assert line.startswith(f"{path}: ")
    assert key in line.split(": ")[1]
    assert message in line
    assert len(line) < 600


@pytest.mark.parametrize("beside", ["head", "draft"])
def test_vllm_is_asked_for_no_ngram_branch(tmp_path: Path, beside: str) -> None:
    """Which our engine has; 0 asks for none."""
    fields = {"speculation": {beside: "x", "ngram_branch": 4}}
    load_pipeline(write_pipeline(tmp_path, fields))
    path = write_pipeline(tmp_path, fields | {"engine": {"kind": "vllm"}})
    with pytest.raises(ConfigError) as caught:
        load_pipeline(path)
    said = "speculation.ngram_branch: found 4; vllm has no n-gram branch; leave it out"
    assert f"{path}: {said}" in caught.value.problems
    fields = {"speculation": {"head": "x", "ngram_branch": 0}, "engine": {"kind": "vllm"}}
    load_pipeline(write_pipeline(tmp_path, fields))


@pytest.mark.parametrize(("text", "message"), BAD_TEXTS)
def test_a_bad_file_is_named_with_the_line(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(text)
    with pytest.raises(ConfigError) as caught:
        load_pipeline(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone.yaml", "no such file; expected a pipeline"),
        (".", "is a folder"),
        ("a\0b", "cannot be"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_pipeline(tmp_path / name)
    assert message in str(caught.value)


def outcome(load: Callable[[], Pipeline]) -> tuple[Pipeline | None, tuple[str, ...]]:
    try:
        return load(), ()
    except ConfigError as error:
        return None, error.problems


def keys_of(data: Any, prefix: str = "") -> list[str]:
    items = data.items() if isinstance(data, dict) else enumerate(data)
    keys = []
    for key, value in items:
        name = f"{prefix}{key}"
        keys += [name, *(keys_of(value, f"{name}.") if isinstance(value, dict | list) else [])]
    return keys


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=3)
    | st.dates(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)


def test_a_draft_model_with_another_tokenizer_is_refused_before_any_work(tmp_path: Path) -> None:
    fields = {"speculation": {"method": "draft_model", "draft": "./small"}}
    path = write_pipeline(tmp_path, fields)
    for folder, words in (("model", ["a", "b"]), ("small", ["b", "a"])):
        write_model(tmp_path / folder)
        core = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="a"))
        core.save(str(tmp_path / folder / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"speculation.draft: .*: 2 tokens differ, 'a' for one"):
        check(load_pipeline(path))
    (tmp_path / "small/config.json").unlink()
    with pytest.raises(ConfigError, match=r"speculation.draft: .*small has no config.json"):
        check(load_pipeline(path))


@pytest.mark.parametrize(
    ("structured", "message"),
    [
        ({}, "found none; expected exactly one of json_schema, regex, choice"),
        ({"regex": "a", "choice": ["b"]}, "found regex and choice; expected exactly one"),
        ({"choice": []}, "a list that is not empty"),
        ({"json_schema": "x"}, "expected a mapping|expected that"),
        ({"regex": "(a"}, r"stages.0.structured.regex: cannot be compiled: .*unclosed group"),
        ({"json_schema": {"type": "objet"}}, r"cannot be compiled: .*Invalid type: objet"),
    ],
)
def test_a_structure_that_is_none_is_refused_before_any_work(
    tmp_path: Path, structured: dict[str, Any], message: str
) -> None:
    path = write_pipeline(tmp_path, {"stages.0.structured": structured})
    with pytest.raises(ConfigError, match=message):
        check(load_pipeline(path))


def test_what_a_structure_makes_meaningless_is_named_all_at_once(tmp_path: Path) -> None:
    fields = {
        "stages.0.structured": {"regex": "a"},
        "stages.0.sampling": {"ignore_eos": True, "min_tokens": 3, "bad_words": [" "]},
    }
    path = write_pipeline(tmp_path, fields)
    with pytest.raises(ConfigError, match=r"bad_words.0: found ' '; expected text that matches"):
        load_pipeline(path)
    fields["stages.0.sampling"] = {"ignore_eos": True, "min_tokens": 3}
    path = write_pipeline(tmp_path, fields)
    with pytest.raises(ConfigError, match=r"sampling.ignore_eos and stages.0.sampling.min_tokens"):
        load_pipeline(path)


FULL = resolved(parse_pipeline(BASE, "base"))


@given(st.dictionaries(st.sampled_from(keys_of(FULL)), ANYTHING, min_size=1, max_size=3))
@settings(deadline=None)
def test_any_value_anywhere_is_accepted_or_a_config_error(changes: dict[str, Any]) -> None:
    data: Any = FULL
    for key, value in sorted(changes.items(), key=lambda item: -item[0].count(".")):
        data = changed(data, {key: value})
    parsed, problems = outcome(lambda: parse_pipeline(data, "x.yaml"))
    assert all(line.startswith("x.yaml: ") and "\n" not in line for line in problems)
    if parsed:
        assert parse_pipeline(resolved(parsed), "x.yaml") == parsed


@given(st.text(max_size=60) | st.binary(max_size=60).map(lambda data: data.decode("latin-1")))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_is_no_pipeline_but_never_another_exception(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigError):
        load_pipeline(path)


@given(st.integers(0, 400), st.binary(max_size=4))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_pipeline_is_a_config_error_or_still_a_pipeline(
    tmp_path: Path, place: int, junk: bytes
) -> None:
    good = yaml.safe_dump(BASE).encode()
    path = tmp_path / "x.yaml"
    path.write_bytes(good[:place] + junk + good[place + len(junk) :])
    _, problems = outcome(lambda: load_pipeline(path))
    assert all(line.startswith(f"{path}: ") for line in problems)


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ({"input.path": "gone.parquet"}, ["input.path: ", "gone.parquet: no file has this name"]),
        ({"input.path": "*.gone"}, ["no file has this name pattern"]),
        ({"input.path": "s3x://b/c"}, ["s3x://b/c", "Protocol not known"]),
        ({"input.path": "synth.yaml"}, ["its name does not tell the format", "input.format"]),
        ({"input.path": "model"}, ["the folder holds no .parquet, .arrow, .jsonl or .csv file"]),
        ({"input.path": "model/config.json"}, ["stages.0.messages.0.content: found 'topic'"]),
        ({"input.id": "idd"}, ["input.id: found 'idd'", "did you mean 'id'?"]),
        ({"input.id": None}, ["has a column 'id'", "input.id: id"]),
        ({"input.columns": ["topics"]}, ["input.columns: found 'topics'", "did you mean 'topic'?"]),
        ({"input.format": "jsonl"}, ["topics.parquet: line 1"]),
        ({"input.format": "arrow"}, ["topics.parquet: cannot be read"]),
        ({"stages.0.name": "topic"}, ["stages.0.name: found 'topic', which is a column"]),
        ({"stages.0.messages.0.content": "{{ topic"}, ["stages.0.messages.0.content: not a valid"]),
        ({"stages.0.messages.0.content": "{{ t }}"}, ["stages.0.messages.0.content: found 't'"]),
        ({"stages.0.messages.0.content": "{{ answer }}"}, ["is a later stage"]),
        ({"target.model": "./gone"}, ["target.model: ", "is no folder"]),
        ({"speculation": {"head": "gone"}}, ["speculation.head: ", "is no folder"]),
        ({"speculation": {"head": "demo:gone"}}, ["speculation.head: demo:gone"]),
        ({"target.model": "demo:gone"}, ["demo:gone"]),
        ({"output.path": "/dev/null/x"}, ["output.path: /dev/null is a file"]),
    ],
)
def test_what_does_not_fit_the_data_is_told_by_key(
    tmp_path: Path, changes: dict[str, Any], messages: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        check(load_pipeline(write_pipeline(tmp_path, changes)))
    assert all(message in str(caught.value) for message in messages), str(caught.value)
