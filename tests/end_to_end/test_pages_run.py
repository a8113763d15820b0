"""Every command and every snippet of the pages is run as it is written, on less data.

What looks at an output runs in each suite, over the demo job; what makes one runs with
`-m exhaustive`. Options at the end of a command make it short: fewer rows, fewer tokens.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from eagle_batch import demo
from eagle_batch.cli import main
from tests.bench.test_explain import record
from tests.end_to_end.commands import DemoRun, eagle_batch
from tests.test_docs import blocks
from tests.test_docs_pages import TEXTS, commands_typed

#: Commands that only look; they run in this process, over the demo's output.
LOOKING = (
    *("validate", "plan", "status", "show", "verify", "report", "reference"),
    "heads explain",
)
#: First words -> what makes the command short.
FEW_TOKENS = (
    *("--set", "stages.0.sampling.max_tokens=4"),
    *("--set", "stages.1.sampling.max_tokens=4"),
)
SHORT = {
    "submit": ("--set", "input.limit=2", "--set", "engine.threads=1", *FEW_TOKENS),
    "preview": ("-n", "1", *FEW_TOKENS),
    "estimate": ("-n", "2", *FEW_TOKENS),
    "bench": ("--rows", "1", "--batch", "1", "--repeat", "1", "--max-tokens", "4"),
    "heads check": ("--rows", "2"),
}
#: Commands that other tests run: what they need is no file. The first words of each.
ELSEWHERE = {
    "submit pipelines/mine.yaml": "tests/schedule/test_cluster.py",
    "submit ...": "tests/schedule/test_cluster.py",
    # Takes an hour; the trainer's own tests train smaller heads with the same command.
    "heads train pipelines/heads/smollm2-eagle3.yaml": "tests/training/test_heads_command.py",
}

COMMANDS = sorted({re.sub(r"\s+# .*", "", line) for _, line in commands_typed()})


def words(line: str) -> str:
    return line.removeprefix("eagle-batch ")


def elsewhere(line: str) -> bool:
    return any(words(line).startswith(start) for start in ELSEWHERE)


def looks(line: str) -> bool:
    return words(line).startswith(LOOKING)


@pytest.fixture
def place(demo_run: DemoRun, repository: Path, tmp_path: Path) -> Path:
    """A folder as a reader of the pages has it: the pipelines, and an output of each."""
    shutil.copytree(repository / "pipelines", tmp_path / "pipelines")
    (tmp_path / "runs").mkdir()
    for name in ("synth", "try"):
        shutil.copytree(demo_run.output, tmp_path / "runs" / name)
    results = [record("plain"), record("chain:2", accepted_at=[0.5])]
    (tmp_path / "bench.json").write_text(json.dumps({"results": results}))
    return tmp_path


def test_the_commands_are_looking_making_or_run_elsewhere() -> None:
    assert sum(map(looks, COMMANDS)) >= 8
    for start in ELSEWHERE:
        assert any(words(line).startswith(start) for line in COMMANDS), f"no page says {start}"


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_every_command_that_looks_and_every_snippet_runs(
    place: Path, monkeypatch: pytest.MonkeyPatch, demo_target: Path
) -> None:
    monkeypatch.chdir(place)
    for line in filter(looks, COMMANDS):
        result = CliRunner().invoke(main, shlex.split(line)[1:])
        assert result.exit_code == 0, f"{line}\n{result.output}"
        assert result.output.strip()
    monkeypatch.setenv("HF_DATASETS_CACHE", str(place / "cache"))
    for snippet in blocks(TEXTS["README.md"], "python"):
        done = subprocess.run([sys.executable, "-c", snippet], check=False)
        assert done.returncode == 0, snippet


@pytest.mark.exhaustive
@pytest.mark.parametrize("line", [c for c in COMMANDS if not looks(c) and not elsewhere(c)])
def test_every_command_that_makes_something_runs(line: str, place: Path, demo_run: DemoRun) -> None:
    shutil.rmtree(place / "runs")
    head = place / "runs" / "heads" / "mine" / "head"
    head.parent.mkdir(parents=True)
    head.symlink_to(demo.head_path(demo.DEFAULT))
    (place / "questions.jsonl").write_text('{"prompt": "Why is the sky blue?"}\n')
    options = next(short for start, short in SHORT.items() if words(line).startswith(start))
    outcome = eagle_batch(*shlex.split(line)[1:], *options, cwd=place)
    assert outcome.code in {0, 3}, outcome.text


def test_the_line_for_completion_in_the_shell_completes(tmp_path: Path) -> None:
    """The line that the page appends to ~/.bashrc, with the command where bash finds it."""
    (line,) = (found for found in blocks(TEXTS["docs/README.md"], "bash") if "COMPLETE" in found)
    (evaluated,) = re.findall(r"echo '(eval .*)' >> ~/.bashrc", line)
    command = tmp_path / "eagle-batch"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m eagle_batch "$@"\n')
    command.chmod(0o755)
    script = (
        f"{evaluated}\nCOMP_WORDS=(eagle-batch sub)\nCOMP_CWORD=1\n"
        "_eagle_batch_completion eagle-batch\necho ${COMPREPLY[@]}\n"
    )
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["submit"]
