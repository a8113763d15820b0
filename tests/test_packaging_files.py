"""The CI file and the image recipe name what there is."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def makefile_verbs(repository: Path) -> set[str]:
    text = (repository / "Makefile").read_text("utf-8")
    return set(re.findall(r"^([a-z]+):", text, re.MULTILINE))


def project(repository: Path) -> dict[str, Any]:
    document = tomllib.loads((repository / "pyproject.toml").read_text("utf-8"))
    found: dict[str, Any] = document["project"]
    return found


def test_ci_runs_verbs_of_the_makefile(repository: Path) -> None:
    workflow = yaml.safe_load((repository / ".github/workflows/ci.yml").read_text("utf-8"))
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    made = [step["run"] for step in steps if step.get("run", "").startswith("make ")]
    verbs = {word for line in made for word in line.split()[1:] if word.isalpha()}
    assert verbs >= {"lint", "types", "test", "demo"}
    used = {word for line in made for word in re.sub(r"\S+=\".*\"", "", line).split()[1:]}
    assert used <= makefile_verbs(repository)


def test_ci_tests_every_python_that_the_package_claims(repository: Path) -> None:
    workflow = yaml.safe_load((repository / ".github/workflows/ci.yml").read_text("utf-8"))
    claimed = [c.rpartition(" ")[2] for c in project(repository)["classifiers"] if ":: 3." in c]
    assert workflow["jobs"]["check"]["strategy"]["matrix"]["python"] == claimed


def test_the_image_has_the_ray_and_torch_that_the_package_needs(repository: Path) -> None:
    recipe = (repository / "Dockerfile.gpu").read_text("utf-8")
    needs = {re.split(r"[<>=\[]", item)[0]: item for item in project(repository)["dependencies"]}
    (ray,) = re.findall(r"rayproject/ray:([\d.]+)-py311", recipe)
    assert f">={ray.rpartition('.')[0]}" in needs["ray"]
    assert f"ray=={ray}" in (repository / "constraints.txt").read_text("utf-8").splitlines()
    assert needs["torch"] in recipe
    extras = set(re.findall(r"\.whl\)\[(.*?)\]", recipe)[0].split(","))
    assert extras <= project(repository)["optional-dependencies"].keys()


def test_the_constraints_pin_everything_that_an_install_asks_for(repository: Path) -> None:
    lines = (repository / "constraints.txt").read_text("utf-8").splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    versions = {canonicalize_name(pin.name): str(pin.specifier) for pin in pins}
    assert all(version.startswith("==") for version in versions.values())
    document = tomllib.loads((repository / "pyproject.toml").read_text("utf-8"))
    asked = [*document["project"]["dependencies"], *document["dependency-groups"]["dev"]]
    asked += document["project"]["optional-dependencies"]["demo"]
    for need in map(Requirement, asked):
        name = canonicalize_name(need.name)
        assert name in versions, f"{name} has no pin; run: make constraints"
        version = versions[name].removeprefix("==")
        assert need.specifier.contains(version), f"{need} does not allow {version}"
    assert len(versions) > 2 * len(asked)
