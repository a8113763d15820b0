"""The house rules that a reader relies on: which room may know which, and how long things get."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import eagle_batch

PACKAGE = Path(eagle_batch.__file__).parent
REPOSITORY = PACKAGE.parent
MODULES = sorted(PACKAGE.rglob("*.py"))

#: A room is a folder of the package, or one of these modules at its root.
MODULES_AT_THE_ROOT = {
    "__main__": "cli",
    "demo": "demo",
    "errors": "errors",
    "folders": "folders",
}

#: room -> what it may import, besides itself.
ARROWS = {
    "errors": set(),
    "folders": set(),
    "demo": {"errors", "folders"},
    "models": {"errors", "folders"},
    "engine": {"errors", "models"},
    "training": {"errors", "models", "engine"},
    "pipeline": {"errors", "demo", "engine.request"},
    # Grammars and vocabularies are looked at without torch, so that `validate` can refuse them.
    "data": {"errors", "folders", "demo", "pipeline"}
    | {"engine.request", "engine.grammars", "engine.vocabularies"},
    "stages": {"errors", "pipeline", "data", "engine.request"},
    # Rows are read as they are written.
    "report": {"errors", "pipeline", "engine.request"}
    | {"data.forms", "data.partitions", "data.plain", "data.schema"},
    "job": {
        "errors",
        "folders",
        "demo",
        "models",
        "engine",
        "training",
        "pipeline",
        "data",
        "stages",
        "report",
    },
    "schedule": {"errors", "pipeline", "data", "job"},
    "bench": {"errors", "engine", "pipeline", "data", "job"},
    # What `import eagle_batch` gives: it imports nothing before it is used.
    "": {"api"},
    "api": {"errors", "pipeline", "data", "report", "job", "engine"},
    "cli": {"demo", "errors"}
    | {"models", "engine", "training", "pipeline", "data", "report", "job", "schedule", "bench"},
}

#: library -> where it may be imported, at any depth of the code.
LIBRARIES = {
    # The pool and what it is made of: processes, nodes, the session; and the Jobs API.
    "ray": {
        "job/pool.py",
        "job/actor.py",
        "job/nodes.py",
        "job/session.py",
        "job/cluster.py",
        "job/telemetry.py",
        "job/training.py",
        "job/ray_trainer.py",
        # An output as a Ray Dataset.
        "api/ray_data.py",
    },
    "llguidance": {"engine/grammars.py"},
    "vllm": {"engine/peer.py"},
    "torch": {"models/", "engine/", "training/", "demo.py"},
    "transformers": {"models/", "engine/", "training/", "demo.py"},
}

LIGHT_ROOMS = {"errors", "demo", "pipeline", "data", "stages", "job", "schedule", "report"}
LIGHT_ROOMS |= {"api", "cli"}
HEAVY = {"torch", "transformers", "ray", "datasets", "pandas", "gguf", "accelerate"}

LONGEST_FUNCTION = 60
LONGEST_MODULE = 500


def dotted(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """Return the room of `eagle_batch.<...>`; the package itself is in none."""
    name = module.partition(".")[2].partition(".")[0]
    if name == "" or (PACKAGE / name).is_dir():
        return name
    return MODULES_AT_THE_ROOT[name]


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of everything that a module imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def may_import(room: str, name: str) -> bool:
    target = room_of(name)
    inner = name.removeprefix("eagle_batch.")
    return target in {"", room} | ARROWS[room] or any(
        inner == allowed or inner.startswith(allowed + ".") for allowed in ARROWS[room]
    )


def test_every_module_is_in_a_room_that_has_arrows() -> None:
    rooms = {room_of(dotted(path)) for path in MODULES} - {""}
    assert rooms <= ARROWS.keys()


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_imports_follow_the_arrows(path: Path) -> None:
    room = room_of(dotted(path))
    broken = [
        f"{dotted(path)}:{line} imports {name}"
        for line, name in imports(path)
        if name.split(".")[0] == "eagle_batch" and not may_import(room, name)
    ]
    assert broken == []


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_heavy_libraries_stay_in_their_places(path: Path) -> None:
    place = path.relative_to(PACKAGE).as_posix()
    broken = [
        f"{place}:{line} imports {name}"
        for line, name in imports(path)
        for library, places in LIBRARIES.items()
        if name.split(".")[0] == library
        and not any(place == allowed or place.startswith(allowed) for allowed in places)
    ]
    assert broken == []


def test_a_broken_arrow_is_seen() -> None:
    """The checks above pass on lists that are empty; here is what fills them."""
    assert may_import("engine", "eagle_batch.models.target.Target")
    assert not may_import("models", "eagle_batch.engine.request.Request")
    assert may_import("report", "eagle_batch.engine.request.EngineMetrics")
    assert not may_import("report", "eagle_batch.engine.engine.Engine")
    assert not may_import("pipeline", "eagle_batch.cli.main")


def test_the_command_and_the_driver_start_without_heavy_libraries() -> None:
    names = [
        dotted(path)
        for path in MODULES
        if room_of(dotted(path)) in LIGHT_ROOMS and path.stem != "__main__"
    ]
    assert "eagle_batch.cli" in names
    code = (
        "import importlib, json, sys\n"
        "seen = {}\n"
        f"for name in {[*names, 'eagle_batch.engine.request']!r}:\n"
        "    importlib.import_module(name)\n"
        f"    for heavy in {sorted(HEAVY)!r}:\n"
        "        if heavy in sys.modules: seen.setdefault(heavy, name)\n"
        "print(json.dumps(seen))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {}


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_functions_and_modules_stay_short(path: Path) -> None:
    long = [
        f"{node.name} has {length} lines"
        for node in functions(path)
        if (length := (node.end_lineno or node.lineno) - node.lineno + 1) > LONGEST_FUNCTION
    ]
    lines = len(path.read_text("utf-8").splitlines())
    assert long == []
    assert lines <= LONGEST_MODULE


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_a_module_says_what_it_owns(path: Path) -> None:
    text = path.read_text("utf-8")
    assert not text or ast.get_docstring(ast.parse(text))


def test_no_file_names_a_folder_of_somebodys_machine() -> None:
    machine = re.compile("|".join(["/" + "work/", "/" + "root/", "/opt/" + "pypi"]))
    roots = ["eagle_batch", "tests", "pipelines", "jobs", ".ci"]
    suffixes = {".py", ".yaml", ".md", ".toml", ".json", ""}
    files = [each for root in roots for each in (REPOSITORY / root).rglob("*")]
    files += [*REPOSITORY.glob("[!.]*.*"), REPOSITORY / "Makefile"]
    texts = [each for each in files if each.is_file() and each.suffix in suffixes]
    assert texts
    assert [
        str(each.relative_to(REPOSITORY))
        for each in texts
        if machine.search(each.read_text("utf-8", "replace"))
    ] == []
