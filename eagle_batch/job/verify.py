"""Whether an output is whole: rows in = rows out + quarantined, by number and by id.

Every object is read and compared with its footer, its record and the plan; every finding is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from eagle_batch.data.forms import Form
from eagle_batch.data.schema import ERROR_SCHEMA
from eagle_batch.errors import DROPS, DataError, LedgerError
from eagle_batch.job.finish import sift
from eagle_batch.job.layers import RAW, finished_layer, has_layers, made_layer
from eagle_batch.job.ledger import PLAN, Identity, latest, read_identity, read_records, some
from eagle_batch.job.objects import (
    DATA,
    ERRORS,
    VERSION,
    Footer,
    data_key,
    errors_key,
    find,
    footer_of,
    read_table,
    sha256,
)
from eagle_batch.job.partition_proof import PartitionProof, same_rows
from eagle_batch.job.row_ids import InputIds, Row, SeenRows, input_ids
from eagle_batch.job.store import Store, open_store
from eagle_batch.job.tasks import Commit, Task
from eagle_batch.pipeline import Deduplicate


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with an output."""

    #: missing, damaged, foreign, mismatch, duplicate, lost, invented, forged_record,
    #: record_missing or unfinished.
    kind: str
    #: The object, and the line of a record.
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}: {self.message}"


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify` found."""

    output: str
    rows_in: int
    rows_out: int
    quarantined: int
    objects: int
    tokens: int
    findings: tuple[Finding, ...]
    #: Why the ids could not be compared with those of the input; empty where they were.
    not_compared: str = ""
    #: What became of rows of the input that are in no shard; empty where all are in one.
    account: str = ""
    #: Rows in the error table that were left out on purpose; not among the quarantined.
    dropped: int = 0
    #: What the partitions hold; empty where there are none.
    partitions: str = ""

    @property
    def balanced(self) -> bool:
        """Whether as many rows are accounted for as went in."""
        return self.rows_in == self.rows_out + self.quarantined + self.dropped

    @property
    def ok(self) -> bool:
        """Whether every row that went in is in the output, once, or in the error table, once."""
        return not self.findings and self.balanced


def verify(output: str | Store) -> VerifyReport:
    """Read a whole output and prove that no row is lost, twice or hidden; name what is wrong.

    Raises LedgerError when it is not the output of a job, StoreError when it cannot be read.
    """
    store = open_store(output) if isinstance(output, str) else output
    identity = read_identity(store)
    layers = has_layers(identity.resolved)
    report = _verify_layer(made_layer(store, layers=layers), identity)
    if layers:
        final = _verify_layer(finished_layer(store), identity)
        others = _sifted_otherwise(store, identity)
        findings = (*_named(RAW, report.findings), *final.findings, *others)
        report = replace(final, findings=findings, objects=report.objects + final.objects)
    return _verify_partitions(finished_layer(store) if layers else store, identity, report)


def _verify_partitions(store: Store, identity: Identity, report: VerifyReport) -> VerifyReport:
    """Add what there is to say of the partitions of the rows in `data/`."""
    try:
        commits = tuple(latest(read_records(store)).values())
    except LedgerError:
        return report  # Damaged records are a finding already.
    proof = PartitionProof(store, identity.form, commits)
    findings = (*report.findings, *(Finding(*problem) for problem in proof.problems()))
    objects = report.objects + proof.objects
    return replace(report, findings=findings, objects=objects, partitions=proof.said())


def _verify_layer(store: Store, identity: Identity) -> VerifyReport:
    try:
        rows = input_ids(identity)
        problems = rows.selection_problems(identity.resolved["input"]["limit"])
        if problems:
            found = [Finding("mismatch", PLAN, problem) for problem in problems]
            return _Verifier(store, identity, findings=found).run()
        report = _Verifier(store, identity, rows).run()
        return replace(report, account=rows.account())
    except DataError as error:
        # Gone, changed, or out of reach from here; maybe only now.
        report = _Verifier(store, identity).run()
        return replace(report, not_compared=str(error))


def _named(layer: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    return (replace(each, where=f"{layer}/{each.where}") for each in findings)


def _sifted_otherwise(store: Store, identity: Identity) -> Iterator[Finding]:
    """Take out the duplicates once more, and tell which shards hold something else."""
    section = Deduplicate.model_validate(identity.resolved["deduplicate"])
    made = made_layer(store, layers=True)
    try:
        for shard in sift(made, identity.form, identity.tasks, section):
            key = data_key(shard.task.key, identity.form)
            if not _same_rows(store, identity.form, key, shard.rows):
                yield Finding("mismatch", key, "holds other rows than are left without duplicates")
    except LedgerError:
        return  # The layer that was made is not whole, which is a finding already.


def _same_rows(store: Store, form: Form, key: str, rows: pa.Table) -> bool:
    try:
        found = find(store, form, key)
    except LedgerError:
        return True  # Damaged, which is a finding already.
    # So is one that is missing.
    return found is None or same_rows(found.table, rows)


@dataclass(slots=True)
class _Verifier:
    store: Store
    identity: Identity
    #: None where the input cannot be read: then rows are compared with each other alone.
    input: InputIds | None = None
    findings: list[Finding] = field(default_factory=list)
    seen: SeenRows = field(default_factory=SeenRows)
    rows: int = 0
    errors: int = 0
    dropped: int = 0
    tokens: int = 0
    objects: int = 0
    schema: pa.Schema | None = None

    def run(self) -> VerifyReport:
        listed = self.store.list(DATA) | self.store.list(ERRORS)
        records = self._records()
        tasks = list(self.identity.tasks)
        for task in tasks:  # grows by the parts of closed tasks while we go
            tasks += self._task(task, listed, records.get(task.key))
        self._strangers(tasks, listed, records)
        for key, (name, sample), first in self.seen.duplicates(self._rows_again):
            self._find("duplicate", key, f"id {name!r}, sample {sample} is also in {first}")
        return VerifyReport(
            output=self.store.name,
            rows_in=self.identity.units,
            rows_out=self.rows,
            quarantined=self.errors - self.dropped,
            dropped=self.dropped,
            objects=self.objects,
            tokens=self.tokens,
            findings=tuple(self.findings),
        )

    def _find(self, kind: str, where: str, message: str) -> None:
        self.findings.append(Finding(kind, where, message))

    def _records(self) -> dict[str, Commit]:
        try:
            return latest(read_records(self.store))
        except LedgerError as error:
            where, _, text = str(error).partition(": ")
            self._find("forged_record", where, text)
            return {}

    def _task(self, task: Task, listed: Iterable[str], record: Commit | None) -> tuple[Task, ...]:
        key = data_key(task.key, self.identity.form)
        if key not in listed:
            if record is None:
                self._find("unfinished", key, "not made yet; run the job again to make it")
            else:
                self._find("missing", key, "was committed and is gone")
            return ()
        data = self._read_data(key)
        errors = self._read_errors(errors_key(task.key, self.identity.form), data)
        if data is None or errors is None:
            return ()
        self._compare(task, data, errors)
        self._compare_record(task, data, errors, record)
        self._take_rows(task, data, errors)
        return data.footer.parts

    def _read_data(self, key: str) -> _Object | None:
        try:
            found = find(self.store, self.identity.form, key)
        except LedgerError as error:
            self.objects += 1
            self._find("damaged", key, str(error).partition(": ")[2])
            return None
        if found is None:
            self._find("missing", key, "there is no such object")
            return None
        self.objects += 1
        size, checksum = len(found.data), sha256(found.data)
        return _Object(key, found.table, found.footer, size, checksum, found.errors is not None)

    def _read_errors(self, key: str, data: _Object | None) -> _Object | None:
        """Read an errors object; where its form says nothing, `data` speaks for it."""
        stored, form = self.store.get(key), self.identity.form
        if stored is None:
            self._find("missing", key, "there is no such object")
            return None
        self.objects += 1
        try:
            table = read_table(form, key, stored, ERROR_SCHEMA)
            said = footer_of(key, table) if form.stamp is None else None
        except LedgerError as error:
            self._find("damaged", key, str(error).partition(": ")[2])
            return None
        footer = said if data is None or said is not None else data.footer
        return None if footer is None else _Object(key, table, footer, len(stored), sha256(stored))

    def _compare(self, task: Task, data: _Object, errors: _Object) -> None:
        for item in (data, errors):
            for holds, kind, text in self._rules(task, item):
                if not holds:
                    self._find(kind, item.key, text)
        footer = data.footer
        wanted = 0 if footer.parts else task.rows * self.identity.samples
        rules = (
            (footer.rows == data.table.num_rows, f"holds {data.table.num_rows} rows"),
            (footer.errors == errors.table.num_rows, f"{errors.table.num_rows} rows in errors/"),
            (footer.rows + footer.errors == wanted, f"the plan wants {wanted} rows"),
            (footer.errors_sha256 == errors.sha256, "another errors object than it was put with"),
            (data.carries, "the errors object that it carries was changed"),
            (_covers(task, footer.parts), "its parts do not cover its rows"),
        )
        says = f"; its metadata says {footer.rows} rows and {footer.errors} quarantined"
        for holds, text in rules:
            if not holds:
                self._find("mismatch", data.key, text + says)
        self._compare_schema(data)

    def _rules(self, task: Task, item: _Object) -> tuple[tuple[bool, str, str], ...]:
        footer = item.footer
        return (
            (footer.version == VERSION, "foreign", f"layout version {footer.version}"),
            (
                footer.fingerprint == self.identity.fingerprint,
                "foreign",
                f"fingerprint {footer.fingerprint[:12]} is of another job",
            ),
            (footer.shard == task.key, "foreign", f"was written as {footer.shard}"),
        )

    def _compare_schema(self, data: _Object) -> None:
        schema = data.table.schema.remove_metadata()
        if self.schema is None:
            self.schema = schema
        elif not schema.equals(self.schema):
            self._find("mismatch", data.key, "its columns differ from those of the first object")

    def _compare_record(
        self, task: Task, data: _Object, errors: _Object, record: Commit | None
    ) -> None:
        if record is None:
            self._find("record_missing", data.key, "no commit record; run the job again to adopt")
            return
        footer = data.footer
        pairs: tuple[tuple[str, Any, Any], ...] = (
            ("attempt", record.attempt, footer.attempt),
            ("rows", record.rows, footer.rows),
            ("errors", record.errors, footer.errors),
            ("dropped", record.dropped, footer.dropped),
            ("tokens", record.tokens, footer.tokens),
            ("parts", record.parts, footer.parts),
            ("data_bytes", record.data_bytes, data.size),
            ("data_sha256", record.data_sha256, data.sha256),
            ("errors_bytes", record.errors_bytes, errors.size),
            ("errors_sha256", record.errors_sha256, errors.sha256),
        )
        wrong = [f"{name} is {says}, found {found}" for name, says, found in pairs if says != found]
        if wrong:
            self._find("forged_record", f"record of {task.key}", "; ".join(wrong))

    def _take_rows(self, task: Task, data: _Object, errors: _Object) -> None:
        self.rows += data.table.num_rows
        self.errors += errors.table.num_rows
        if "reason" in errors.table.column_names:
            self.dropped += sum(each in DROPS for each in errors.table["reason"].to_pylist())
        self.tokens += data.footer.tokens
        if not all({"id", "sample"} <= set(item.table.schema.names) for item in (data, errors)):
            self._find("mismatch", data.key, "it or its errors object has no id and sample")
            return
        for item in (data, errors):
            repeated = item.table.num_rows - len(set(item.rows()))
            if repeated:
                self._find("duplicate", item.key, f"{repeated} rows are in it more than once")
            if self.input is None:
                self.seen.add(item.key, item.rows())
        if self.input is not None and not data.footer.parts:
            self._compare_ids(self.input.rows(task), data, errors)

    def _compare_ids(self, wanted: set[Row], data: _Object, errors: _Object) -> None:
        made, bad = set(data.rows()), set(errors.rows())
        for kind, where, rows, text in (
            ("lost", data.key, wanted - made - bad, "neither here nor in errors/"),
            ("invented", data.key, made - wanted, "not among the shard's input rows"),
            ("invented", errors.key, bad - wanted, "not among the shard's input rows"),
            ("duplicate", data.key, made & bad, "both here and in errors/"),
        ):
            if rows:
                names = some([f"id {name!r}, sample {sample}" for name, sample in sorted(rows)])
                self._find(kind, where, f"{names}: {text}")

    def _rows_again(self, key: str) -> Iterator[Row]:
        form = self.identity.form
        if key.startswith(f"{DATA}/"):
            found = find(self.store, form, key)
            return iter(()) if found is None else _rows(found.table)
        return _rows(read_table(form, key, self.store.get(key) or b"", ERROR_SCHEMA))

    def _strangers(
        self, tasks: Iterable[Task], listed: Iterable[str], records: dict[str, Commit]
    ) -> None:
        keys = {task.key for task in tasks}
        form = self.identity.form
        ours = {name(key, form) for key in keys for name in (data_key, errors_key)}
        for key in sorted(set(listed) - ours):
            self._find("foreign", key, "this job did not write it")
        for key in sorted(set(records) - keys):
            self._find("forged_record", f"record of {key}", "the plan has no such shard")


@dataclass(frozen=True, slots=True)
class _Object:
    key: str
    table: pa.Table
    footer: Footer
    size: int
    sha256: str
    #: Of a data object: whether the errors object that it carries is as its metadata says.
    carries: bool = False

    def rows(self) -> Iterator[Row]:
        """Return id and sample of each row."""
        return _rows(self.table)


def _rows(table: pa.Table) -> Iterator[Row]:
    columns = (table.column(name).to_pylist() for name in ("id", "sample"))
    return zip(*columns, strict=True)


def _covers(task: Task, parts: tuple[Task, ...]) -> bool:
    if not parts:
        return True
    edges = [part.start for part in parts] + [parts[-1].stop]
    starts = [parts[0].start] + [part.stop for part in parts]
    return edges == starts and (edges[0], edges[-1]) == (task.start, task.stop)
