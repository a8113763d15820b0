"""From a clean clone to rows that are read, a report and a resumed job, with the README alone.

The commands are those of the README's first console block, typed as they stand there, in an
environment of their own. The first one is interrupted as by Ctrl-C, since people do that.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.end_to_end.commands import PATIENCE_S, shards
from tests.test_docs import blocks
from tests.test_docs_pages import TEXTS

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(3000)]

#: Making an environment downloads a gigabyte where pip has no cache; a busy machine decodes slowly.
LONG_S = 1500.0


@pytest.fixture(scope="module")
def clone(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("newcomer") / "eagle-batch"
    if not (repository / ".git").exists():
        pytest.skip("not in a git checkout")
    subprocess.run(["git", "clone", "--quiet", str(repository), str(folder)], check=True)
    return folder


def environment() -> dict[str, str]:
    """What a new shell has: nothing that points at this checkout or its environment."""
    hidden = {"PYTHONPATH", "VIRTUAL_ENV", "OMP_NUM_THREADS", "MAKEFLAGS", "MAKELEVEL"}
    return {name: value for name, value in os.environ.items() if name not in hidden}


def run(command: str, folder: Path) -> str:
    """Run one line in a shell; return what it printed."""
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=LONG_S,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout


def interrupt_after_a_shard(command: str, folder: Path) -> str:
    """Run a line until it has committed a shard, then press Ctrl-C; return what it printed."""
    log = folder.parent / "log"
    with log.open("w") as handle:
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=folder,
            env=environment(),
            stdout=handle,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    end = time.monotonic() + LONG_S
    while not shards(folder / "runs" / "synth"):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    process.wait(PATIENCE_S)
    return log.read_text()


def test_the_readme_alone_leads_to_rows_a_report_and_a_resumed_job(clone: Path) -> None:
    (block,) = blocks(TEXTS["README.md"], "console")
    make, show, again = (
        re.sub(r"\s+#.*", "", line.removeprefix("$ ")) for line in block.splitlines()
    )
    assert "run the same command again" in interrupt_after_a_shard(make, clone)
    kept = {path: path.stat().st_mtime_ns for path in shards(clone / "runs" / "synth")}
    assert "complete: 64 of 64 rows, 0 quarantined" in run(again, clone)
    assert (
        kept.items()
        <= {path: path.stat().st_mtime_ns for path in shards(clone / "runs" / "synth")}.items()
    )
    assert "was complete already" in run(again, clone)
    assert "drafted and accepted" in run(show, clone)
    page = (clone / "runs" / "synth" / "report.html").read_text("utf-8")
    assert "<h2>Throughput</h2>" in page
    for snippet in blocks(TEXTS["README.md"], "python"):
        lines = [line for line in snippet.splitlines() if line]
        program = [x if x.startswith("import ") else f"print({x})" for x in lines]
        (clone / "read.py").write_text("\n".join(program))
        printed = run(".venv/bin/python read.py", clone)
        assert "num_rows: 64" in printed
        assert "topic" in printed
    assert "whole: 64 in = 64 out + 0" in run(".venv/bin/eagle-batch verify runs/synth", clone)
