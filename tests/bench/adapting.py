"""Adaptation from no head at all: how fast the thirds of a job are, and that its text is plain.

    python -m tests.bench.adapting --rows 3000 --slots 2 --out runs/adapting

Rows are topics x angles x levels of `pipelines/data`, each a short question. A second run without
drafts, over a part of the rows, is compared text by text. Alone on the machine, please. A run that
was cut short goes on with the same command and the head it has by then; thirds are of what is left.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from eagle_batch.job.submit import run_on_ray
from eagle_batch.pipeline import parse_pipeline
from tests.job.fake_job import Watch

TOPICS = Path(__file__).parents[2] / "pipelines" / "data" / "topics.parquet"


class Told(Watch):
    """Prints what a user would read."""

    def say(self, text: str) -> None:
        print(text, flush=True)


def write_rows(path: Path, count: int) -> None:
    """Write so many different rows, the same ones each time."""
    rows = pq.read_table(TOPICS).to_pylist()
    angles = sorted({row["angle"] for row in rows})
    levels = sorted({row["level"] for row in rows})
    made = list(product([row["topic"] for row in rows], angles, levels))
    random.Random(0).shuffle(made)
    columns = dict(zip(("topic", "angle", "level"), zip(*made[:count], strict=True), strict=True))
    ids = [f"r{number:05d}" for number in range(count)]
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": ids, **columns}), path)


def pipeline(
    folder: Path, name: str, rows: int, slots: int, speculation: dict[str, Any]
) -> dict[str, Any]:
    """Return the job as plain data."""
    asked = "Write one question about {{ topic }}, {{ angle }}, for a {{ level }} reader."
    return {
        "name": "adapting",
        "input": {"path": str(folder / "rows.parquet"), "id": "id", "limit": rows},
        "target": {"model": "demo:smollm2-135m-instruct", "context": 192},
        "speculation": speculation,
        "stages": [
            {
                "name": "question",
                "messages": [
                    {"role": "user", "content": "Write one question about why rainbows form."},
                    {
                        "role": "assistant",
                        "content": "Why does a rainbow always stand opposite the sun?",
                    },
                    {"role": "user", "content": asked},
                ],
                "sampling": {"max_tokens": 28, "stop": ["\n"]},
            }
        ],
        "engine": {"slots": slots, "threads": 1},
        "workers": {"count": 1, "gpus": 0},
        "output": {"path": str(folder / name), "rows_per_shard": 10},
    }


@dataclass(frozen=True)
class Third:
    """A third of a job's rows."""

    tokens_per_s: float
    #: Tokens that a row gained in a pass of the target: a count, whatever else the machine does.
    tokens_a_pass: float


def thirds(series: Sequence[dict[str, Any]]) -> list[Third]:
    """Return each third of a job's rows."""
    begin, last = series[0]["units"], series[-1]["units"]
    edges = [begin + (last - begin) * part / 3 for part in range(4)]
    places = [next(p for p in series if p["units"] >= edge) for edge in edges]
    return [_between(before, after) for before, after in pairwise(places)]


def _between(before: dict[str, Any], after: dict[str, Any]) -> Third:
    names = ("at", "tokens", "row_passes", "round_tokens")
    seconds, tokens, passes, gained = (after[name] - before[name] for name in names)
    return Third(round(tokens / seconds, 1), round(gained / max(1, passes), 3))


def texts(output: Path) -> dict[str, str]:
    """Return the text of each row."""
    files = sorted((output / "data").glob("*.parquet"))
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    return {row["id"]: row["question"] for row in rows}


def main() -> None:
    """Run, and print the numbers as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--compared", type=int, default=300)
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--out", type=Path, default=Path("runs/adapting"))
    wanted = parser.parse_args()
    folder = wanted.out.resolve()
    write_rows(folder / "rows.parquet", wanted.rows)
    adapt = {"adapt": {"share": wanted.share}, "nodes": 8}
    job = pipeline(folder, "adapted", wanted.rows, wanted.slots, adapt)
    found = run_on_ray(parse_pipeline(job, "bench"), Told(), ["bench"]).metrics
    metrics = found or json.loads((folder / "adapted/_job/metrics.json").read_text())
    plain = pipeline(folder, "plain", wanted.compared, 16, {"method": "none"})
    run_on_ray(parse_pipeline(plain, "bench"), Told(), ["bench"])
    adapted = texts(folder / "adapted")
    same = [adapted[name] == text for name, text in texts(folder / "plain").items()]
    first, _, last = found_thirds = thirds(metrics["series"])
    numbers = {
        "thirds": [asdict(third) for third in found_thirds],
        "last_by_first": round(last.tokens_per_s / first.tokens_per_s, 2),
        "same_texts": f"{sum(same)} of {len(same)}",
        "heads": metrics["adaptation"]["events"],
    }
    print(json.dumps(numbers))


if __name__ == "__main__":
    main()
