"""What can be wrong with `deduplicate` and `decontaminate`, told before anything runs."""

from __future__ import annotations

import importlib.util

import pyarrow as pa

from eagle_batch.data.contamination import Contamination
from eagle_batch.data.schema import output_schema
from eagle_batch.errors import ConfigError
from eagle_batch.pipeline import OUTPUT_COLUMNS, Pipeline
from eagle_batch.pipeline.problems import suggestion


def contamination_problems(pipeline: Pipeline) -> list[str]:
    """Return one line for each file that cannot be used; reads all of them."""
    section = pipeline.decontaminate
    if section is None:
        return []
    try:
        if len(Contamination(section)):
            return []
    except ConfigError as error:
        return list(error.problems)
    words = f"no text of {section.ngram} words in {section.column!r}"
    return [f"decontaminate.against: the files hold {words}; lower decontaminate.ngram"]


def duplicate_problems(pipeline: Pipeline, source: pa.Schema) -> list[str]:
    """Return what is wrong with the column that is compared, or with its comparison."""
    section = pipeline.deduplicate
    if section is None:
        return []
    if section.method == "minhash" and importlib.util.find_spec("rensa") is None:
        needs = "minhash needs rensa; install it with: pip install 'eagle-batch[quality]'"
        return [f"deduplicate.method: {needs}"]
    schema = output_schema(pipeline, source)
    kind = schema.field(section.column).type if section.column in schema.names else None
    if kind is not None and (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        return []
    texts = [field.name for field in schema if pa.types.is_string(field.type)]
    texts = [name for name in texts if name not in OUTPUT_COLUMNS]
    found = "which is no column" if kind is None else f"a column of {kind}"
    hint = suggestion(section.column, texts) + f"expected one of {', '.join(texts)}"
    return [f"deduplicate.column: found {section.column!r}, {found}; {hint}"]
