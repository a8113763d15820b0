"""Machine code is kept for the files that it was made of, and for no others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import eagle_batch

compiling = pytest.importorskip("eagle_batch.models.compiling")

PACKAGE = Path(eagle_batch.__file__).parent


def test_every_file_with_kernels_counts() -> None:
    made = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if "import compiled\n" in path.read_text("utf-8")
    }
    assert made == set(compiling.SOURCES)


def test_another_state_of_the_files_has_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in compiling.SOURCES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    (tmp_path / "models" / "compiling.py").touch()
    monkeypatch.setattr(compiling, "__file__", str(tmp_path / "models" / "compiling.py"))
    states = []
    for name in ("", *compiling.SOURCES):
        if name:
            (tmp_path / name).write_text("x = 2\n")
        compiling._state.cache_clear()
        states.append(compiling._state())
    compiling._state.cache_clear()
    assert len(set(states)) == len(states)


@pytest.mark.parametrize("home", ["file", "nowhere"])
def test_where_nothing_can_be_kept_kernels_are_compiled_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(
        "EAGLE_BATCH_CACHE", str(tmp_path / "file") if home == "file" else "~nobody-of-that-name/x"
    )
    compiling._folder.cache_clear()
    assert compiling._folder() is None

    def double(x: int) -> int:
        return 2 * x

    assert compiling.compiled(nogil=True)(double)(21) == 42
    compiling._folder.cache_clear()


_PROGRAM = """
import numba
from eagle_batch.models.compiling import compiled

@compiled(nogil=True)
def double(x):
    return 2 * x

@numba.njit
def other(x):
    return x

assert double(21) == 42
print(len(double.stats.cache_hits), numba.config.CACHE_DIR)
"""


def test_code_is_kept_below_the_cache_of_this_package(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    environment = {"EAGLE_BATCH_CACHE": str(tmp_path / "kept"), "PYTHONPATH": str(PACKAGE.parent)}
    found = [
        subprocess.run(
            [sys.executable, str(program)],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for _ in range(2)
    ]
    # The second process compiles nothing, and settings that others see are as they were.
    assert found == [["0"], ["1"]]
    folders = list((tmp_path / "kept" / "kernels").iterdir())
    assert [folder.name for folder in folders] == [compiling._state()]
