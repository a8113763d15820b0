"""A DAG for Apache Airflow, as the text of a Python file."""

from __future__ import annotations

from eagle_batch.schedule.cron import warnings_lines
from eagle_batch.schedule.emit.command import (
    Place,
    accepting_quarantine,
    portable_cron,
    run_command,
)
from eagle_batch.schedule.jobfile import ScheduledJob

#: Airflow's template for what a run is about. Airflow 2 gives every run a date, and there a
#: `run_after` that does not exist is never looked at.
DATE = "{{ (logical_date | default(dag_run.run_after)).isoformat() }}"
_TEMPLATE = '''"""{doc}"""

from datetime import timedelta

import pendulum
from airflow import DAG
from airflow.timetables.trigger import CronTriggerTimetable

try:
    from airflow.providers.standard.operators.bash import BashOperator  # Airflow 3
except ImportError:
    from airflow.operators.bash import BashOperator  # Airflow 2
{notes}
with DAG(
    dag_id={dag_id!r},
    schedule=CronTriggerTimetable({cron!r}, timezone={timezone!r}),
    start_date=pendulum.datetime(2026, 1, 1, tz={timezone!r}),
    catchup=False,
    max_active_runs={runs},
    # For machines that are lost; the job's own retries are made inside the task.
    default_args={{"retries": 2, "retry_delay": timedelta(minutes=5)}},
) as dag:
    BashOperator(
        task_id="run",
        # The tick belongs to the DAG run, however late or often its task starts. What triggers a
        # run by hand may give it no date: then it means the last tick before it.
        bash_command={command!r},
        cwd={folder!r},
        append_env=True,
    )
'''
#: Concurrent runs where overlap is allowed.
_OVERLAPPING = 16


def airflow_dag(job: ScheduledJob, place: Place) -> dict[str, str]:
    """Return a DAG of one task; the machine that runs it needs eagle-batch and the files."""
    command = run_command(place, "--at", f"'{DATE}'")
    notes = [
        "catchup=True would run every tick since start_date that Airflow has not seen.",
        *warnings_lines(job.schedule),
    ]
    text = _TEMPLATE.format(
        doc=f"Runs the eagle-batch job {job.name}.",
        notes="\n" + "".join(f"# {note}\n" for note in notes),
        dag_id=f"eagle-batch-{job.name}",
        cron=portable_cron(job, "Airflow"),
        timezone=job.schedule.timezone,
        runs=1 if job.file.overlap == "forbid" else _OVERLAPPING,
        command=accepting_quarantine(command),
        folder=place.folder,
    )
    return {f"{job.name}_dag.py": text}
