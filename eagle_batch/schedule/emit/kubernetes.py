"""Manifests for Kubernetes: a CronJob, and KubeRay's RayCronJob."""

from __future__ import annotations

import math
import shlex
from typing import Any

import yaml

from eagle_batch.errors import ConfigError, ExitCode
from eagle_batch.pipeline.locations import is_url
from eagle_batch.schedule.cron import warnings_lines
from eagle_batch.schedule.emit.command import (
    Place,
    accepting_quarantine,
    first_pipeline,
    portable_cron,
    run_command,
    time_to_catch_up,
)
from eagle_batch.schedule.jobfile import ScheduledJob

#: Times that Kubernetes replaces a pod that was lost; the job's own retries are made inside it.
LOST_PODS = 6
RAY_VERSION = "2.60.0"
#: The name of a CronJob's Job ends in the minute that it was due, counted since 1970: the same in
#: every attempt. A Job that somebody made by hand has no such ending.
TICK_OF_POD = (
    'minute=${RUN##*-}; case "$minute" in [0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9]) '
    'at="@$((minute * 60))";; *) at=now;; esac; '
)
RAY_CRON_JOB_NOTES = (
    "RayCronJob is alpha: the operator needs --feature-gates=RayCronJob=true",
    "it has no concurrencyPolicy: a cluster starts while an earlier one still runs, and the job's",
    "own lock then ends the later one with code 5",
    "it has no start deadline: after an outage it starts a cluster for each missed tick; all of",
    "them mean the last tick, which is run once",
    "`--to cronjob` has none of these limits",
)
GPU_TOLERATION = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}


class _Dumper(yaml.SafeDumper):
    """Writes every list and mapping out, never as a reference to an earlier one."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - signature
        return True


def cron_job(job: ScheduledJob, place: Place) -> dict[str, str]:
    """Return a batch/v1 CronJob: one pod a tick, which also survives the loss of its node."""
    command = TICK_OF_POD + run_command(place, "--at", '"$at"')
    schedule = portable_cron(job, "Kubernetes")
    manifest = {
        "apiVersion": "batch/v1",
        "kind": "CronJob",
        "metadata": {"name": job.name},
        "spec": {
            "schedule": schedule,
            "timeZone": job.schedule.timezone,
            "concurrencyPolicy": job.file.overlap.capitalize(),
            "startingDeadlineSeconds": time_to_catch_up(job),
            "successfulJobsHistoryLimit": 3,
            "failedJobsHistoryLimit": 3,
            "jobTemplate": {"spec": _job_spec(job, place, accepting_quarantine(command))},
        },
    }
    notes = ["kubectl apply -f this file; its image must hold the job file and its pipeline"]
    if job.file.catch_up > 1:
        notes.append(
            f"catch_up is {job.file.catch_up}, and Kubernetes makes up the last missed tick only"
        )
    notes += [*_lost_with_the_pod(job), *warnings_lines(job.schedule)]
    return {f"{job.name}-cronjob.yaml": _document(manifest, notes)}


def _job_spec(job: ScheduledJob, place: Place, script: str) -> dict[str, Any]:
    name = {"fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/job-name']"}}
    wrong_file = {
        "containerName": "run",
        "operator": "In",
        "values": [int(ExitCode.BAD_INPUT)],
    }
    container = {
        "name": "run",
        "image": place.image,
        "workingDir": place.folder,
        "env": [{"name": "RUN", "valueFrom": name}],
        "command": ["sh", "-c"],
        "args": [script],
        "resources": _pod_resources(job),
    }
    return {
        "backoffLimit": LOST_PODS,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": wrong_file},
                {
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
            ]
        },
        "template": {
            "spec": {
                "restartPolicy": "Never",
                "serviceAccountName": place.service_account,
                "terminationGracePeriodSeconds": 60,
                "containers": [container],
                "tolerations": [GPU_TOLERATION],
            }
        },
    }


def _pod_resources(job: ScheduledJob) -> dict[str, Any]:
    """Return what a pod needs that runs everything itself, or one that only submits."""
    if job.file.cluster.address is not None:
        return {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"memory": "1Gi"}}
    workers = first_pipeline(job).workers
    each = 1.0 if workers.gpus == "auto" else workers.gpus
    return _resources(math.ceil(each * (1 if workers.count == "auto" else workers.count)))


def _resources(gpus: int) -> dict[str, Any]:
    limits = {"memory": "24Gi"} | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
    return {"requests": {"cpu": "4", "memory": "24Gi"}, "limits": limits}


def ray_cron_job(job: ScheduledJob, place: Place) -> dict[str, str]:
    """Return a RayCronJob: a Ray cluster for each tick. Says in comments what KubeRay lacks."""
    workers = first_pipeline(job).workers
    if workers.count == "auto" or workers.gpus == "auto":
        raise ConfigError(
            f"{job.path}: set.workers.count and set.workers.gpus: found 'auto'; expected numbers, "
            "since a cluster that starts with the tick has no GPU yet when it is asked"
        )
    command = accepting_quarantine(run_command(place, "--at", "now"))
    # Ray's shell starts in a folder of its own.
    script = f"cd {shlex.quote(place.folder)} || exit; {command}"
    manifest = {
        "apiVersion": "ray.io/v1",
        "kind": "RayCronJob",
        "metadata": {"name": job.name},
        "spec": {
            "schedule": portable_cron(job, "KubeRay"),
            "timeZone": job.schedule.timezone,
            "jobTemplate": {
                "entrypoint": f"sh -c {shlex.quote(script)}",
                "backoffLimit": LOST_PODS,
                "shutdownAfterJobFinishes": True,
                "ttlSecondsAfterFinished": 600,
                "rayClusterSpec": _cluster(place, int(workers.count), float(workers.gpus)),
            },
        },
    }
    notes = [*RAY_CRON_JOB_NOTES, *_lost_with_the_pod(job), *warnings_lines(job.schedule)]
    return {f"{job.name}-raycronjob.yaml": _document(manifest, notes)}


def _cluster(place: Place, count: int, gpus: float) -> dict[str, Any]:
    head = {
        "rayStartParams": {"num-cpus": "0"},
        "template": _pod(place, "ray-head", {"requests": {"cpu": "2", "memory": "8Gi"}}),
    }
    worker = {
        "groupName": "workers",
        "replicas": count,
        "minReplicas": 0,
        "maxReplicas": count,
        "rayStartParams": {},
        "template": _pod(place, "ray-worker", _resources(math.ceil(gpus))),
    }
    return {
        "rayVersion": RAY_VERSION,
        "enableInTreeAutoscaling": True,
        "headGroupSpec": head,
        "workerGroupSpecs": [worker],
    }


def _pod(place: Place, name: str, resources: dict[str, Any]) -> dict[str, Any]:
    return {
        "spec": {
            "serviceAccountName": place.service_account,
            "containers": [{"name": name, "image": place.image, "resources": resources}],
            "tolerations": [GPU_TOLERATION],
        }
    }


def _lost_with_the_pod(job: ScheduledJob) -> list[str]:
    if is_url(job.root):
        return []
    text = (
        f"set.output.path names a folder, {job.root}: mount a volume there that all pods share, or "
        "name a bucket; what lies on a pod's own disk is lost with it"
    )
    return [text]


def _document(manifest: dict[str, Any], notes: list[str]) -> str:
    body = yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True)
    return "".join(f"# {note}\n" for note in notes) + body
