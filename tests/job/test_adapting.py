"""A head that is trained beside a job: when it learns, who drafts with it, and what may fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from eagle_batch.engine.request import EngineSpec
from eagle_batch.errors import ConfigError, StoppedError, StoreError
from eagle_batch.job import adapting
from eagle_batch.job.adapter import Adapter
from eagle_batch.job.adapting import (
    LEAST_TEXTS,
    MOST_TIMES,
    WEIGHTS,
    Adaptation,
    Round,
    Text,
    Texts,
)
from eagle_batch.job.driver import run_job
from eagle_batch.job.head_copy import newest_head
from eagle_batch.job.job import JobResult, SizedPool
from eagle_batch.job.reports import HeadTrainer
from eagle_batch.job.store import open_store
from eagle_batch.job.tasks import NewHead
from eagle_batch.job.verify import verify
from eagle_batch.pipeline import Adapt
from eagle_batch.pipeline.vllm import vllm_rules
from eagle_batch.training.learnt import Learnt
from tests.data.support import make_pipeline
from tests.job.fake_engine import FakeEngine, build_fake
from tests.job.fake_job import (
    CrashError,
    InProcessPool,
    Watch,
    expected_rows,
    load_job,
    read_rows,
    write_job,
)
from tests.job.fake_trainer import FakeTrainer

TOPICS = [f"topic {'x' * (n % 7)}" for n in range(40)]
ADAPT = {"speculation": {"method": "auto", "adapt": {"share": 1.0, "tokens": 60}}}


def texts(count: int, tokens: int = 10) -> list[Text]:
    return [Text.of((1, 2), range(tokens)) for _ in range(count)]


def learnt(seconds: float = 5.0, *, used: bool = True, before: float | None = None) -> Learnt:
    return Learnt(100, 10, seconds, before, 2.0, used)


def started(adaptation: Adaptation, at: float = 100.0, left: float | None = 900.0) -> Round:
    work = adaptation.next_round(at, left)
    assert work is not None
    return work


def test_a_text_is_packed_and_comes_back() -> None:
    text = Text.of((5, 70_000), [1, 2, 3])
    assert text.tokens == (5, 70_000, 1, 2, 3)
    assert (text.size, text.prompt_tokens, text.completion_tokens) == (5, 2, 3)


def test_a_report_carries_no_more_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapting, "MOST_REPORTED", 25)
    kept = Texts()
    for length in (8, 1, 12, 12):
        kept.keep((1, 2), range(length))
    # One token teaches nothing; the last one finds no room.
    assert [text.completion_tokens for text in kept.take()] == [8, 12]
    kept.keep((1,), range(20))
    assert len(kept.take()) == 1
    assert kept.take() == ()


def test_a_round_waits_for_tokens_texts_and_an_estimate_of_the_time_left() -> None:
    adaptation = Adaptation(Adapt(tokens=300))
    adaptation.take(texts(LEAST_TEXTS))
    assert adaptation.next_round(100.0, 900.0) is None, "240 tokens"
    adaptation.take(texts(6))
    assert adaptation.next_round(100.0, None) is None
    assert len(started(adaptation).texts) == LEAST_TEXTS + 6
    few = Adaptation(Adapt(tokens=300))
    few.take(texts(3, tokens=500))
    assert few.next_round(100.0, 900.0) is None, "three texts, none of them to measure with"


def test_one_round_at_a_time_and_each_with_what_is_new() -> None:
    adaptation = Adaptation(Adapt(tokens=100))
    adaptation.take(texts(30))
    started(adaptation)
    adaptation.take(texts(50))
    assert adaptation.next_round(200.0, 800.0) is None
    adaptation.learnt(learnt(), 210.0)
    assert len(started(adaptation, 210.0).texts) == 50


def test_rounds_lie_further_apart_as_texts_grow() -> None:
    """Each doubles what was seen, until 16 times the tokens of the first lie between two."""
    adaptation = Adaptation(Adapt(tokens=100, share=1.0))
    sizes: list[int] = []
    while len(sizes) < 8:
        adaptation.take(texts(10))
        work = adaptation.next_round(1e6, 1e6)
        if work is not None:
            sizes.append(sum(text.completion_tokens for text in work.texts))
            adaptation.learnt(learnt(), 1e6)
    assert sizes == [300, 300, 600, 1200, 1600, 1600, 1600, 1600]
    assert sizes[-1] == MOST_TIMES * 100


def test_after_a_round_without_a_gain_much_more_is_waited_for() -> None:
    adaptation = Adaptation(Adapt(tokens=100))
    adaptation.take(texts(30))
    started(adaptation)
    adaptation.learnt(learnt(used=False, before=2.0), 110.0)
    adaptation.take(texts(2 * MOST_TIMES * 10 - 1))
    assert adaptation.next_round(120.0, 900.0) is None
    adaptation.take(texts(1))
    started(adaptation)


def test_all_rounds_together_keep_to_the_share_of_the_job() -> None:
    adaptation = Adaptation(Adapt(tokens=10, share=0.1))
    spent = 0.0
    for at in range(0, 1000, 10):
        adaptation.take(texts(400))
        work = adaptation.next_round(at, 1000.0 - at)
        if work is not None:
            assert work.seconds <= (1000.0 - at) / 2, "it must serve as long as it took to learn"
            spent += work.seconds / 2
            adaptation.learnt(learnt(work.seconds / 2), at)
    assert 90 < spent <= 100


def test_the_end_of_a_job_is_not_spent_on_training() -> None:
    adaptation = Adaptation(Adapt(tokens=10))
    adaptation.take(texts(400))
    assert adaptation.next_round(1000.0, 3.0) is None


def test_waiting_texts_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapting, "MOST_WAITING", 1200)
    adaptation = Adaptation(Adapt(tokens=10))
    adaptation.take(texts(500))
    assert len(started(adaptation).texts) == 100


def test_every_end_of_a_round_is_told() -> None:
    adaptation = Adaptation(Adapt(tokens=10), version=1)
    first = adaptation.learnt(learnt(), 10.0)
    assert (first.kind, first.version, first.at) == ("switch", 2, 10.0)
    assert "head 2 is used from now on: 2.00 tokens a pass" in first.text
    second = adaptation.learnt(learnt(used=False, before=2.1), 20.0)
    assert (second.kind, second.version) == ("round", 2)
    assert (
        "no gain worth a switch: 2.00 tokens a pass expected on held-out texts (before 2.10)"
        in (second.text)
    )
    last = adaptation.failed("no memory", 30.0)
    assert last.text == "adaptation stopped, the job goes on, head 2 stays in use: no memory"
    assert adaptation.events == [first, second, last]
    adaptation.take(texts(100))
    assert adaptation.next_round(40.0, 100.0) is None


def made(folder: Path, make: Callable[[float], HeadTrainer]) -> Adapter:
    """An adapter whose output is the folder."""
    changes = {"speculation": {"adapt": {"tokens": 10}}, "limits": {"stall_seconds": 60.0}}
    return Adapter(make_pipeline(folder, changes), open_store(str(folder)), make, 0.0)


class Silent(FakeTrainer):
    """Never answers."""

    def poll(self) -> None:
        return None


def test_a_trainer_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    trainer = Silent(tmp_path)
    adapter = made(tmp_path, lambda _started: trainer)
    adapter.take(tuple(texts(100)))
    assert list(adapter.tend(100.0, 900.0)) == []
    until = 100.0 + trainer.rounds[0].seconds + 60.0
    assert list(adapter.tend(until - 1, 500.0)) == []
    [event] = adapter.tend(until + 1, 500.0)
    assert event.kind == "stopped"
    assert event.text.endswith("has the cluster room for 1 CPU cores and 0 GPUs?")
    assert trainer.closed
    assert list(adapter.tend(until + 2, 500.0)) == []


def test_a_trainer_that_cannot_be_started_is_told_once(tmp_path: Path) -> None:
    def broken(_started: float) -> HeadTrainer:
        raise RuntimeError("no room")

    adapter = made(tmp_path, broken)
    adapter.take(tuple(texts(100)))
    [event] = adapter.tend(100.0, 900.0)
    assert event.text.endswith("RuntimeError: no room")
    assert list(adapter.tend(101.0, 900.0)) == []


def test_every_worker_is_told_of_a_head_once(tmp_path: Path) -> None:
    """That of an earlier run is number 1."""
    trainer = FakeTrainer(tmp_path)
    assert made(tmp_path, lambda _started: trainer).news(0) == ()
    open_store(str(tmp_path)).put_replace(WEIGHTS, b"x")
    adapter = made(tmp_path, lambda _started: trainer)
    assert [adapter.news(0), adapter.news(1), adapter.news(0)] == [(NewHead(1),)] * 2 + [()]
    adapter.take(tuple(texts(100)))
    assert list(adapter.tend(100.0, 900.0)) == []
    [event] = adapter.tend(110.0, 890.0)
    assert event.version == 2
    assert [adapter.news(1), adapter.news(2), adapter.news(1)] == [(NewHead(2),)] * 2 + [()]


def test_a_head_in_a_store_is_copied_once_for_each_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_BATCH_CACHE", str(tmp_path / "cache"))
    root = f"memory://{tmp_path.name}"
    store = open_store(root)
    for text in ("one", "two"):
        store.put_replace("head/config.json", b"{}")
        store.put_replace(WEIGHTS, text.encode())
        place = Path(newest_head(root, store))
        assert (place / "model.safetensors").read_text() == text
    assert [path.name for path in (tmp_path / "cache/heads").iterdir()] == [place.name]
    assert {path.name for path in place.iterdir()} == {"config.json", "model.safetensors"}
    store.delete(WEIGHTS)
    with pytest.raises(StoreError, match=r"head/model.safetensors is gone"):
        newest_head(root, store)
    assert newest_head(str(tmp_path), store) == f"{tmp_path}/head", "read where it lies"


# -- whole jobs ------------------------------------------------------------------------------


class Engines:
    """Builds fake engines and keeps them."""

    def __init__(self) -> None:
        self.built: list[FakeEngine] = []

    def __call__(self, spec: EngineSpec) -> FakeEngine:
        assert spec.adapt
        self.built.append(build_fake(spec))
        return self.built[-1]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of a job that is over in a moment."""
    monkeypatch.setattr(adapting, "LEAST_S", 0.0)


