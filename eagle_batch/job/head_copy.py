"""The head of an output, on this machine: read where it lies in a folder, copied from a store."""

from __future__ import annotations

import hashlib
import os

from eagle_batch.data.weights import node_lock
from eagle_batch.errors import StoreError
from eagle_batch.folders import cache_folder
from eagle_batch.job.adapting import HEAD, head_place
from eagle_batch.job.store import Store
from eagle_batch.pipeline.locations import is_url

#: What a head is made of, in the order in which it is put.
PARTS = ("config.json", "model.safetensors")


def newest_head(output: str, store: Store) -> str:
    """Return the folder of an output's head as it is now; raises StoreError where there is none.

    A node keeps one copy for each output, whose parts are replaced whole: a job may train many.
    """
    if not is_url(output):
        return head_place(output)
    name = f"job-{hashlib.sha256(output.encode()).hexdigest()[:16]}"
    folder = cache_folder() / "heads" / name
    with node_lock(name):
        folder.mkdir(parents=True, exist_ok=True)
        for part in PARTS:
            data = store.get(f"{HEAD}/{part}")
            if data is None:
                raise StoreError(f"{store.name}: {HEAD}/{part} is gone")
            partial = folder / f".{part}.{os.getpid()}.tmp"
            partial.write_bytes(data)
            partial.replace(folder / part)
    return str(folder)
