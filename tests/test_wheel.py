"""The built wheel is what users install: it holds the whole package and needs no checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from eagle_batch import demo

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir"]
    subprocess.run([*command, str(folder), str(repository)], check=True)
    (path,) = folder.glob("eagle_batch-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target"]
    subprocess.run([*command, str(folder), str(wheel)], check=True)
    return folder


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(
    wheel: Path, repository: Path
) -> None:
    package = repository / "eagle_batch"
    files = {
        path.relative_to(repository).as_posix()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        licence = [name for name in archive.namelist() if name.endswith("/LICENSE")]
    assert files == names
    assert "eagle_batch/py.typed" in names
    assert licence


def test_the_installed_command_explains_itself_far_from_the_checkout(
    installed: Path, tmp_path: Path
) -> None:
    environment = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, str(installed / "bin" / "eagle-batch"), "--help"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "submit" in done.stdout


def test_every_demo_target_has_its_head_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    for target in demo.TARGETS.values():
        folder = f"eagle_batch/shipped/{target.head}/"
        assert any(
            name.startswith(folder) and name.endswith((".safetensors", ".bin")) for name in names
        )
