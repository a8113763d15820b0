"""A whole pipeline in a folder: rows, a model folder with a chat template, and the YAML file."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from eagle_batch.pipeline import Pipeline, load_pipeline

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

BASE: dict[str, Any] = {
    "name": "synth",
    "input": {"path": "topics.parquet", "id": "id"},
    "target": {"model": "./model"},
    "speculation": {"method": "none"},
    "stages": [
        {"name": "question", "messages": [{"role": "user", "content": "Ask about {{ topic }}."}]},
        {"name": "answer", "messages": [{"role": "user", "content": "{{ question }}"}]},
    ],
    "output": {"path": "out"},
}


def write_model(folder: Path, template: str | None = CHATML, **config: Any) -> Path:
    """Write what planning needs of a model: its configuration and its chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    tokenizer = {"bos_token": "<s>", "eos_token": "</s>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def topics(count: int = 3) -> pa.Table:
    return pa.table({"id": list(range(count)), "topic": [f"topic {n}" for n in range(count)]})


def write_jsonl(path: Path, rows: Iterable[Mapping[str, object]]) -> Path:
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def changed(data: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy in which dotted keys have new values; `...` removes a key."""
    result: dict[str, Any] = copy.deepcopy(dict(data))
    for key, value in changes.items():
        *parents, last = [int(part) if part.isdigit() else part for part in key.split(".")]
        node: Any = result
        for part in parents:
            node = node.setdefault(part, {}) if isinstance(node, dict) else node[part]
        if value is ...:
            del node[last]
        else:
            node[last] = value
    return result


def write_pipeline(folder: Path, changes: Mapping[str, Any] | None = None) -> Path:
    """Write the YAML file; a model and three topics lie beside it, the output is in the folder."""
    write_model(folder / "model")
    if not (folder / "topics.parquet").exists():
        pq.write_table(topics(), folder / "topics.parquet")
    data = changed(BASE, {"output.path": str(folder / "out"), **(changes or {})})
    path = folder / "synth.yaml"
    path.write_text(yaml.safe_dump(data, allow_unicode=True, sort_keys=False), encoding="utf-8")
    return path


def make_pipeline(
    folder: Path, changes: Mapping[str, Any] | None = None, overrides: Sequence[str] = ()
) -> Pipeline:
    return load_pipeline(write_pipeline(folder, changes), overrides)
