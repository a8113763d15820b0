"""What do stages cost? Four of them on the demo target against one of as many tokens.

    python -m tests.bench.stages --rows 48 --style conversation --style quoted

Each row goes through question, answer, critique and rewrite. The same rows then go through one
stage with the first prompt, each of as many tokens as its four texts had together. `conversation`
goes on with the texts before in turns of one conversation; `quoted` quotes them in a new prompt.
Both sides run in one process, one after the other, as often as `--repeat` says.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq

from eagle_batch import demo
from eagle_batch.data.describe import prepare
from eagle_batch.engine.build import assemble, load_parts
from eagle_batch.engine.request import EngineMetrics
from eagle_batch.job.spec import EngineLike, WorkerSpec, pipeline_engine_spec
from eagle_batch.job.tasks import Lease, Task
from eagle_batch.job.worker import Worker
from eagle_batch.pipeline import Pipeline

TOPICS = Path(__file__).parents[2] / "pipelines/data/topics.parquet"
ASK = [
    {"role": "user", "content": "Write one question about why rainbows form."},
    {"role": "assistant", "content": "Why does a rainbow always stand opposite the sun?"},
    {"role": "user", "content": "Write one question about {{ topic }}."},
]
ANSWER = "Answer it for a {{ level }} reader, in three or four plain sentences."
JUDGE = "Say in one sentence what is missing or wrong in this answer."
MEND = "Write the answer again, with that mended."


def conversation() -> list[list[dict[str, str]]]:
    """The messages of each stage, each going on where the one before ended."""
    turns = ["{{ question }}", ANSWER, "{{ answer }}", JUDGE, "{{ critique }}", MEND]
    roles = ["assistant", "user"] * 3
    messages = ASK + [
        {"role": role, "content": text} for role, text in zip(roles, turns, strict=True)
    ]
    return [messages[: 3 + 2 * stage] for stage in range(4)]


def quoted() -> list[list[dict[str, str]]]:
    """The messages of each stage, each a prompt of its own."""
    told = "Question: {{ question }}\n\nAnswer: {{ answer }}\n\n"
    texts = ["{{ question }}\n\n" + ANSWER, told + JUDGE, told + "{{ critique }}\n\n" + MEND]
    return [ASK, *([{"role": "user", "content": text}] for text in texts)]


STYLES = {"conversation": conversation, "quoted": quoted}
NAMES = ("question", "answer", "critique", "rewrite")


@dataclass(frozen=True)
class Run:
    seconds: float
    metrics: EngineMetrics
    rows: list[dict[str, Any]]

    @property
    def rate(self) -> float:
        return self.metrics.completion_tokens / self.seconds

    def parts(self) -> dict[str, float]:
        """Seconds by what they went to; `worker` is all that is not the engine."""
        m = self.metrics
        engine = {
            "prefill": m.prefill_s,
            "draft": m.draft_s,
            "verify": m.verify_s,
            "host": m.host_s,
        }
        return engine | {"worker": self.seconds - sum(engine.values())}


def document(folder: Path, stages: list[dict[str, Any]], options: dict[str, Any]) -> dict[str, Any]:
    method = options["method"]
    speculation = {"method": method} | ({} if method == "none" else {"head": demo.PREFIX + MODEL})
    return {
        "name": "stages",
        "input": {"path": str(folder / "in.parquet"), "id": "id"},
        "target": {
            "model": demo.PREFIX + MODEL,
            "dtype": options["dtype"],
            "context": options["context"],
        },
        "speculation": speculation,
        "stages": stages,
        "engine": {"slots": options["slots"]},
        "output": {"path": str(folder / "out"), "rows_per_shard": 16},
    }


MODEL = "smollm2-135m-instruct"


def run(rows: pa.Table, stages: list[dict[str, Any]], options: dict[str, Any]) -> Run:
    """Give all rows to one worker, as a job does, and time it."""
    with tempfile.TemporaryDirectory(prefix="stages-") as name:
        folder = Path(name)
        pq.write_table(rows, folder / "in.parquet")
        pipeline = Pipeline.model_validate(document(folder, stages, options))
        plan, _ = prepare(pipeline)
        spec = pipeline_engine_spec(pipeline, device="cpu", threads=options["threads"])
        parts = options["parts"] = options.get("parts") or load_parts(spec)
        engine = assemble(parts, spec)

        def build(_: Any) -> EngineLike:
            return engine

        worker = Worker(WorkerSpec(pipeline, plan, 0.0, "cpu", options["threads"], build))
        waiting = [Lease(Task(s.key, s.index, 0, s.rows), 1) for s in plan.shards]
        held = 0
        begun = time.perf_counter()
        while waiting or held:
            taken, waiting = waiting[: 2 - held], waiting[2 - held :]
            held += len(taken) - len(worker.pump(tuple(taken), 1.0).committed)
        seconds = time.perf_counter() - begun
        made = pa.concat_tables(map(pq.read_table, sorted((folder / "out/data").glob("*.parquet"))))
    return Run(seconds, engine.metrics(), made.to_pylist())


def four(style: str, tokens: Sequence[int], temperature: float) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "messages": messages,
            "sampling": {"max_tokens": most, "temperature": temperature},
        }
        for name, messages, most in zip(NAMES, STYLES[style](), tokens, strict=True)
    ]


def one(temperature: float) -> list[dict[str, Any]]:
    sampling = {"max_tokens": "{{ tokens }}", "temperature": temperature, "ignore_eos": True}
    return [{"name": "all", "messages": ASK, "sampling": sampling}]


def compare(rows: pa.Table, style: str, tokens: Sequence[int], options: dict[str, Any]) -> float:
    """Print both sides of one style; return tokens/s of four stages over those of one."""
    temperature = options["temperature"]
    staged = run(rows, four(style, tokens, temperature), options)
    made = [sum(g["completion_tokens"] for g in row["generation"]) for row in staged.rows]
    counted = rows.append_column("tokens", pa.array(made))
    plain = run(counted, one(temperature), options)
    assert plain.metrics.completion_tokens == staged.metrics.completion_tokens
    for name, side in (("four", staged), ("one", plain)):
        m = side.metrics
        shares = ", ".join(f"{part} {s / side.seconds:.1%}" for part, s in side.parts().items())
        click.echo(
            f"{style:12} {name:4} {side.rate:7.1f} tokens/s  {m.completion_tokens} tokens, "
            f"prompts {m.prompt_tokens} of which reused {m.cached_prompt_tokens}, "
            f"slots in use {m.occupancy:.0%}, "
            f"accepted {m.acceptance_length:.2f}; {shares}"
        )
    click.echo(f"{style:12} four / one: {staged.rate / plain.rate:.3f}")
    return staged.rate / plain.rate


@click.command()
@click.option("--rows", default=48, show_default=True)
@click.option("--slots", default=16, show_default=True)
@click.option("--style", "styles", multiple=True, type=click.Choice(list(STYLES)))
@click.option("--tokens", default="40,120,60,120", show_default=True, help="Most of each stage.")
@click.option("--method", default="auto", show_default=True, type=click.Choice(["auto", "none"]))
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--dtype", default="float32", show_default=True)
@click.option("--context", default=1024, show_default=True)
@click.option("--threads", default=None, type=int)
@click.option("--repeat", default=1, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(
    *,
    rows: int,
    styles: Sequence[str],
    tokens: str,
    repeat: int,
    json_path: Path | None,
    **options: Any,
) -> None:
    """Compare four stages with one."""
    demo.fetch()
    topics = pq.read_table(TOPICS).slice(0, rows)
    while topics.num_rows < rows:
        topics = pa.concat_tables([topics, topics]).slice(0, rows)
    ids = pa.array([f"row{n}" for n in range(rows)])
    topics = topics.drop_columns("id").append_column("id", ids)
    most = [int(each) for each in tokens.split(",")]
    found = {
        style: [compare(topics, style, most, options) for _ in range(repeat)]
        for style in styles or list(STYLES)
    }
    if json_path is not None:
        json_path.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
