"""The two objects of a task: how they are encoded, put in their order, and read back.

The data object alone decides. It carries the errors object whole, where no reader of rows looks,
and says what it is; see `data/forms.py`. So one put makes both known, and whoever finds an errors
object missing, or of another attempt, puts the one that the data object carries:

    data/KEY      put once, by whoever is first; the rows, and the errors object of the same attempt
    errors/KEY    put after that, by anyone, with the bytes that data/KEY carries

On a store where the first one wins, all that is ever put at errors/KEY is thus of the winner. Where
the last one wins (no conditional put), each attempt looks again at the data after it has put the
errors, until both are of one attempt.

A form that can carry nothing (JSON lines) has a third object, the stamp, put before the two. Its
name is that of the task and the checksum of the data: so the data object still decides, and one
that is not whole, or not ours, has none. Attempts that made the same bytes share the first's.

A share (rows of a task that one worker makes for another) is one such data object elsewhere, in
Arrow whatever the form of the output:

    _job/shares/KEY-START-STOP-ATTEMPT    put once, by the attempt that it is named after

Nobody looks for shares in the store: a driver knows those of its own run, by their checksums.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

import pyarrow as pa

from eagle_batch.data.forms import BROKEN, Arrow, Form, stamp_key
from eagle_batch.errors import DROPS, LedgerError
from eagle_batch.job.store import Store
from eagle_batch.job.tasks import Commit, Lease, Share, Task

#: Raise when readers of an older version would misunderstand an output.
VERSION = "2"
PREFIX = "eagle_batch."
DATA = "data"
ERRORS = "errors"
SHARES = "_job/shares"
#: How shares are written, which nobody else reads.
_SHARED = Arrow()


def data_key(key: str, form: Form) -> str:
    """Return where a task's rows lie."""
    return f"{DATA}/{key}{form.ending}"


def errors_key(key: str, form: Form) -> str:
    """Return where a task's quarantined rows lie."""
    return f"{ERRORS}/{key}{form.ending}"


def share_key(share: Share) -> str:
    """Return where a share lies."""
    name = f"{share.key}-{share.start}-{share.stop}-{share.attempt}"
    return f"{SHARES}/{name}{_SHARED.ending}"


def sha256(data: bytes) -> str:
    """Return the checksum that commit records hold."""
    return hashlib.sha256(data).hexdigest()


#: Fields of the metadata that are whole numbers.
NUMBERS = ("rows", "errors", "tokens", "errors_bytes", "dropped")


class TornObjectError(LedgerError):
    """An object of ours cannot be read: it is not whole."""


@dataclass(frozen=True, slots=True)
class Footer:
    """What one of our objects says about itself."""

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

    def said(self) -> dict[str, str]:
        """Return the names and values that go into an object's metadata."""
        values = asdict(self)
        values["parts"] = json.dumps([asdict(part) for part in self.parts])
        return {PREFIX + name: str(value) for name, value in values.items()}


@dataclass(frozen=True, slots=True)
class Found:
    """A data object as it lies in the store, and what it says and carries."""

    data: bytes
    table: pa.Table
    footer: Footer
    #: The errors object; None where its bytes were changed.
    errors: bytes | None


def find(store: Store, form: Form, key: str) -> Found | None:
    """Return a data object by its key; None where there is none.

    Raises TornObjectError when it is not whole, LedgerError when it is not ours.
    """
    data = store.get(key)
    if data is None:
        return None
    if form.stamp is None:
        return _opened(form, key, data)
    stamp = store.get(stamp_key(key, data))
    if stamp is None:
        raise TornObjectError(f"{key}: not a whole {form.name} file of ours: no stamp fits it")
    said = read_table(form.stamp, stamp_key(key, data), stamp)
    footer = footer_of(key, said)
    schema = said.schema.remove_metadata()
    table = read_table(form, key, data, schema)
    return Found(data, table, footer, _carried(form.stamp, stamp, footer))


def _opened(form: Form, key: str, data: bytes) -> Found:
    table = read_table(form, key, data)
    footer = footer_of(key, table)
    return Found(data, table, footer, _carried(form, data, footer))


def read_table(form: Form, key: str, data: bytes, schema: pa.Schema | None = None) -> pa.Table:
    """Return the rows of an object; raises TornObjectError when it is not whole."""
    try:
        return form.read(data, schema)
    except BROKEN as error:
        text = str(error).split("\n")[0]
        raise TornObjectError(
            f"{key}: not a whole {form.name} file ({len(data)} bytes): {text}"
        ) from error


def _carried(form: Form, data: bytes, footer: Footer) -> bytes | None:
    errors = form.carried(data, footer.errors_bytes)
    return errors if sha256(errors) == footer.errors_sha256 else None


