r"""What do stages cost? Four of them on the demo target against one of as many tokens.

    python -m tests.bench.stages --rows 48 --style conversation --style quoted
    python -m tests.bench.stages --rows 500 --style conversation --full \
        --tokens 200,200,200,200 --at-least 0.95

Each row goes through question, answer, critique and rewrite. The same rows then go through one
stage with the first prompt, each of as many tokens as its four texts had together. `conversation`
goes on with the texts before in turns of one conversation; `quoted` quotes them in a new prompt.
Both sides run in one process, one after the other, as often as `--repeat` says.
"""

from __future__ import annotations

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
from eagle_batch.engine.build import build_engine
from eagle_batch.engine.request import EngineMetrics
from eagle_batch.job.spec import WorkerSpec, pipeline_engine_spec
from eagle_batch.job.tasks import Lease, Task
from eagle_batch.job.worker import Worker
from eagle_batch.pipeline import Pipeline

MODEL = "smollm2-135m-instruct"
TOPICS = Path(__file__).parents[2] / "pipelines/data/topics.parquet"
ASK = [
    {"role": "user", "content": "Write one question about why rainbows form."},
    {"role": "assistant", "content": "Why does a rainbow always stand opposite the sun?"},
    {"role": "user", "content": "Write one question about {{ topic }}."},
]
ANSWER = "Answer it for a {{ level }} reader, in one full paragraph with an example."
JUDGE = "Criticise the answer: what is missing, what is wrong, what is hard to follow?"
MEND = "Write the answer again, with all of that mended."


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
    #: Of the processor, all threads; other programs disturb these less.
    busy: float
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


@dataclass(frozen=True)
class Setup:
    slots: int = 16
    #: Most tokens of each stage.
    tokens: tuple[int, ...] = (48, 160, 96, 160)
    method: str = "auto"
    temperature: float = 0.7
    dtype: str = "float32"
    context: int = 1024
    threads: int | None = None
    #: Whether no text ends before it has as many tokens as it may.
    full: bool = False

    def four(self, style: str) -> list[dict[str, Any]]:
        """The stages of one style."""
        return [
            {
                "name": name,
                "messages": messages,
                "sampling": {
                    "max_tokens": most,
                    "min_tokens": most if self.full else 0,
                    "temperature": self.temperature,
                },
            }
            for name, messages, most in zip(NAMES, STYLES[style](), self.tokens, strict=True)
        ]

    def one(self) -> list[dict[str, Any]]:
        """One stage with the first prompt, of as many tokens as the row's column says."""
        sampling = {
            "max_tokens": "{{ tokens }}",
            "temperature": self.temperature,
            "ignore_eos": True,
        }
        return [{"name": "all", "messages": ASK, "sampling": sampling}]

    def pipeline(self, folder: Path, stages: list[dict[str, Any]]) -> Pipeline:
        head = {} if self.method == "none" else {"head": demo.PREFIX + MODEL}
        target = {"model": demo.PREFIX + MODEL, "dtype": self.dtype, "context": self.context}
        return Pipeline.model_validate(
            {
                "name": "stages",
                "input": {"path": str(folder / "in.parquet"), "id": "id"},
                "target": target,
                "speculation": {"method": self.method} | head,
                "stages": stages,
                "engine": {"slots": self.slots},
                "output": {"path": str(folder / "out"), "rows_per_shard": 16},
            }
        )

    def run(self, rows: pa.Table, stages: list[dict[str, Any]]) -> Run:
        """Give all rows to one worker, as a job does, and time it."""
        with tempfile.TemporaryDirectory(prefix="stages-") as name:
            folder = Path(name)
            pq.write_table(rows, folder / "in.parquet")
            pipeline = self.pipeline(folder, stages)
            plan, _ = prepare(pipeline)
            engine = build_engine(
                pipeline_engine_spec(pipeline, device="cpu", threads=self.threads)
            )
            worker = Worker(WorkerSpec(pipeline, plan, 0.0, "cpu", self.threads, lambda _: engine))
            waiting = [Lease(Task(s.key, s.index, 0, s.rows), 1) for s in plan.shards]
            held = 0
            begun, busy = time.perf_counter(), time.process_time()
            while waiting or held:
                taken, waiting = waiting[: 2 - held], waiting[2 - held :]
                held += len(taken) - len(worker.pump(tuple(taken), 1.0).committed)
            seconds, busy = time.perf_counter() - begun, time.process_time() - busy
            parts = [pq.read_table(each) for each in sorted((folder / "out/data").iterdir())]
        return Run(seconds, busy, engine.metrics(), pa.concat_tables(parts).to_pylist())


