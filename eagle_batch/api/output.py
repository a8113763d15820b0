"""The output of a job as a value: its rows as Arrow, a `datasets.Dataset` or a Ray Dataset."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from eagle_batch.job.store import LocalStore, Store, open_store
from eagle_batch.job.verify import VerifyReport, verify
from eagle_batch.report.output import OutputFacts, read_facts, read_table

if TYPE_CHECKING:
    import datasets


class Output:
    """What a job has made so far; read anew at each call."""

    def __init__(self, path: str) -> None:
        """Open the output at a folder or URL; raises LedgerError where there is no job."""
        self.path = path
        self._store: Store = open_store(path)
        self._facts()

    def __repr__(self) -> str:
        facts = self._facts()
        return (
            f"<Output {self._store.name}: {facts.rows:,} rows, {facts.quarantined:,} quarantined, "
            f"of {facts.units:,}>"
        )

    def _facts(self) -> OutputFacts:
        return read_facts(self._store)

    @property
    def rows(self) -> int:
        """Rows that are there."""
        return self._facts().rows

    @property
    def quarantined(self) -> int:
        """Rows in the error table."""
        return self._facts().quarantined

    @property
    def complete(self) -> bool:
        """Whether every row came out or is quarantined."""
        return self._facts().complete

    @cached_property
    def pipeline(self) -> dict[str, Any]:
        """The pipeline as plain data, every default written out."""
        return self._facts().pipeline

    def batches(self) -> Iterator[pa.Table]:
        """Yield the rows shard by shard, in the order of the input; one shard is held at a time."""
        for key in self._facts().data_keys:
            yield read_table(self._store, key).replace_schema_metadata(None)

    def to_arrow(self) -> pa.Table:
        """Return all rows as one table in memory; raises LedgerError where no shard is done."""
        return pa.concat_tables(self.batches())

    def errors(self) -> pa.Table:
        """Return the quarantined rows; a table of no rows where there are none."""
        from eagle_batch.data.schema import ERROR_SCHEMA

        tables = [read_table(self._store, key) for key in self._facts().error_keys]
        plain = [table.replace_schema_metadata(None) for table in tables]
        return pa.concat_tables([ERROR_SCHEMA.empty_table(), *plain])

    def to_dataset(self) -> datasets.Dataset:
        """Return the rows as a `datasets.Dataset`, in memory."""
        import datasets

        return datasets.Dataset(self.to_arrow())

    def to_ray(self) -> Any:
        """Return the rows as a Ray Dataset, which reads the shards where its tasks run.

        Rows in a store are read through fsspec. Starts Ray where none runs.
        """
        from eagle_batch.api.ray_data import read_shards

        keys = self._facts().data_keys
        local = isinstance(self._store, LocalStore)
        return read_shards(self._store.root, keys, local=local)

    def verify(self) -> VerifyReport:
        """Prove that no row is lost, twice or hidden, as `eagle-batch verify` does."""
        return verify(self._store)


def read(path: str) -> Output:
    """Open the output of a job; raises LedgerError where there is none."""
    return Output(str(path))
