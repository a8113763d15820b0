"""The two objects of a task: how they are encoded, put in their order, and read back.

The errors object is put first. The Parquet metadata of the data object states both counts and the
checksum of the errors object, so that the data object alone decides whether a task is done.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from eagle_batch.errors import LedgerError
from eagle_batch.job.store import Store
from eagle_batch.job.tasks import Commit, Lease, Task

#: Raise when readers of an older version would misunderstand an output.
VERSION = "1"
PREFIX = "eagle_batch."
DATA = "data"
ERRORS = "errors"


def data_key(key: str) -> str:
    """Return where a task's rows lie."""
    return f"{DATA}/{key}.parquet"


def errors_key(key: str) -> str:
    """Return where a task's quarantined rows lie."""
    return f"{ERRORS}/{key}.parquet"


def sha256(data: bytes) -> str:
    """Return the checksum that commit records hold."""
    return hashlib.sha256(data).hexdigest()


class TornObjectError(LedgerError):
    """An object of ours cannot be read as Parquet: it is not whole."""


@dataclass(frozen=True, slots=True)
class Footer:
    """What the Parquet metadata of one of our objects says about it."""

    fingerprint: str
    shard: str
    rows: int
    errors: int
    attempt: str
    version: str
    tokens: int = 0
    #: Checksum of the errors object; empty in the errors object itself.
    errors_sha256: str = ""
    #: Parts of a closed task.
    parts: tuple[Task, ...] = ()

    def to_metadata(self) -> dict[str, str]:
        """Return the keys and values that go into the Parquet metadata."""
        values = asdict(self)
        values["parts"] = json.dumps([asdict(part) for part in self.parts])
        return {PREFIX + name: str(value) for name, value in values.items()}


def encode(table: pa.Table, footer: Footer, compression: str) -> bytes:
    """Return a whole Parquet object with our metadata beside whatever the schema carries."""
    metadata = dict(table.schema.metadata or {}) | footer.to_metadata()
    sink = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata(metadata), sink, compression=compression)
    return bytes(sink.getvalue())


def decode(key: str, data: bytes) -> tuple[pa.Table, Footer]:
    """Return the rows of one of our objects and what its footer says.

    Raises TornObjectError when it is no whole Parquet file, LedgerError when it is not ours.
    """
    try:
        table = pq.read_table(pa.BufferReader(data), partitioning=None)
    except (pa.ArrowException, OSError) as error:
        text = str(error).split("\n")[0]
        raise TornObjectError(
            f"{key}: not a whole Parquet file ({len(data)} bytes): {text}"
        ) from error
    return table, _footer(key, table)


def _footer(key: str, table: pa.Table) -> Footer:
    metadata = {k.decode(): v.decode() for k, v in (table.schema.metadata or {}).items()}
    values: dict[str, Any] = {
        name.removeprefix(PREFIX): value
        for name, value in metadata.items()
        if name.startswith(PREFIX)
    }
    if not values:
        raise LedgerError(f"{key}: not written by eagle-batch (its metadata lacks {PREFIX}*)")
    try:
        numbers = {name: int(values[name]) for name in ("rows", "errors", "tokens")}
        parts = tuple(Task(**part) for part in json.loads(values["parts"]))
        return Footer(**values | numbers | {"parts": parts})
    except (KeyError, TypeError, ValueError) as error:
        raise LedgerError(f"{key}: its {PREFIX}* metadata is incomplete: {error}") from error


class Objects:
    """Writes and reads the objects of one job's tasks."""

    def __init__(self, store: Store, fingerprint: str, compression: str, samples: int) -> None:
        self._store = store
        self._fingerprint = fingerprint
        self._compression = compression
        self._samples = samples

    def put(
        self,
        lease: Lease,
        rows: pa.Table,
        errors: pa.Table,
        tokens: int = 0,
        parts: tuple[Task, ...] = (),
    ) -> Commit:
        """Put the errors object, then the data object, and return what then lies in the store.

        That is another attempt's pair where one was first; the texts are the same, so the task is
        done either way. Raises StoreError, or LedgerError when the key holds a foreign object.
        """
        key = lease.task.key
        footer = Footer(
            self._fingerprint, key, rows.num_rows, errors.num_rows, lease.id, VERSION, tokens
        )
        stored = self._put_errors(errors_key(key), errors, footer)
        footer = replace(footer, errors_sha256=sha256(stored), parts=parts)
        data = encode(rows, footer, self._compression)
        if not self._store.put_new(data_key(key), data):
            return self.read(lease.task)
        return _commit(footer, data, stored)

    def _put_errors(self, key: str, errors: pa.Table, footer: Footer) -> bytes:
        """Put the errors object and return the bytes that lie there.

        One of a crashed attempt with the same rows is kept, so that a late attempt changes nothing
        under a data object that states its checksum.
        """
        mine = encode(errors, footer, self._compression)
        if self._store.put_new(key, mine):
            return mine
        theirs = self._store.get(key)
        if theirs is not None and _same_errors(key, theirs, errors, footer.fingerprint):
            return theirs
        if self._store.get(data_key(footer.shard)) is None:
            self._store.put_replace(key, mine)
        return mine

    def read(self, task: Task) -> Commit:
        """Return the record of the pair that lies at a task's keys, after checking it whole.

        Raises LedgerError, naming the object and what is wrong with it.
        """
        key = data_key(task.key)
        data = self._store.get(key)
        if data is None:
            raise LedgerError(f"{key}: missing")
        rows, footer = decode(key, data)
        self._check(task, footer, rows.num_rows)
        stored = self._store.get(errors_key(task.key))
        if stored is None or sha256(stored) != footer.errors_sha256:
            found = "missing" if stored is None else "another than the data object was written with"
            raise LedgerError(f"{errors_key(task.key)}: {found}")
        return _commit(footer, data, stored)

    def _check(self, task: Task, footer: Footer, rows: int) -> None:
        key = data_key(task.key)
        wanted = 0 if footer.parts else task.rows * self._samples
        rules = (
            (footer.version == VERSION, f"layout version {footer.version}, not {VERSION}"),
            (footer.fingerprint == self._fingerprint, "written by another job (its fingerprint)"),
            (footer.shard == task.key, f"belongs to {footer.shard}"),
            (footer.rows == rows, f"holds {rows} rows, its metadata says {footer.rows}"),
            (
                footer.rows + footer.errors == wanted,
                f"accounts for {footer.rows} + {footer.errors} rows, not {wanted}",
            ),
        )
        for holds, text in rules:
            if not holds:
                raise LedgerError(f"{key}: {text}")


def _commit(footer: Footer, data: bytes, errors: bytes) -> Commit:
    return Commit(
        key=footer.shard,
        attempt=footer.attempt,
        rows=footer.rows,
        errors=footer.errors,
        data_bytes=len(data),
        data_sha256=sha256(data),
        errors_bytes=len(errors),
        errors_sha256=sha256(errors),
        tokens=footer.tokens,
        parts=footer.parts,
    )


def _same_errors(key: str, stored: bytes, errors: pa.Table, fingerprint: str) -> bool:
    """Tell whether a stored errors object lists the same rows; the attempt's number may differ."""
    try:
        table, footer = decode(key, stored)
    except LedgerError:
        return False
    columns = [name for name in errors.schema.names if name != "attempt"]
    if footer.fingerprint != fingerprint or table.schema.names != errors.schema.names:
        return False
    return bool(table.select(columns).equals(errors.select(columns)))
