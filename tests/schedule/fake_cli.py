"""`eagle-batch` with the slow fake engine in place of the real one, and else as it is.

The same stands in on the cluster: a submission names the command that is to run there. Each engine
says in a file below the folder of its `target.model` what Ray gave to its worker.
"""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

from eagle_batch import cli
from eagle_batch.engine.request import EngineSpec
from eagle_batch.job import parcel, submit
from tests.job.fake_engine import FakeEngine, build_slow


def build_telling(spec: EngineSpec) -> FakeEngine:
    import ray

    told = {
        "node": ray.get_runtime_context().get_node_id(),
        "gpus": [int(number) for number in ray.get_gpu_ids()],
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "split": spec.gpus,
    }
    Path(spec.model, f"worker-{os.getpid()}.json").write_text(json.dumps(told))
    return build_slow(spec)


def main() -> None:
    # Commands look these up when they run.
    there = ("-m", "tests.schedule.fake_cli", "submit")
    parcel.pack = partial(parcel.pack, command=there)
    submit.run_on_ray = partial(submit.run_on_ray, build=build_telling)
    cli.main()


if __name__ == "__main__":
    main()