def run(path: Path, trainer: HeadTrainer, watch: Watch | None = None, **options: Any) -> JobResult:
    job = load_job(path)

    def make_pool(started: float) -> SizedPool:
        return InProcessPool(job.pipeline, job, started, **options)

    return run_job(job, make_pool, watch or Watch(), make_trainer=lambda _started: trainer)


def heads_named(output: Path) -> list[str | None]:
    """The column `head` of all rows, in the order of the input."""
    found: list[str | None] = pq.read_table(output / "data", columns=["head"])["head"].to_pylist()
    return found


@pytest.mark.usefixtures("quick")
def test_rows_name_the_head_that_drafted_when_they_were_finished(tmp_path: Path) -> None:
    run(write_job(tmp_path, TOPICS, **ADAPT), FakeTrainer(tmp_path / "out"))
    named = heads_named(tmp_path / "out")
    own = f"{tmp_path}/out/head"
    assert (named[0], named[-1]) == (None, own)
    assert set(named) == {None, own}


@pytest.mark.usefixtures("quick")
def test_every_worker_drafts_with_each_better_head(tmp_path: Path) -> None:
    trainer, engines, watch = FakeTrainer(tmp_path / "out"), Engines(), Watch()
    result = run(write_job(tmp_path, TOPICS, **ADAPT), trainer, watch, size=2, build=engines)
    assert read_rows(tmp_path / "out") == expected_rows(TOPICS)
    assert verify(str(tmp_path / "out")).ok
    assert trainer.closed
    assert len(trainer.rounds) >= 2
    heads = ["head of 1.5", "head of 2.0", "head of 2.5"][: len(trainer.rounds)]
    for engine in engines.built:
        assert engine.heads[-1] in heads
    assert result.metrics is not None
    events = result.metrics["adaptation"]["events"]
    assert [e["kind"] for e in events[: len(heads)]] == ["switch"] * len(heads)
    assert [line for line in watch.lines if "is used from now on" in line]
    stored = json.loads((tmp_path / "out/_job/metrics.json").read_text())
    assert stored["adaptation"] == result.metrics["adaptation"]


