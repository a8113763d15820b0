"""`eagle-batch` with the fake engine, as a process of its own that a test can signal and kill."""

from __future__ import annotations

import functools

from eagle_batch.cli import main
from eagle_batch.job import submit
from tests.job.fake_engine import build_fake

if __name__ == "__main__":
    setattr(submit, "run_on_ray", functools.partial(submit.run_on_ray, build=build_fake))  # noqa: B010
    main(prog_name="eagle-batch")
