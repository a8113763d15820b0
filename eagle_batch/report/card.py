"""The data set card: a `README.md` in the output that loads, describes and credits its rows."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import yaml

from eagle_batch.data.forms import Form, JsonLines, make_form
from eagle_batch.data.plain import json_type
from eagle_batch.data.schema import ERROR_SCHEMA
from eagle_batch.pipeline.result import Output
from eagle_batch.report.output import Objects, OutputFacts, read_facts, read_table

CARD = "README.md"

#: Name of a demo target -> what its licence asks of those who share its texts.
LICENCES = {
    "demo:smollm2-135m-instruct": "SmolLM2-135M-Instruct by Hugging Face, Apache-2.0. Texts of so "
    "small a model are often wrong; they are made to try things out.",
}
OURS = {
    "id": "names the input row",
    "sample": "which of the row's samples, from 0",
    "generation": "for each stage: tokens, finish reason, target passes, drafted and accepted "
    "tokens, acceptance length, seed",
    "model": "the target that wrote the row",
    "head": "the EAGLE head that drafted; null without",
    "token_ids": "for each stage: the token ids of the prompt and of the text",
    "logprobs": "for each stage: log-probabilities of the generated tokens, and of the best ones "
    "at each place where they were asked for",
    "spans": "for each stage: how many characters were drafted, and then the target's own, in turn",
}

#: Arrow's name of a type -> that of `datasets`, where it is another one.
_DTYPES = {"double": "float64", "float": "float32", "halffloat": "float16"}

#: Rows below which a data set is of that size, in the hub's words.
SIZES = (
    (1_000, "n<1K"),
    (10_000, "1K<n<10K"),
    (100_000, "10K<n<100K"),
    (1_000_000, "100K<n<1M"),
    (10_000_000, "1M<n<10M"),
    (100_000_000, "10M<n<100M"),
    (1_000_000_000, "100M<n<1B"),
    (10_000_000_000, "1B<n<10B"),
)


def render_card(store: Objects) -> str:
    """Return the card; raises LedgerError where there is no job, StoreError where it is gone."""
    facts = read_facts(store)
    schema = read_table(store, facts.data_keys[0]).schema if facts.data_keys else pa.schema([])
    form = make_form(Output.model_validate(facts.pipeline["output"]))
    loading = LOADING[form.name].replace("ENDING", form.ending)
    parts = (
        _front_matter(facts, form, schema),
        _head(facts, form),
        _columns(facts, schema),
        loading,
        _making(facts),
    )
    return "\n".join(parts)


def _front_matter(facts: OutputFacts, form: Form, schema: pa.Schema) -> str:
    size = next((label for most, label in SIZES if facts.rows < most), SIZES[-1][1])
    folders = {"default": "data"} | ({"errors": "errors"} if facts.quarantined else {})
    values = {
        "configs": [
            {
                "config_name": name,
                "data_files": [{"split": "train", "path": f"{folder}/*{form.ending}"}],
            }
            for name, folder in folders.items()
        ],
        "pretty_name": facts.pipeline["name"],
        "size_categories": [size],
        "tags": ["synthetic", "eagle-batch"],
        "task_categories": ["text-generation"],
    }
    if isinstance(form, JsonLines):
        schemas = {"default": schema, "errors": ERROR_SCHEMA}
        values["dataset_info"] = [
            {"config_name": name, "features": [_feature(field) for field in schemas[name]]}
            for name in folders
        ]
    return f"---\n{yaml.safe_dump(values, sort_keys=False)}---\n"


def _feature(field: pa.Field) -> dict[str, Any]:
    """Return a column of JSON lines as `datasets` writes it: a file alone may hold nulls only."""
    return {"name": field.name, **_feature_type(json_type(field.type))}


def _feature_type(kind: pa.DataType) -> dict[str, Any]:
    if pa.types.is_struct(kind):
        return {"struct": [_feature(field) for field in kind]}
    if pa.types.is_list(kind):
        inner = _feature_type(kind.value_type)
        return {"list": next(iter(inner.values())) if {"dtype", "struct"} & set(inner) else inner}
    return {"dtype": _DTYPES.get(str(kind), str(kind))}


def _head(facts: OutputFacts, form: Form) -> str:
    state = "" if facts.complete else " **The job is not complete; more rows will follow.**"
    return (
        f"# {facts.pipeline['name']}\n\n"
        f"{facts.rows:,} rows of synthetic text in {len(facts.data_keys):,} {form.name} files, "
        f"made by `{_shown(facts.pipeline['target']['model'])}` with eagle-batch.{state}\n"
    )


def _columns(facts: OutputFacts, schema: pa.Schema) -> str:
    lines = ["## Columns\n", "| column | type | what |", "|---|---|---|"]
    for field in schema:
        kind = "list of struct" if pa.types.is_list(field.type) else str(field.type)
        lines.append(f"| `{_cell(field.name)}` | {kind} | {_meaning(facts, field.name)} |")
    return "\n".join(lines) + "\n"


def _meaning(facts: OutputFacts, name: str) -> str:
    if name in facts.stages:
        return f"text of the stage `{name}`"
    return OURS.get(name, "from the input")


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


#: Run in the folder of the card, which may have been moved since.
LOADING = {
    "Parquet": """## Loading

