"""What the pages tell people to type: commands exist with these options, files are valid."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from eagle_batch.cli import main
from eagle_batch.pipeline import Pipeline, load_pipeline, parse_pipeline
from eagle_batch.pipeline.reference import reference_yaml
from eagle_batch.schedule.jobfile import load_job
from eagle_batch.training.config import TrainingConfig
from tests.test_docs import PAGES, REPOSITORY, blocks

TEXTS = {str(page.relative_to(REPOSITORY)): page.read_text("utf-8") for page in PAGES}


def commands_typed() -> Iterator[tuple[str, str]]:
    """Yield (page, command line) of every console and shell block."""
    for page, text in TEXTS.items():
        for block in (*blocks(text, "console"), *blocks(text, "bash")):
            for line in block.replace("\\\n", " ").splitlines():
                found = re.match(r"(?:\$ )?(?:\.venv/bin/)?(eagle-batch .*)", line)
                if found:
                    yield page, found[1]


def commands_indented() -> Iterator[tuple[str, str]]:
    """Yield (page, command line) of what stands between the lines as code, such as a benchmark."""
    for page, text in TEXTS.items():
        for line in text.replace("\\\n", " ").splitlines():
            if line.startswith("    eagle-batch "):
                yield page, line.strip()


def commands_mentioned() -> Iterator[tuple[str, str]]:
    """Yield (page, command) of every mention in running text, old ones in the changelog aside."""
    for page, text in TEXTS.items():
        if page == "CHANGELOG.md":
            continue
        for mention in re.findall(r"`(eagle-batch [a-z][^`\n]*)`", text):
            yield page, mention


def find(words: list[str]) -> tuple[click.Command, list[str]]:
    """Return the command that words name, and what is left of them."""
    command: click.Command = main
    words = words[1:]
    while isinstance(command, click.Group) and words and words[0].isalpha():
        inner = command.get_command(click.Context(command), words[0])
        assert inner is not None, f"no such command: {words[0]}"
        command, words = inner, words[1:]
    return command, words


@pytest.mark.parametrize(("page", "line"), sorted(set(commands_typed())))
def test_every_command_to_type_is_understood(page: str, line: str) -> None:
    command, words = find(shlex.split(line, comments=True))
    command.make_context("eagle-batch", words)  # a wrong option or argument raises


@pytest.mark.parametrize(("page", "mention"), sorted({*commands_mentioned(), *commands_indented()}))
def test_every_command_mentioned_is_there_with_its_options(page: str, mention: str) -> None:
    command, words = find(mention.split())
    known = {name for parameter in command.params for name in parameter.opts} | {"--help"}
    assert {word for word in words if word.startswith("--")} <= known


def test_a_wrong_command_would_be_seen() -> None:
    assert len(set(commands_typed())) > 15
    assert len(set(commands_mentioned())) > 10
    assert [page for page, _ in commands_indented()] == ["README.md"]
    with pytest.raises(AssertionError, match="no such command: sumbit"):
        find(["eagle-batch", "sumbit"])
    command, words = find(["eagle-batch", "submit", "x.yaml", "--sett", "a=1"])
    with pytest.raises(click.NoSuchOption):
        command.make_context("eagle-batch", words)


def documents() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (page and number, document) of every YAML block that is a mapping."""
    for page, text in TEXTS.items():
        for number, block in enumerate(blocks(text, "yaml"), 1):
            document = yaml.safe_load(block)
            if isinstance(document, dict):
                yield f"{page}:{number}", document


DOCUMENTS = dict(documents())
#: Sections that a page may show alone.
SECTIONS = set(Pipeline.model_fields) - {"name", "stages"}


@pytest.mark.parametrize("name", [n for n, d in DOCUMENTS.items() if "stages" in d])
def test_every_pipeline_in_the_pages_is_valid(name: str) -> None:
    parse_pipeline(DOCUMENTS[name], name)


@pytest.mark.parametrize("name", [n for n, d in DOCUMENTS.items() if {"data", "out"} <= d.keys()])
def test_every_training_file_in_the_pages_is_valid(name: str) -> None:
    TrainingConfig.model_validate(DOCUMENTS[name])


@pytest.mark.parametrize("name", [n for n, d in DOCUMENTS.items() if "schedule" in d])
def test_every_job_file_in_the_pages_is_loaded(name: str, tmp_path: Path) -> None:
    for folder in ("jobs", "pipelines"):
        (tmp_path / folder).mkdir()
    shutil.copytree(REPOSITORY / "pipelines", tmp_path / "pipelines", dirs_exist_ok=True)
    path = tmp_path / "jobs" / f"{DOCUMENTS[name]['name']}.yaml"
    path.write_text(yaml.safe_dump(DOCUMENTS[name]))
    assert load_job(path).file.name == DOCUMENTS[name]["name"]


FRAGMENTS = [name for name, document in DOCUMENTS.items() if document.keys() <= SECTIONS]


@pytest.mark.parametrize("name", FRAGMENTS)
def test_every_part_of_a_pipeline_in_the_pages_fits_into_one(name: str) -> None:
    whole = yaml.safe_load((REPOSITORY / "pipelines" / "synth.yaml").read_text("utf-8"))
    parse_pipeline(whole | DOCUMENTS[name], name)


def test_every_document_of_the_pages_is_tried() -> None:
    known = ({"stages"}, {"data", "out"}, {"schedule"})
    kinds = [
        any(keys <= d.keys() for keys in known) or n in FRAGMENTS for n, d in DOCUMENTS.items()
    ]
    assert dict(zip(DOCUMENTS, kinds, strict=True)) == dict.fromkeys(DOCUMENTS, True)


def test_the_arithmetic_of_the_speed_up_is_right() -> None:
    examples = blocks(TEXTS["docs/how-eagle-works.md"], "python")
    assert sum(example.count("assert") for example in examples) >= 5
    names: dict[str, Any] = {}
    for example in examples:
        exec(example, names)


def test_the_page_of_columns_names_those_that_there_are() -> None:
    from eagle_batch.data.schema import ERROR_SCHEMA, GENERATION
    from eagle_batch.errors import Reason
    from eagle_batch.pipeline import OUTPUT_COLUMNS

    text = TEXTS["docs/output-schema.md"]
    fields = [GENERATION.field(n).name for n in range(GENERATION.num_fields)]
    for name in (*OUTPUT_COLUMNS, *fields, *ERROR_SCHEMA.names, *Reason):
        assert f"`{name}`" in text, name


def test_the_reference_file_is_what_the_command_prints() -> None:
    stored = (REPOSITORY / "pipelines" / "reference.yaml").read_text("utf-8")
    hint = "run: eagle-batch reference > pipelines/reference.yaml"
    assert stored == reference_yaml(), hint


def test_the_reference_names_every_field_with_its_default(tmp_path: Path) -> None:
    path = tmp_path / "pipelines" / "reference.yaml"
    path.parent.mkdir()
    path.write_text(reference_yaml())
    shown = load_pipeline(path)
    given = yaml.safe_load(reference_yaml())
    least = {
        "name": "reference",
        "input": {"path": given["input"]["path"]},
        "target": {"model": given["target"]["model"]},
        "speculation": {"head": given["speculation"]["head"]},
        "stages": [{"name": "answer", "messages": given["stages"][0]["messages"]}],
        "output": {"path": given["output"]["path"]},
    }
    path.write_text(yaml.safe_dump(least))
    assert load_pipeline(path) == shown
    assert list(given) == list(Pipeline.model_fields)
