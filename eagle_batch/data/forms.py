"""The forms in which the tables of a job lie in its output: Parquet, Arrow IPC, JSON lines.

An object of ours says what it is: `said`, names and values in the metadata of its schema; and it
carries other bytes of ours, where no reader looks:

    Parquet   behind its magic number; its metadata names every place by its offset
    Arrow     between its last batch and its footer, which names the places of the batches
    JSONL     nowhere: a line is a row. A second object, the stamp, says and carries it all, and has
              the schema, which JSON lines lack too. It is found by the checksum of the first.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from eagle_batch.data.plain import from_lines, to_lines
from eagle_batch.errors import Reason, RequestError
from eagle_batch.pipeline.result import Output

NOTHING: Mapping[str, str] = MappingProxyType({})
#: Stamps of the data objects that cannot speak for themselves.
STAMPS = "_job/stamps"
#: What reading an object raises where it is not whole.
BROKEN = (pa.ArrowException, OSError, ValueError, KeyError, TypeError)
_PARQUET_MAGIC = b"PAR1"
#: Under which Arrow keeps the schema that was written.
_PARQUET_SCHEMA = b"ARROW:schema"
#: Bytes behind the footer of an Arrow file: its length and the magic number.
_ARROW_END = 10


class Form(ABC):
    """One way of writing a table as one object."""

    #: What it is called.
    name: str
    #: How the names of its objects end.
    ending: str
    #: The form of the stamp; None where an object says and carries what is ours itself.
    stamp: Form | None = None

    @abstractmethod
    def write(
        self, table: pa.Table, said: Mapping[str, str] = NOTHING, carried: bytes = b""
    ) -> bytes:
        """Return a whole object; `said` goes beside what the schema's metadata holds."""

    @abstractmethod
    def read(self, data: bytes, schema: pa.Schema | None = None) -> pa.Table:
        """Return the rows, with what was said in the metadata of the schema.

        `schema` is needed where there is a stamp. Raises one of BROKEN where it is not whole.
        """

    def carried(self, data: bytes, size: int) -> bytes:
        """Return the `size` bytes that an object carries."""
        raise NotImplementedError

    def problem(self, schema: pa.Schema) -> str | None:
        """Return why a table of this schema cannot be written, or None."""
        try:
            self.read(self.write(pa.Table.from_batches([], schema)), schema)
        except (*BROKEN, NotImplementedError) as error:
            return " ".join(str(error).split())
        return None

    def check_row(self, row: pa.Table) -> None:  # noqa: B027 - most forms take every value
        """Raise RequestError where a row holds what its type permits and the form does not."""


class Parquet(Form):
    """Parquet files."""

    name, ending = "Parquet", ".parquet"

    def __init__(self, compression: str = "zstd", row_group_rows: int | None = None) -> None:
        self._compression = compression
        self._row_group_rows = row_group_rows

    def write(
        self, table: pa.Table, said: Mapping[str, str] = NOTHING, carried: bytes = b""
    ) -> bytes:
        """See Form."""
        sink = pa.BufferOutputStream()
        with pq.ParquetWriter(sink, _saying(table, said), compression=self._compression) as writer:
            assert sink.tell() == len(_PARQUET_MAGIC)
            sink.write(carried)
            if table.num_rows:  # `datasets` takes no row group of no rows.
                writer.write_table(table, row_group_size=self._row_group_rows)
        return bytes(sink.getvalue())

    def read(self, data: bytes, schema: pa.Schema | None = None) -> pa.Table:  # noqa: ARG002
        """See Form; the few types that Parquet lacks are as they were written, where Arrow can."""
        file = pq.ParquetFile(pa.BufferReader(data))
        table = file.read()
        written = (file.metadata.metadata or {}).get(_PARQUET_SCHEMA)
        return table if written is None else _restored(table, written)

    def carried(self, data: bytes, size: int) -> bytes:
        """See Form."""
        return data[len(_PARQUET_MAGIC) : len(_PARQUET_MAGIC) + size]