```python
import datasets
rows = datasets.load_dataset("parquet", data_files="data/*.parquet", split="train")
```

```python
import pandas
rows = pandas.read_parquet("data")
```

```python
import duckdb
rows = duckdb.sql("select * from 'data/*.parquet'")
```

```python
import polars
rows = polars.read_parquet("data/*.parquet")
```
""",
    "Arrow": """## Loading

```python
import datasets
rows = datasets.load_dataset("arrow", data_files="data/*.arrow", split="train")
```

```python
import glob, pandas
rows = pandas.concat(map(pandas.read_feather, sorted(glob.glob("data/*.arrow"))))
```

```python
import polars
rows = polars.scan_ipc("data/*.arrow").collect()
```
""",
    "JSONL": """## Loading

```python
import datasets, os
rows = datasets.load_dataset(os.getcwd(), split="train")
```

```python
import glob, pandas
files = sorted(glob.glob("data/*ENDING"))
rows = pandas.concat(pandas.read_json(file, lines=True) for file in files)
```

```python
import duckdb
rows = duckdb.sql("select * from read_json('data/*ENDING')")
```

Decimals and times are text, bytes are base64: `eagle_batch.read` gives back each column's own type.
For `.zst`, `datasets` and pandas want `pip install zstandard`.
""",
}


def _making(facts: OutputFacts) -> str:
    target, speculation = facts.pipeline["target"], facts.pipeline["speculation"]
    revision = target["revision"] or "not named"
    rest = "" if facts.complete else " + the rest, not made yet"
    errors = f"{facts.quarantined:,} in `errors/`"
    if facts.dropped:
        errors += f" + {facts.dropped:,} left out on purpose, there too"
    head = "none" if speculation["head"] is None else f"`{_shown(speculation['head'])}`"
    if (facts.metrics or {}).get("adaptation", {}).get("head"):
        head = "trained beside the job, in `head/`"
    values = (
        ("target", f"`{_shown(target['model'])}`, revision {revision}, {target['dtype']}"),
        ("head", f"{head}; it changes the speed, never the text"),
        ("seed", f"{facts.pipeline['seed']}, fingerprint `{facts.fingerprint[:16]}`"),
        ("rows", f"{facts.units:,} = {facts.rows:,} here + {errors}{rest}"),
        ("partitions", _partitions(facts)),
        ("generated tokens", f"{_tokens(facts):,}"),
        ("licence", LICENCES.get(target["model"], ASK)),
    )
    lines = "\n".join(f"- {name}: {value}" for name, value in values if value)
    return f"## How it was made\n\n{lines}\n\n{POINTERS}\n"


def _partitions(facts: OutputFacts) -> str:
    columns = ", ".join(f"`{_cell(name)}`" for name in facts.partitioned)
    return f"by {columns}, in `by/`: the same rows once more, not sent by `push`" if columns else ""


ASK = (
    "the texts are under the terms of the target and of the input; see the target's own page, and "
    "add a `license` to the lines on top before sharing them."
)


POINTERS = (
    "The pipeline, with every default, is in `_job/pipeline.json`; speed and acceptance are in "
    "[report.html](report.html). `eagle-batch verify` proves that no row is missing."
)


def _shown(name: str) -> str:
    """Return the name of a model without the folders of the machine that ran it."""
    return name.rstrip("/").rpartition("/")[2] if name.startswith("/") else name


def _tokens(facts: OutputFacts) -> int:
    document = facts.metrics or {}
    runs = [*document.get("earlier_runs", []), *([document] if document else [])]
    return sum(run["engine"]["completion_tokens"] for run in runs)