def compare(rows: pa.Table, style: str, setup: Setup) -> tuple[Run, Run]:
    """Run four stages of a style, then one of as many tokens a row; print both."""
    staged = setup.run(rows, setup.four(style))
    made = [sum(g["completion_tokens"] for g in row["generation"]) for row in staged.rows]
    plain = setup.run(rows.append_column("tokens", pa.array(made)), setup.one())
    assert plain.metrics.completion_tokens == staged.metrics.completion_tokens
    for name, side in (("four", staged), ("one", plain)):
        m = side.metrics
        each = m.completion_tokens / sum(len(row["generation"]) for row in side.rows)
        shares = ", ".join(f"{part} {s / side.seconds:.1%}" for part, s in side.parts().items())
        click.echo(
            f"{style:12} {name:4} {side.rate:7.1f} tokens/s, "
            f"{m.completion_tokens / side.busy:.1f} a processor second; "
            f"{m.completion_tokens} tokens, {each:.0f} a text, "
            f"prompts {m.prompt_tokens} of which reused {m.cached_prompt_tokens}, "
            f"slots in use {m.occupancy:.0%}, "
            f"accepted {m.acceptance_length:.2f}; {shares}"
        )
    click.echo(
        f"{style:12} four / one: {staged.rate / plain.rate:.3f}, "
        f"in processor seconds {plain.busy / staged.busy:.3f}"
    )
    return staged, plain


def some_rows(count: int) -> pa.Table:
    """Topics of the demo, again and again, each with an id of its own."""
    topics = pq.read_table(TOPICS).drop_columns("id")
    rows = pa.concat_tables([topics] * -(-count // topics.num_rows)).slice(0, count)
    return rows.append_column("id", pa.array([f"row{n}" for n in range(count)]))


@click.command()
@click.option("--rows", default=48, show_default=True)
@click.option("--style", "styles", multiple=True, type=click.Choice(list(STYLES)))
@click.option("--tokens", default="48,160,96,160", show_default=True)
@click.option("--slots", default=16, show_default=True)
@click.option("--method", default="auto", show_default=True, type=click.Choice(["auto", "none"]))
@click.option("--temperature", default=0.7, show_default=True)
@click.option("--dtype", default="float32", show_default=True)
@click.option("--context", default=1024, show_default=True)
@click.option("--threads", default=None, type=int)
@click.option("--full", is_flag=True, help="No text ends before it has --tokens.")
@click.option("--repeat", default=1, show_default=True)
@click.option("--at-least", default=0.0, help="Fail where four / one is below this.")
def main(
    *,
    rows: int,
    styles: Sequence[str],
    tokens: str,
    repeat: int,
    at_least: float,
    **options: Any,
) -> None:
    """Compare four stages with one."""
    demo.fetch()
    setup = Setup(tokens=tuple(map(int, tokens.split(","))), **options)
    ratios = []
    for _ in range(repeat):
        for style in styles or STYLES:
            staged, plain = compare(some_rows(rows), style, setup)
            ratios.append(staged.rate / plain.rate)
    if min(ratios) < at_least:
        raise click.ClickException(f"{min(ratios):.3f} is below {at_least}")


if __name__ == "__main__":
    main()
