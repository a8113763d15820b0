"""The first thing that runs on a cluster: compares package versions, then calls eagle-batch.

This file travels with a submission and runs as a script, where eagle-batch may be missing or of
another version: it uses the standard library alone.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import metadata
from pathlib import Path

#: What the submitter writes beside this file.
MANIFEST = "submission.json"
#: This package is compared strictly: its version decides how the pipeline is read.
OURS = "eagle-batch"
BAD_INPUT = 2


def differences(wanted: dict[str, str]) -> tuple[list[str], list[str]]:
    """Return what must be mended before anything runs, and what is merely worth knowing."""
    errors: list[str] = []
    notes: list[str] = []
    for package, here in wanted.items():
        try:
            there = metadata.version(package)
        except metadata.PackageNotFoundError:
            there = "none"
        if plain(there) == plain(here):
            continue
        line = f"{package}: {here} where it was submitted, {there} on the cluster"
        (errors if package == OURS else notes).append(line)
    return errors, notes


def plain(version: str) -> str:
    """Return a version without the part that names a build, such as +cpu."""
    return version.partition("+")[0]


def main() -> None:
    """Compare, then become `eagle-batch submit`."""
    here = Path(__file__).resolve().parent
    manifest = json.loads((here / MANIFEST).read_text("utf-8"))
    errors, notes = differences(manifest["versions"])
    for note in notes:
        print(f"note: {note}; texts can differ from those of your own machine", flush=True)  # noqa: T201
    if errors:
        print(  # noqa: T201
            "Error: the cluster cannot run this submission: "
            + "; ".join(errors)
            + f"; install the same {OURS} on every node (the image, or setup_commands of "
            "cluster.yaml) or submit with the version of the cluster",
            file=sys.stderr,
            flush=True,
        )
        sys.exit(BAD_INPUT)
    for name, changed in manifest["changed"].items():
        # A large file is known by its time of change, which unpacking has set to now.
        os.utime(here / name, ns=(changed, changed))
    # Here is where it was sent to; what this variable names is for those outside.
    os.environ.pop("RAY_API_SERVER_ADDRESS", None)
    command = [*manifest["command"], str(here / "pipeline.yaml"), "--plain"]
    os.execv(sys.executable, [sys.executable, *command])  # noqa: S606 - our own arguments


if __name__ == "__main__":
    main()
