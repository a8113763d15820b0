"""What Airflow makes of emitted DAGs, told by the interpreter that has Airflow.

It knows nothing of eagle-batch, and runs as a script. Arguments: a folder of DAGs, then `ticks
FROM COUNT` (prints errors and each DAG's next ticks), `run DAG TIME` or `trigger DAG TIME` (a run
that has no date of its own, begun at that time; prints the state in which it ends).
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

try:
    from airflow.dag_processing.dagbag import DagBag
except ImportError:  # before Airflow 3.1
    from airflow.models.dagbag import DagBag
from airflow.timetables.base import TimeRestriction
from pendulum import instance


def ticks(timetable: Any, start: datetime, count: int) -> list[str]:
    """The times of the first runs from `start` on, had Airflow to make up for all of them."""
    everything = TimeRestriction(earliest=instance(start), latest=None, catchup=True)
    found: list[str] = []
    last = None
    while len(found) < count:
        info = timetable.next_dagrun_info(last_automated_data_interval=last, restriction=everything)
        found.append(info.logical_date.astimezone(UTC).isoformat())
        last = info.data_interval
    return found


def main(folder: str, task: str, *arguments: str) -> None:
    bag = DagBag(folder)
    if task == "ticks":
        start, count = datetime.fromisoformat(arguments[0]), int(arguments[1])
        errors = {Path(name).name: text for name, text in bag.import_errors.items()}
        known = {name: ticks(dag.timetable, start, count) for name, dag in bag.dags.items()}
        answer: Any = {"errors": errors, "ticks": known}
    else:
        dag = bag.dags[arguments[0]]
        time = datetime.fromisoformat(arguments[1])
        for each in dag.tasks:
            each.retries = 0  # Else what fails is waited for.
        # A run that somebody or another DAG triggers may have no date, only a time to start.
        dates = {"logical_date": time if task == "run" else None, "run_after": time}
        answer = str(dag.test(**dates).state)
    print("\n" + json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
