"""The cluster and job manifests are what Ray, KubeRay and Kubernetes accept."""

from __future__ import annotations

import copy
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from eagle_batch.errors import ExitCode

CRONJOB = "jobs/kubernetes/nightly-cronjob.yaml"
RAYJOB = "jobs/kubernetes/synth-rayjob.yaml"
ON_PREMISES = "jobs/on-premises/cluster.yaml"
KUBERAY_VARIABLE = "EAGLE_BATCH_KUBERAY_SCHEMAS"
KUBERAY = Path(os.environ.get(KUBERAY_VARIABLE, Path(__file__).parents[2] / "shared" / "kuberay"))


def load(path: Path) -> dict[str, Any]:
    document = yaml.safe_load(path.read_text("utf-8"))
    assert isinstance(document, dict)
    return document


def check_cluster(cluster: dict[str, Any]) -> dict[str, Any]:
    """Do what `ray up` does before it starts anything."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared: dict[str, Any] = prepare_config(copy.deepcopy(cluster))
    validate_config(prepared)
    return prepared


@pytest.fixture
def cluster(repository: Path) -> dict[str, Any]:
    return load(repository / "cluster.yaml")


def test_ray_up_accepts_the_cluster_file(cluster: dict[str, Any]) -> None:
    prepared = check_cluster(cluster)
    workers = prepared["available_node_types"]["gpu_worker"]
    assert workers["max_workers"] == prepared["max_workers"]
    install, *_ = prepared["worker_setup_commands"]
    assert install.startswith("pip install --upgrade")
    assert "eagle_batch-*.whl" in install


def test_ray_up_accepts_machines_that_are_there_already(repository: Path) -> None:
    document = load(repository / ON_PREMISES)
    prepared = check_cluster(document)
    assert prepared["provider"]["worker_ips"] == document["provider"]["worker_ips"]
    assert (
        document["min_workers"]
        == document["max_workers"]
        == len(prepared["provider"]["worker_ips"])
    )
    assert "eagle_batch-*.whl" in prepared["worker_setup_commands"][1]
    document["worker_setup_command"] = []
    with pytest.raises(jsonschema.ValidationError, match="worker_setup_command"):
        check_cluster(document)


def test_a_mistyped_key_of_the_cluster_file_is_refused(cluster: dict[str, Any]) -> None:
    cluster["idle_timeout_minute"] = 5
    with pytest.raises(jsonschema.ValidationError, match="idle_timeout_minute"):
        check_cluster(cluster)


def test_the_nodes_run_a_ray_that_the_package_allows(
    cluster: dict[str, Any], repository: Path
) -> None:
    image = cluster["docker"]["image"]
    floor = re.findall(r'"ray\[default\]>=(\d+\.\d+),', (repository / "pyproject.toml").read_text())
    version = re.findall(r"rayproject/ray:(\d+\.\d+)\.\d+-", image)
    rayjob = load(repository / RAYJOB)
    assert version == floor
    assert rayjob["spec"]["rayClusterSpec"]["rayVersion"].startswith(floor[0] + ".")


def test_placeholders_are_marked_for_editing(repository: Path) -> None:
    placeholder = re.compile(
        r"ami-0+\b|123456789012|registry\.example|region: |InstanceType: g|192\.0\.2\.|ssh_private"
    )
    for name in ("cluster.yaml", ON_PREMISES, RAYJOB, CRONJOB):
        lines = (repository / name).read_text("utf-8").splitlines()
        found = [line for line in lines if placeholder.search(line)]
        assert found, name
        assert [line for line in found if "# EDIT" not in line] == []


def test_kubernetes_accepts_the_cron_job(repository: Path) -> None:
    manifest = load(repository / CRONJOB)
    kubernetes_validate.validate(manifest, "1.30", strict=True)

    manifest["spec"]["concurencyPolicy"] = "Forbid"
    with pytest.raises(kubernetes_validate.ValidationError, match="concurencyPolicy"):
        kubernetes_validate.validate(manifest, "1.30", strict=True)


def strict(schema: Any) -> Any:
    """Turn a CRD's schema into a JSON schema that refuses unknown fields, as a server does."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    out = {key: strict(value) for key, value in schema.items() if key != "default"}
    open_ended = schema.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(schema.get("properties"), dict) and not open_ended:
        out.setdefault("additionalProperties", False)
    if isinstance(schema.get("required"), list) and isinstance(schema.get("properties"), dict):
        defaults = {k for k, v in schema["properties"].items() if "default" in v}
        out["required"] = [name for name in schema["required"] if name not in defaults]
    return out


@pytest.fixture(scope="module")
def rayjob_schema() -> dict[str, Any]:
    path = KUBERAY / "ray.io_rayjobs.yaml"
    if not path.is_file():
        pytest.skip(f"no KubeRay definitions in {KUBERAY}; {KUBERAY_VARIABLE} names their folder")
    definition = yaml.load(path.read_text("utf-8"), yaml.CSafeLoader)
    version = next(each for each in definition["spec"]["versions"] if each["name"] == "v1")
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    assert isinstance(schema, dict)
    return schema


def test_kuberay_accepts_the_ray_job(repository: Path, rayjob_schema: dict[str, Any]) -> None:
    manifest = load(repository / RAYJOB)
    jsonschema.validate(manifest, rayjob_schema)

    for misspelt in (["spec", "entryPoint"], ["spec", "rayClusterSpec", "headGroup"]):
        wrong = copy.deepcopy(manifest)
        place = wrong
        for key in misspelt[:-1]:
            place = place[key]
        place[misspelt[-1]] = "x"
        with pytest.raises(jsonschema.ValidationError, match=misspelt[-1]):
            jsonschema.validate(wrong, rayjob_schema)


def submissions(repository: Path) -> list[str]:
    """Return the shell line of each manifest that calls eagle-batch."""
    cron = load(repository / CRONJOB)["spec"]["jobTemplate"]["spec"]
    (container,) = cron["template"]["spec"]["containers"]
    entrypoint = load(repository / RAYJOB)["spec"]["entrypoint"]
    shell, flag, script = shlex.split(entrypoint)
    assert (shell, flag) == ("sh", "-c") == tuple(container["command"])
    return [script, container["args"][0]]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (ExitCode.COMPLETE, 0),
        (ExitCode.QUARANTINED, 0),
        (ExitCode.BAD_INPUT, 2),
        (ExitCode.STOPPED, 4),
    ],
)
def test_manifests_pass_exit_codes_on_and_accept_quarantined_rows(
    code: ExitCode, expected: int, repository: Path, tmp_path: Path
) -> None:
    fake = tmp_path / "eagle-batch"
    fake.write_text(f'#!/bin/sh\necho "$@"\nexit {int(code)}\n')
    fake.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RUN": "nightly-1"}
    for script in submissions(repository):
        done = subprocess.run(
            ["sh", "-c", script], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == expected
        assert re.match(r"submit \S+\.yaml --output s3://my-bucket/\S+", done.stdout)
