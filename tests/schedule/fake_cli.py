"""`eagle-batch` with the slow fake engine in place of the real one, and else as it is.

The same stands in on the cluster: a submission names the command that is to run there.
"""

from __future__ import annotations

from functools import partial

from eagle_batch import cli
from eagle_batch.job import parcel, submit
from tests.job.fake_engine import build_slow


def main() -> None:
    # Commands look these up when they run.
    there = ("-m", "tests.schedule.fake_cli", "submit")
    parcel.pack = partial(parcel.pack, command=there)
    submit.run_on_ray = partial(submit.run_on_ray, build=build_slow)
    cli.main()


if __name__ == "__main__":
    main()