class Arrow(Form):
    """Arrow IPC files."""

    name, ending = "Arrow", ".arrow"

    def __init__(self, compression: str = "zstd") -> None:
        codec = None if compression == "none" else compression
        self._options = pa.ipc.IpcWriteOptions(compression=codec)

    def write(
        self, table: pa.Table, said: Mapping[str, str] = NOTHING, carried: bytes = b""
    ) -> bytes:
        """See Form."""
        sink = pa.BufferOutputStream()
        # A file holds one dictionary for each column, hence one chunk.
        whole = table.unify_dictionaries().combine_chunks()
        with pa.ipc.new_file(sink, _saying(table, said), options=self._options) as writer:
            writer.write_table(whole)
        data = bytes(sink.getvalue())
        end = _footer_of(data)
        return data[:end] + carried + bytes(-len(carried) % 8) + data[end:]

    def read(self, data: bytes, schema: pa.Schema | None = None) -> pa.Table:  # noqa: ARG002
        """See Form."""
        table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
        table.validate()
        return table

    def carried(self, data: bytes, size: int) -> bytes:
        """See Form."""
        start = _footer_of(data) - size - -size % 8
        return data[start : start + size]


class JsonLines(Form):
    """JSON lines, compressed or not."""

    name = "JSONL"
    _ENDINGS = MappingProxyType({"none": "", "gzip": ".gz", "zstd": ".zst"})

    def __init__(self, compression: str = "zstd") -> None:
        self._compression = compression
        self.ending = ".jsonl" + self._ENDINGS[compression]
        self.stamp = Arrow()

    def write(
        self,
        table: pa.Table,
        said: Mapping[str, str] = NOTHING,  # noqa: ARG002 - the stamp says it
        carried: bytes = b"",
    ) -> bytes:
        """See Form; whatever is said and carried goes into the stamp."""
        assert not carried
        lines = to_lines(table)
        if self._compression == "gzip":
            return gzip.compress(lines, mtime=0)
        return bytes(pa.compress(lines, "zstd")) if self._compression == "zstd" else lines

    def read(self, data: bytes, schema: pa.Schema | None = None) -> pa.Table:
        """See Form."""
        if schema is None:
            raise ValueError("nothing says what its columns are")
        if self._compression == "none":
            return from_lines(data, schema)
        with pa.CompressedInputStream(io.BytesIO(data), self._compression) as stream:
            return from_lines(stream.read(), schema)

    def check_row(self, row: pa.Table) -> None:
        """See Form; such as text that is not UTF-8, NaN, or a year that has no date."""
        if _json_problem(row):
            for name in row.column_names:
                problem = _json_problem(row.select([name]))
                if problem:
                    text = f"column {name!r} has a value that JSON has not: {problem}"
                    raise RequestError(Reason.OUT_OF_RANGE, text)


def _json_problem(table: pa.Table) -> str:
    """Return why a table cannot be written and read again; empty where it can."""
    try:
        from_lines(to_lines(table), table.schema)
    except BROKEN as error:
        return " ".join(str(error).split())
    return ""


def make_form(output: Output) -> Form:
    """Return the form that a pipeline asks for."""
    if output.format == "arrow":
        return Arrow(output.compression)
    if output.format == "jsonl":
        return JsonLines(output.compression)
    return Parquet(output.compression, output.row_group_rows)


#: One of each, to read what is there.
FORMS = (Parquet(), Arrow(), *(JsonLines(each) for each in ("none", "gzip", "zstd")))


def form_of(key: str) -> Form | None:
    """Return the form of an object by its name; None where it is none of ours."""
    return next((form for form in FORMS if key.endswith(form.ending)), None)


def stamp_key(key: str, data: bytes) -> str:
    """Return where the stamp of a data object lies: by the name and the content of the object."""
    form = form_of(key)
    assert form is not None
    name = key.rpartition("/")[2].removesuffix(form.ending)
    return f"{STAMPS}/{name}-{hashlib.sha256(data).hexdigest()}{Arrow.ending}"


def _restored(table: pa.Table, written: bytes) -> pa.Table:
    """Return seconds as seconds, and whatever else Parquet keeps as another type."""
    schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(written)))
    for place, field in enumerate(schema):
        found = table.schema.field(place)
        if found.type != field.type:
            with suppress(pa.ArrowNotImplementedError):
                column = table.column(place)
                if pa.types.is_dictionary(field.type):
                    column = column.dictionary_encode()
                table = table.set_column(place, field, column.cast(field.type))
    return table


def _saying(table: pa.Table, said: Mapping[str, str]) -> pa.Schema:
    return table.schema.with_metadata({**(table.schema.metadata or {}), **said})


def _footer_of(data: bytes) -> int:
    """Return where the footer of an Arrow file begins."""
    length = int.from_bytes(data[-_ARROW_END : -_ARROW_END + 4], "little")
    return len(data) - _ARROW_END - length