def footer_of(key: str, table: pa.Table) -> Footer:
    """Return what an object says, by the metadata of its schema; raises LedgerError."""
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

    def __init__(self, store: Store, fingerprint: str, form: Form, samples: int) -> None:
        self._store = store
        self._fingerprint = fingerprint
        #: How the tables are written.
        self.form = form
        self._samples = samples

    def data_key(self, task: Task) -> str:
        """Return where the task's rows lie."""
        return data_key(task.key, self.form)

    def errors_key(self, task: Task) -> str:
        """Return where the task's quarantined rows lie."""
        return errors_key(task.key, self.form)

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
        footer = replace(self._footer(lease.task.key, lease, rows, errors), tokens=tokens)
        listed = self.form.write(errors, footer.said())
        footer = replace(_carrying(footer, listed), parts=parts)
        data, won = self._put_data(lease, rows, footer, listed)
        if won and lease.exclusive:
            self._store.put_replace(self.errors_key(lease.task), listed)
            return _commit(footer, data)
        return self.settle(lease.task, exclusive=lease.exclusive)

    def _put_data(
        self, lease: Lease, rows: pa.Table, footer: Footer, listed: bytes
    ) -> tuple[bytes, bool]:
        """Put the data object, its stamp first; return it, and whether both are of this attempt."""
        key, form = self.data_key(lease.task), self.form
        if form.stamp is None:
            data = form.write(rows, footer.said(), listed)
            return data, self._put_first(lease, key, data)
        data = form.write(rows)
        stamp = form.stamp.write(rows.schema.empty_table(), footer.said(), listed)
        ours = self._put_first(lease, stamp_key(key, data), stamp)
        return data, self._put_first(lease, key, data) and ours

    def put_share(
        self, lease: Lease, rows: pa.Table, errors: pa.Table, tokens: int, spent: int
    ) -> Share:
        """Put the rows that were made for another worker; raises StoreError."""
        task = lease.task
        units = task.rows * self._samples
        share = Share(lease.of, task.start, task.stop, lease.id, "", units, spent, tokens)
        footer = replace(self._footer(share.name, lease, rows, errors), tokens=tokens)
        listed = _SHARED.write(errors, footer.said())
        data = _SHARED.write(rows, _carrying(footer, listed).said(), listed)
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
        found = _opened(_SHARED, key, data)
        listed = self._checked(key, share.name, share.units, found)
        return found.table, read_table(_SHARED, key, listed)

    def _footer(self, name: str, lease: Lease, rows: pa.Table, errors: pa.Table) -> Footer:
        counts = rows.num_rows, errors.num_rows
        footer = Footer(self._fingerprint, name, *counts, lease.id, VERSION)
        return replace(footer, dropped=_dropped(errors))

    def _put_first(self, lease: Lease, key: str, data: bytes) -> bool:
        """Put an object where there is none; tell whether it was this one that was put."""
        if lease.exclusive:
            return self._store.put_new(key, data)
        if self._store.get(key) is not None:
            return False
        self._store.put_replace(key, data)
        return True

    def settle(self, task: Task, *, exclusive: bool = True) -> Commit:
        """Make the errors object that of the data object; return the pair's record.

        The data object is checked whole first. Raises LedgerError, naming what is wrong with it.
        """
        found = self._find(task)
        while True:
            wanted = 0 if found.footer.parts else task.rows * self._samples
            errors = self._checked(self.data_key(task), task.key, wanted, found)
            if self._store.get(self.errors_key(task)) != errors:
                self._store.put_replace(self.errors_key(task), errors)
            if exclusive:
                return _commit(found.footer, found.data)
            before, found = found, self._find(task)
            if (found.data, found.errors) == (before.data, before.errors):
                return _commit(found.footer, found.data)

    def forget(self, task: Task) -> None:
        """Delete a data object, and what speaks for it."""
        key = self.data_key(task)
        data = self._store.get(key)
        self._store.delete(key)
        if data is not None and self.form.stamp is not None:
            self._store.delete(stamp_key(key, data))

    def _find(self, task: Task) -> Found:
        found = find(self._store, self.form, self.data_key(task))
        if found is None:
            raise LedgerError(f"{self.data_key(task)}: missing")
        return found

    def _checked(self, key: str, name: str, wanted: int, found: Found) -> bytes:
        """Return the errors object that a data object carries, if it is what it should be."""
        footer, rows = found.footer, found.table.num_rows
        rules = (
            (footer.version == VERSION, f"layout version {footer.version}, not {VERSION}"),
            (footer.fingerprint == self._fingerprint, "written by another job (its fingerprint)"),
            (footer.shard == name, f"belongs to {footer.shard}"),
            (footer.rows == rows, f"holds {rows} rows, its metadata says {footer.rows}"),
            (
                footer.rows + footer.errors == wanted,
                f"accounts for {footer.rows} + {footer.errors} rows, not {wanted}",
            ),
            (found.errors is not None, "the errors object that it carries was changed"),
        )
        for holds, text in rules:
            if not holds:
                raise LedgerError(f"{key}: {text}")
        assert found.errors is not None
        return found.errors


def _carrying(footer: Footer, listed: bytes) -> Footer:
    return replace(footer, errors_sha256=sha256(listed), errors_bytes=len(listed))


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
