"""Every pipeline in the pages runs: on rows made for it, with an engine that needs no model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests.job.fake_job import load_job, run_in_process
from tests.test_docs_pages import DOCUMENTS

ROWS = 12
#: Columns that a page compares with something; every other one holds texts.
VALUES: dict[str, list[Any]] = {
    "language": ["en", "de"] * (ROWS // 2),
    "score": [0.25 + n / ROWS for n in range(ROWS)],
    "tags": [["a", "b"]] * ROWS,
    "conversation": [[{"role": "user", "content": "Hello."}]] * ROWS,
    "graded_examples": [[{"role": "user", "content": "Fine."}]] * ROWS,
}
NAMES = [name for name, document in DOCUMENTS.items() if "stages" in document]


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from strings(each)
    elif isinstance(value, str):
        yield value


def columns(document: dict[str, Any]) -> set[str]:
    """Names that templates, selection and `input` speak of and no stage writes."""
    parse = jinja2.Environment(autoescape=True).parse
    named = [*strings(document["stages"])]
    if "where" in document["input"]:
        named.append("{{ " + document["input"]["where"] + " }}")
    found = {name for text in named for name in jinja2.meta.find_undeclared_variables(parse(text))}
    found |= set(document["input"].get("columns") or [])
    written = {stage["name"] for stage in document["stages"]}
    return found - written - {"row", "sample", "now", document["input"].get("id")}


def made_for(document: dict[str, Any], folder: Path) -> Path:
    """Write rows and the pipeline, with its places in a folder and no model; return its file."""
    names = {
        name: VALUES.get(name, [f"{name} {n}" for n in range(ROWS)]) for name in columns(document)
    }
    key = document["input"].get("id")
    ids = {key: [f"row{n}" for n in range(ROWS)]} if key else {}
    pq.write_table(pa.table(ids | names), folder / "rows.parquet")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if enable_thinking %}<think>{% endif %}"
    )
    changed = document | {
        # An input of so many rows is made of nothing.
        "input": document["input"]
        | ({"rows": ROWS} if "rows" in document["input"] else {"path": "rows.parquet"}),
        "limits": {"max_error_rate": 1.0},
        "target": document["target"] | {"model": str(folder)},
        "speculation": {"method": "none"},
        "output": document["output"] | {"path": str(folder / "out")},
    }
    path = folder / "pipeline.yaml"
    path.write_text(yaml.safe_dump(changed))
    return path


@pytest.mark.parametrize("name", NAMES)
def test_it_makes_rows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = DOCUMENTS[name]
    (tmp_path / "my_checks.py").write_text("def is_fine(text, row):\n    return True\n")
    monkeypatch.syspath_prepend(tmp_path)
    result = run_in_process(load_job(made_for(document, tmp_path)))
    assert result.rows + result.quarantined + result.dropped == result.units > 0
    table = pq.ParquetDataset(tmp_path / "out" / "data").read()
    assert {stage["name"] for stage in document["stages"]} <= set(table.column_names)
    # What the engine without a model writes fits no schema and passes no check.
    if not any(stage.keys() & {"structured", "validators"} for stage in document["stages"]):
        assert table.num_rows == result.units


def test_each_page_s_pipelines_are_among_them() -> None:
    assert len(NAMES) >= 5
