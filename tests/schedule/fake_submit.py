"""What a submission of the tests runs on the cluster: a pipeline with the fake engine."""

from __future__ import annotations

import sys

from eagle_batch.errors import EagleBatchError
from eagle_batch.job.submit import run_on_ray
from eagle_batch.pipeline import load_pipeline
from tests.job.fake_engine import build_fake, build_slow
from tests.job.fake_job import Watch


class Printing(Watch):
    def say(self, text: str) -> None:
        print(text, flush=True)


def main() -> int:
    build = build_slow if sys.argv[1] == "slow" else build_fake
    try:
        result = run_on_ray(load_pipeline(sys.argv[2]), Printing(), sys.argv, build=build)
    except EagleBatchError as error:
        print(f"Error: {error}", flush=True)
        return int(error.exit_code)
    print(f"complete: {result.rows} of {result.units} rows, {result.quarantined} quarantined")
    return 3 if result.quarantined else 0


if __name__ == "__main__":
    sys.exit(main())
