"""The data set card's front matter and snippets load the rows, wherever the folder lies."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from eagle_batch import demo
from eagle_batch.job.store import Store
from eagle_batch.report.card import LICENCES, render_card
from eagle_batch.report.write import write_reports
from tests.report.finished import finished


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return finished(tmp_path_factory.mktemp("job"))


def test_the_front_matter_points_at_the_rows_and_not_at_the_errors(store: Store) -> None:
    front = yaml.safe_load(render_card(store).split("---\n")[1])
    (config,) = front["configs"]
    assert config["data_files"] == [{"split": "train", "path": "data/*.parquet"}]
    assert front["size_categories"] == ["n<1K"]


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
