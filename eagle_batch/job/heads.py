"""What runs in the trainer's process: a head learns from a job's texts and goes to its output."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from eagle_batch.job.adapting import HEAD, WEIGHTS, Round, head_place
from eagle_batch.job.head_copy import PARTS, newest_head
from eagle_batch.job.spec import WorkerSpec, engine_spec
from eagle_batch.job.store import Store, open_store
from eagle_batch.pipeline.locations import is_hub_id
from eagle_batch.training.learnt import Learnt
from eagle_batch.training.samples import Sample

CARD = """# A head for {target}

Trained by eagle-batch beside the job `{name}`, on {tokens:,} tokens of that job's own texts. On
texts of the job that it never learnt from, a chain of its drafts is expected to give {gain:.2f}
tokens a pass of the target.

It fits this target only. Another pipeline drafts with it by

```yaml
speculation: {{head: {place}}}
```
"""


class TrainingJob:
    """Owns the head in the output; nobody else writes there."""

    def __init__(self, spec: WorkerSpec, store: Store | None = None) -> None:
        """Load the target and the head that an earlier run, or the pipeline, has.

        Raises ModelError, HeadError or StoreError.
        """
        from eagle_batch.training.online import open_trainer

        self._pipeline = spec.pipeline
        self._store = store or open_store(spec.pipeline.output.path)
        options = engine_spec(spec)
        start = options.head
        if WEIGHTS in self._store.list(HEAD):
            start = newest_head(spec.pipeline.output.path, self._store)
        self._trainer = open_trainer(
            options.model,
            start,
            dtype=options.dtype,
            device=options.device,
            threads=options.threads,
        )

    def round(self, work: Round) -> Learnt:
        """Learn; a head that drafts better than the one in use lies in the output afterwards.

        Raises HeadError or StoreError where it cannot be put there.
        """
        samples = [Sample(text.tokens, text.prompt_tokens) for text in work.texts]
        found = self._trainer.round(samples, work.seconds)
        if found.used:
            self._put(found.tokens, found.after)
        return found

    def _put(self, tokens: int, gain: float) -> None:
        """Replace the head: each object whole, and the configuration stays what it was."""
        target = self._pipeline.target.model
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch, HEAD)
            self._trainer.export(folder, verifier=target if is_hub_id(target) else "")
            for name in PARTS:
                self._store.put_replace(f"{HEAD}/{name}", (folder / name).read_bytes())
        card = CARD.format(
            target=os.path.basename(target.rstrip("/")),  # noqa: PTH119 - may be a URL
            name=self._pipeline.name,
            tokens=tokens,
            gain=gain,
            place=head_place(self._store.name),
        )
        self._store.put_replace(f"{HEAD}/README.md", card.encode())
