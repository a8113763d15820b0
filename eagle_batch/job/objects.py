"""The two objects of a task: how they are encoded, put in their order, and read back.

The data object alone decides. It carries the errors object whole, between its magic number and its
first row group, where readers of Parquet do not look: its metadata names every place by its offset.
So one put makes both known, and whoever finds an errors object missing, or of another attempt,
puts the one that the data object carries:

    data/KEY      put once, by whoever is first; the rows, and the errors object of the same attempt
    errors/KEY    put after that, by anyone, with the bytes that data/KEY carries

On a store where the first one wins, all that is ever put at errors/KEY is thus of the winner. Where
the last one wins (no conditional put), each attempt looks again at the data after it has put the
errors, until both are of one attempt.

A share (rows of a task that one worker makes for another) is one such data object elsewhere:

    _job/shares/KEY-START-STOP-ATTEMPT    put once, by the attempt that it is named after

Nobody looks for shares in the store: a driver knows those of its own run, by their checksums.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from eagle_batch.errors import DROPS, LedgerError
from eagle_batch.job.store import Store
from eagle_batch.job.tasks import Commit, Lease, Share, Task

#: Raise when readers of an older version would misunderstand an output.
VERSION = "2"
PREFIX = "eagle_batch."
DATA = "data"
ERRORS = "errors"
SHARES = "_job/shares"
#: With which a Parquet file begins; what an object carries lies behind it.
MAGIC = b"PAR1"


def data_key(key: str) -> str:
    """Return where a task's rows lie."""
    return f"{DATA}/{key}.parquet"


def errors_key(key: str) -> str:
    """Return where a task's quarantined rows lie."""
    return f"{ERRORS}/{key}.parquet"


def share_key(share: Share) -> str:
    """Return where a share lies."""
    return f"{SHARES}/{share.key}-{share.start}-{share.stop}-{share.attempt}.parquet"


def sha256(data: bytes) -> str:
    """Return the checksum that commit records hold."""
    return hashlib.sha256(data).hexdigest()


#: Fields of the metadata that are whole numbers.
NUMBERS = ("rows", "errors", "tokens", "errors_bytes", "dropped")


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
    #: Checksum and size of the errors object that is carried; none in the errors object itself.
    errors_sha256: str = ""
    errors_bytes: int = 0
    #: Parts of a closed task.
    parts: tuple[Task, ...] = ()
    #: Those of `errors` that were left out on purpose.
    dropped: int = 0

    def to_metadata(self) -> dict[str, str]:
        """Return the keys and values that go into the Parquet metadata."""
        values = asdict(self)
        values["parts"] = json.dumps([asdict(part) for part in self.parts])
        return {PREFIX + name: str(value) for name, value in values.items()}


def encode(table: pa.Table, footer: Footer, compression: str, carried: bytes = b"") -> bytes:
    """Return a whole Parquet object with our metadata beside whatever the schema carries."""
    metadata = dict(table.schema.metadata or {}) | footer.to_metadata()
    schema = table.schema.with_metadata(metadata)
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, schema, compression=compression) as writer:
        assert sink.tell() == len(MAGIC)
        sink.write(carried)
        writer.write_table(table)
    return bytes(sink.getvalue())


def carried(data: bytes, footer: Footer) -> bytes | None:
    """Return the errors object that a data object carries; None where its bytes were changed."""
    errors = data[len(MAGIC) : len(MAGIC) + footer.errors_bytes]
    return errors if sha256(errors) == footer.errors_sha256 else None


