"""The data set card's front matter and snippets load the rows, wherever the folder lies."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from eagle_batch import demo, read
from eagle_batch.job.store import Store
from eagle_batch.report.card import LICENCES, render_card
from eagle_batch.report.write import write_reports
from tests.report.finished import finished


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return finished(tmp_path_factory.mktemp("job"))


def test_the_front_matter_points_at_the_rows_and_apart_from_them_at_the_errors(
    store: Store, tmp_path: Path
) -> None:
    front = yaml.safe_load(render_card(store).split("---\n")[1])
    rows, errors = front["configs"]
    assert (rows["config_name"], errors["config_name"]) == ("default", "errors")
    assert rows["data_files"] == [{"split": "train", "path": "data/*.parquet"}]
    assert errors["data_files"] == [{"split": "train", "path": "errors/*.parquet"}]
    assert front["size_categories"] == ["n<1K"]
    clean = yaml.safe_load(render_card(finished(tmp_path, ["a"])).split("---\n")[1])
    assert [config["config_name"] for config in clean["configs"]] == ["default"]


def test_every_snippet_loads_all_rows(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_reports(store)
    card = (Path(store.root) / "README.md").read_text("utf-8")
    snippets = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert len(snippets) == 4
    monkeypatch.chdir(store.root)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    for snippet in snippets:
        names: dict[str, Any] = {}
        exec(snippet, names)
        assert len(names["rows"]) == 8, snippet


def test_the_folder_loads_by_its_path_as_it_would_from_a_hub(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import datasets

    write_reports(store)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    rows = datasets.load_dataset(store.root, split="train", cache_dir=str(tmp_path))
    assert sorted(set(rows["sample"])) == [0, 1]
    assert len(rows) == 8
    lost = datasets.load_dataset(store.root, "errors", split="train", cache_dir=str(tmp_path))
    assert set(lost["reason"]) == {"prompt_too_long"}
    assert len(lost) == 2


@pytest.mark.parametrize(("form", "compression"), [("arrow", "zstd"), ("jsonl", "gzip")])
def test_cards_of_other_forms_load_too(
    form: str, compression: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import datasets

    output = {"format": form, "compression": compression}
    store = finished(tmp_path / "job", output=output)
    write_reports(store)
    monkeypatch.chdir(store.root)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    card = (Path(store.root) / "README.md").read_text("utf-8")
    snippets = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert len(snippets) == 3
    for snippet in snippets:
        names: dict[str, Any] = {}
        exec(snippet, names)
        assert len(names["rows"]) == 8, snippet
    for config, count in (("default", 8), ("errors", 2)):
        rows = datasets.load_dataset(store.root, config, split="train", cache_dir=str(tmp_path))
        assert len(rows) == count


def test_lines_load_where_the_first_shard_of_a_column_is_all_null(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From a shard alone nobody could tell that the nulls stand for text; the card says so."""
    import datasets

    stages = [
        {"name": "one", "prompt": "{{ topic }}"},
        {"name": "two", "prompt": "{{ one }}", "when": "topic == 'late'"},
    ]
    output = {"format": "jsonl", "compression": "none", "rows_per_shard": 2, "logprobs": 1}
    store = finished(tmp_path / "job", ["a", "b", "late"], stages=stages, output=output)
    write_reports(store)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    rows = datasets.load_dataset(store.root, split="train", cache_dir=str(tmp_path))
    assert [text is None for text in rows["two"]] == [True, True, True, True, False, False]
    wanted = read(store.root).to_arrow().to_pylist()
    assert rows.to_list() == wanted
    front = yaml.safe_load(render_card(store).split("---\n")[1])
    [features] = [info["features"] for info in front["dataset_info"]]
    schema = read(store.root).to_arrow().schema
    exact = datasets.Features.from_arrow_schema(schema)
    assert datasets.Features._from_yaml_list(features) == exact


def test_it_names_every_column_and_balances_the_rows(store: Store) -> None:
    card = render_card(store)
    columns = re.findall(r"^\| `(\w+)` \|", card, re.MULTILINE)
    assert columns == ["id", "sample", "topic", "n", "one", "two", "generation", "model", "head"]
    assert "10 = 8 here + 2 in `errors/`" in card
    assert str(Path(store.root).parent) not in card
    assert "not complete" not in card


def test_an_incomplete_job_says_so(tmp_path: Path) -> None:
    store = finished(tmp_path, ["a", "b"])
    for key in store.list("_job/commits"):
        store.delete(key)
    assert "The job is not complete" in render_card(store)


def test_the_licence_of_every_demo_target_is_named() -> None:
    assert {f"{demo.PREFIX}{name}" for name in demo.TARGETS} == LICENCES.keys()
    assert all("Apache-2.0" in text for text in LICENCES.values())