@pytest.mark.usefixtures("quick")
def test_what_is_learnt_from_are_prompts_and_completions_of_the_job(tmp_path: Path) -> None:
    trainer = FakeTrainer(tmp_path / "out")
    run(write_job(tmp_path, TOPICS, **ADAPT), trainer)
    seen = [text for work in trainer.rounds for text in work.texts]
    prompts = {bytes(t.tokens[: t.prompt_tokens]).decode().removeprefix("\x01") for t in seen}
    assert any(prompt.startswith("ask topic") for prompt in prompts)
    assert any(" of topic" in prompt for prompt in prompts), "later stages teach too"
    assert {t.tokens[t.prompt_tokens :] for t in seen} == {(0, 1, 2), (0, 1)}


@pytest.mark.usefixtures("quick")
def test_a_worker_that_is_replaced_gets_the_newest_head(tmp_path: Path) -> None:
    trainer, engines = FakeTrainer(tmp_path / "out", (1.5,)), Engines()
    crashes = iter([True])

    def sabotage(worker: int, pump: int) -> None:
        if worker == 0 and engines.built[0].heads and next(crashes, False):
            raise CrashError

    run(write_job(tmp_path, TOPICS, **ADAPT), trainer, build=engines, sabotage=sabotage)
    assert read_rows(tmp_path / "out") == expected_rows(TOPICS)
    assert [engine.heads for engine in engines.built] == [["head of 1.5"]] * 2


