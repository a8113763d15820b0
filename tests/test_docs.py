"""The documentation is under test: its examples load, its links lead somewhere, all is named."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pyarrow.parquet as pq
import pytest

import eagle_batch
from eagle_batch.cli import main
from eagle_batch.errors import ExitCode
from eagle_batch.pipeline import load_pipeline

REPOSITORY = Path(eagle_batch.__file__).parent.parent
PIPELINES = sorted((REPOSITORY / "pipelines").glob("*.yaml"))
FOLDERS = (".", "docs", "jobs", "pipelines/data")
PAGES = sorted(page for folder in FOLDERS for page in REPOSITORY.glob(f"{folder}/*.md"))
LONGEST_README = 150


@pytest.fixture
def readme() -> str:
    return (REPOSITORY / "README.md").read_text("utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("path", PIPELINES, ids=lambda path: path.name)
def test_every_pipeline_file_is_valid(path: Path) -> None:
    pipeline = load_pipeline(path)
    assert pipeline.name == path.stem.replace("_", "-")


def test_the_readme_s_pipeline_is_valid(readme: str, tmp_path: Path) -> None:
    (example,) = blocks(readme, "yaml")
    path = tmp_path / "example.yaml"
    path.write_text(example)
    pipeline = load_pipeline(path)
    assert [stage.name for stage in pipeline.stages] == ["question", "answer"]
    assert len(example.splitlines()) <= 10


def test_the_readme_is_short(readme: str) -> None:
    assert len(readme.splitlines()) <= LONGEST_README


def commands(group: click.Group, path: str) -> Iterator[str]:
    """Yield the full name of every command that does something."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        assert command.help, f"{path} {name} has no help text"
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}"


def test_readme_and_docs_name_every_command_once_and_no_other(readme: str) -> None:
    pages = sorted((REPOSITORY / "docs").glob("*.md"))
    text = "\n".join([readme, *(page.read_text("utf-8") for page in pages)])
    named = re.findall(r"^\| `(eagle-batch [a-z -]+[a-z])", text, re.MULTILINE)
    assert sorted(named) == sorted(commands(main, "eagle-batch"))


def test_the_readme_explains_every_exit_code(readme: str) -> None:
    explained = {int(code) for code in re.findall(r"^\| (\d+) \|", readme, re.MULTILINE)}
    assert explained == {int(code) for code in ExitCode}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_relative_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text("utf-8"))
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (page.parent / link).exists()] == []


def test_the_changelog_knows_the_version() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
    changelog = (REPOSITORY / "CHANGELOG.md").read_text("utf-8")
    assert f"## [{project['version']}]" in changelog or "## [Unreleased]" in changelog


def test_the_topics_are_what_their_page_says() -> None:
    table = pq.read_table(REPOSITORY / "pipelines" / "data" / "topics.parquet")
    page = (REPOSITORY / "pipelines" / "data" / "README.md").read_text("utf-8")
    columns = {name: table[name].to_pylist() for name in table.column_names}
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == table.column_names
    assert f"{table.num_rows} topics from {len(set(columns['field']))} fields" in page
    for name in ("level", "angle"):
        assert all(f"`{value}`" in page for value in columns[name])
    assert len(set(columns["id"])) == len(set(columns["topic"])) == table.num_rows >= 240
    assert all(value for values in columns.values() for value in values)