def decode(key: str, data: bytes) -> tuple[pa.Table, Footer]:
    """Return the rows of one of our objects and what its footer says.

    Raises TornObjectError when it is no whole Parquet file, LedgerError when it is not ours.
    """
    try:
        table = pq.ParquetFile(pa.BufferReader(data)).read()
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
        numbers = {name: int(values[name]) for name in NUMBERS}
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
        """Put the data object, then the errors object, and return what then lies in the store.

        That is another attempt's pair where one was first; the texts are the same, so the task is
        done either way. Raises StoreError, or LedgerError when the key holds a foreign object.
        """
        key = lease.task.key
        footer = self._footer(key, lease, rows, errors)
        footer, data, listed = self._encode(
            replace(footer, tokens=tokens, parts=parts), rows, errors
        )
        if lease.exclusive and self._store.put_new(data_key(key), data):
            self._store.put_replace(errors_key(key), listed)
            return _commit(footer, data)
        if not lease.exclusive and self._store.get(data_key(key)) is None:
            self._store.put_replace(data_key(key), data)
        return self.settle(lease.task, exclusive=lease.exclusive)

    def put_share(
        self, lease: Lease, rows: pa.Table, errors: pa.Table, tokens: int, spent: int
    ) -> Share:
        """Put the rows that were made for another worker; raises StoreError."""
        task = lease.task
        units = task.rows * self._samples
        share = Share(lease.of, task.start, task.stop, lease.id, "", units, spent, tokens)
        footer = replace(self._footer(share.name, lease, rows, errors), tokens=tokens)
        _, data, _ = self._encode(footer, rows, errors)
        share = replace(share, sha256=sha256(data))
        self._store.put_replace(share_key(share), data)
        return share

    def read_share(self, share: Share) -> tuple[pa.Table, pa.Table]:
        """Return a share's rows and quarantined rows.

        Raises StoreError, or LedgerError when it is gone or other than it was when it was put.
        """
        key = share_key(share)
        data = self._store.get(key)
        if data is None or sha256(data) != share.sha256:
            raise LedgerError(f"{key}: " + ("missing" if data is None else "was changed"))
        rows, footer = decode(key, data)
        self._check(key, share.name, share.units, footer, rows.num_rows)
        listed = carried(data, footer)
        assert listed is not None, "the checksum is of the whole object"
        return rows, decode(key, listed)[0]

    def _footer(self, name: str, lease: Lease, rows: pa.Table, errors: pa.Table) -> Footer:
        counts = rows.num_rows, errors.num_rows
        footer = Footer(self._fingerprint, name, *counts, lease.id, VERSION)
        return replace(footer, dropped=_dropped(errors))

    def _encode(
        self, footer: Footer, rows: pa.Table, errors: pa.Table
    ) -> tuple[Footer, bytes, bytes]:
        """Return the data object, its footer, and the errors object that it carries."""
        listed = encode(errors, replace(footer, parts=()), self._compression)
        footer = replace(footer, errors_sha256=sha256(listed), errors_bytes=len(listed))
        return footer, encode(rows, footer, self._compression, listed), listed

    def settle(self, task: Task, *, exclusive: bool = True) -> Commit:
        """Make the errors object that of the data object; return the pair's record.

        The data object is checked whole first. Raises LedgerError, naming what is wrong with it.
        """
        data = self._data(task)
        while True:
            commit, errors = self._read(task, data)
            if self._store.get(errors_key(task.key)) != errors:
                self._store.put_replace(errors_key(task.key), errors)
            if exclusive:
                return commit
            before, data = data, self._data(task)
            if data == before:
                return commit

    def _data(self, task: Task) -> bytes:
        data = self._store.get(data_key(task.key))
        if data is None:
            raise LedgerError(f"{data_key(task.key)}: missing")
        return data

    def _read(self, task: Task, data: bytes) -> tuple[Commit, bytes]:
        """Return the record of a data object and the errors object that it carries."""
        key = data_key(task.key)
        rows, footer = decode(key, data)
        wanted = 0 if footer.parts else task.rows * self._samples
        self._check(key, task.key, wanted, footer, rows.num_rows)
        errors = carried(data, footer)
        if errors is None:
            raise LedgerError(f"{key}: the errors object that it carries was changed")
        return _commit(footer, data), errors

    def _check(self, key: str, name: str, wanted: int, footer: Footer, rows: int) -> None:
        rules = (
            (footer.version == VERSION, f"layout version {footer.version}, not {VERSION}"),
            (footer.fingerprint == self._fingerprint, "written by another job (its fingerprint)"),
            (footer.shard == name, f"belongs to {footer.shard}"),
            (footer.rows == rows, f"holds {rows} rows, its metadata says {footer.rows}"),
            (
                footer.rows + footer.errors == wanted,
                f"accounts for {footer.rows} + {footer.errors} rows, not {wanted}",
            ),
        )
        for holds, text in rules:
            if not holds:
                raise LedgerError(f"{key}: {text}")


def _commit(footer: Footer, data: bytes) -> Commit:
    return Commit(
        key=footer.shard,
        attempt=footer.attempt,
        rows=footer.rows,
        errors=footer.errors,
        data_bytes=len(data),
        data_sha256=sha256(data),
        errors_bytes=footer.errors_bytes,
        errors_sha256=footer.errors_sha256,
        tokens=footer.tokens,
        parts=footer.parts,
        dropped=footer.dropped,
    )


def _dropped(errors: pa.Table) -> int:
    return sum(reason in DROPS for reason in errors.column("reason").to_pylist())