@pytest.mark.usefixtures("quick")
def test_a_resumed_job_begins_with_the_head_it_left(tmp_path: Path) -> None:
    path = write_job(tmp_path, TOPICS, **ADAPT, limits={"shard_attempts": 1, "worker_attempts": 1})
    first, engines = FakeTrainer(tmp_path / "out", (1.5,)), Engines()

    def sabotage(worker: int, pump: int) -> None:
        if engines.built[0].heads:
            raise CrashError

    with pytest.raises(StoppedError):
        run(path, first, build=engines, sabotage=sabotage)
    again = Engines()
    run(write_job(tmp_path, TOPICS, **ADAPT), FakeTrainer(tmp_path / "out", ()), build=again)
    assert read_rows(tmp_path / "out") == expected_rows(TOPICS)
    assert again.built[0].heads[0] == "head of 1.5"
    assert heads_named(tmp_path / "out")[-1] == f"{tmp_path}/out/head"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("script", [("no memory",), (1.5, "disk full")])
def test_a_trainer_that_fails_costs_nothing_but_its_head(
    tmp_path: Path, script: tuple[float | str, ...]
) -> None:
    trainer, watch = FakeTrainer(tmp_path / "out", script), Watch()
    result = run(write_job(tmp_path, TOPICS, **ADAPT), trainer, watch)
    assert read_rows(tmp_path / "out") == expected_rows(TOPICS)
    assert result.quarantined == 0
    [line] = [line for line in watch.lines if "adaptation stopped" in line]
    assert line.endswith(str(script[-1]))
    assert len(trainer.rounds) == len(script)


@pytest.mark.usefixtures("quick")
def test_a_head_that_cannot_be_read_is_said_and_the_worker_goes_on(tmp_path: Path) -> None:
    class Vanishing(FakeTrainer):
        def begin(self, work: Round) -> None:
            super().begin(work)
            (self.output / WEIGHTS).unlink()

    watch = Watch()
    run(write_job(tmp_path, TOPICS, **ADAPT), Vanishing(tmp_path / "out", (1.5,)), watch)
    assert read_rows(tmp_path / "out") == expected_rows(TOPICS)
    assert [line for line in watch.lines if "is not used: HeadError" in line]
    assert set(heads_named(tmp_path / "out")) == {None}


def test_without_adapt_no_text_leaves_a_worker(tmp_path: Path) -> None:
    trainer = FakeTrainer(tmp_path / "out")
    run(write_job(tmp_path, TOPICS), trainer)
    assert trainer.rounds == []
    assert not (tmp_path / "out/head").exists()


# -- what a pipeline may ask for -------------------------------------------------------------


@pytest.mark.parametrize(
    ("speculation", "words"),
    [
        ({"adapt": True, "method": "none"}, "found adapt with 'none'"),
        ({"adapt": True, "draft": "x/y"}, "adapt trains a head"),
        ({"adapt": {"share": 0}}, "speculation.adapt.share"),
        ({"adapt": "yes"}, "speculation.adapt"),
        ({"adapt": {"budget": 3}}, "speculation.adapt.budget"),
    ],
)
def test_what_cannot_adapt_is_said(tmp_path: Path, speculation: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_pipeline(tmp_path, {"speculation": speculation})


def test_true_is_short_for_the_defaults_and_vllm_has_no_such_thing(tmp_path: Path) -> None:
    pipeline = make_pipeline(tmp_path, {"speculation": {"adapt": True}})
    assert pipeline.speculation.adapt == Adapt()
    assert make_pipeline(tmp_path, {"speculation": {"adapt": False}}).speculation.adapt is None
    broken = vllm_rules(pipeline.engine, pipeline.workers, pipeline.speculation, [])
    assert "speculation.adapt" in [keys[0] for is_broken, (keys, _) in broken if is_broken]
