"""A round is one program of fixed shapes: the host reads once, at its end, and nothing new is made.

Here on the CPU, by watching every operation; on CUDA the driver watches too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from eagle_batch.engine.drafters.base import Drafter
from eagle_batch.engine.drafters.draft_model import DraftModelDrafter
from eagle_batch.engine.drafters.eagle import EagleDrafter
from eagle_batch.engine.drafters.merged import MergedDrafter
from eagle_batch.engine.drafters.ngram import NgramDrafter
from eagle_batch.engine.drafters.static import StaticEagleDrafter
from eagle_batch.engine.engine import Engine
from eagle_batch.engine.request import Request, SamplingParams
from eagle_batch.engine.testing import byte_tokenizer, tiny_head, tiny_target
from eagle_batch.models import quick
from eagle_batch.models.target import Target

CONTEXT, ROWS = 224, 3
#: Operations that hand a value, or a size that depends on values, to the host.
READS = {
    "_local_scalar_dense",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "unique2",
    "_unique2",
}
#: Methods that read a tensor's memory without an operation. `numpy` is none of them: kernels of
#: the CPU take memory through it, and a tensor on another device has none to give.
METHODS = {"tolist", "item", "__bool__", "__int__", "__float__", "__index__"}


class Watch(TorchDispatchMode):
    """Notes what the host reads, and the shapes that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self.made: set[tuple[str, tuple[tuple[int, ...], ...]]] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name.startswith("index") and any(
            isinstance(item, torch.Tensor) and item.dtype in {torch.bool, torch.uint8}
            for item in (args[1] if isinstance(args[1], list | tuple) else ())
        )
        if name in READS or by_mask:
            self.reads.append(f"{name} by mask" if by_mask else name)
        result = func(*args, **(kwargs or {}))
        shapes = [tuple(x.shape) for x in tree_flatten(result)[0] if isinstance(x, torch.Tensor)]
        self.made.add((name, tuple(shapes)))
        return result


class WatchMethods(TorchFunctionMode):
    """Notes methods that read memory directly."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in METHODS:
            self._watch.reads.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def watched() -> Iterator[Watch]:
    with Watch() as watch, WatchMethods(watch):
        yield watch


def drafters(target: Target) -> dict[str, Callable[[], Drafter | None]]:
    head = tiny_head(target, draft_vocab=target.shape.vocab - 5)
    sizes: dict[str, Any] = {"slots": ROWS, "capacity": CONTEXT + 8}
    tree: dict[str, Any] = {**sizes, "depth": 3, "width": 3, "nodes": 7}

    def ngram(depth: int) -> NgramDrafter:
        return NgramDrafter(slots=ROWS, capacity=CONTEXT, depth=depth, device=target.device)

    def model() -> DraftModelDrafter:
        small = tiny_target(layers=2, vocab=target.shape.vocab, seed=4)
        return DraftModelDrafter(small, target_vocab=target.shape.vocab, **tree)

    return {
        "plain": lambda: None,
        "chain": lambda: EagleDrafter(head, **sizes, depth=3, width=1, nodes=3),
        "tree": lambda: EagleDrafter(head, **tree),
        "static": lambda: StaticEagleDrafter(head, **sizes),
        "model": model,
        "ngram": lambda: ngram(3),
        "merged": lambda: MergedDrafter(EagleDrafter(head, **tree), ngram(2)),
    }


SAMPLING = {
    "greedy": [SamplingParams(max_tokens=400, ignore_eos=True)],
    "all": [
        SamplingParams(max_tokens=400, ignore_eos=True),
        SamplingParams(max_tokens=400, ignore_eos=True, temperature=1.0, top_k=9, top_p=0.9),
        SamplingParams(
            max_tokens=400,
            min_tokens=300,
            temperature=0.8,
            min_p=0.01,
            repetition_penalty=1.2,
            frequency_penalty=0.3,
            bad_words=("ab", "c"),
        ),
    ],
}


def running(shape: str, sampling: str, seed: int) -> Engine:
    """Return an engine in the middle of three rows, which decides on the device as on CUDA."""
    tokenizer = byte_tokenizer()
    target = tiny_target(vocab=len(tokenizer))
    engine = Engine(
        target, drafters(target)[shape](), tokenizer, lambda _: "", slots=ROWS, context=CONTEXT
    )
    for row in range(ROWS):
        params = SAMPLING[sampling][row % len(SAMPLING[sampling])]
        prompt = tuple(5 + seed + n for n in range(30 + row))
        engine.add(Request(str(row), prompt, params, noise_key=row + seed))
    while engine.waiting:
        engine.step()
    engine._slots._params = replace(engine._slots.params, host_looks=False)
    return engine


def rounds(engine: Engine, longest: int) -> set[Any]:
    """Run rounds until some row is so long; return the shapes that they made."""
    made: set[Any] = set()
    while max(row.length for row in engine._slots.rows) < longest:
        with watched() as watch:
            engine.step()
        assert watch.reads == ["tolist"], "the host read in the middle of a round"
        made |= watch.made
    assert engine.active == ROWS
    return made


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch do what it does on other devices."""
    monkeypatch.setattr(quick, "has_kernels", lambda: False)


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("sampling", list(SAMPLING))
@pytest.mark.parametrize("shape", ["plain", "chain", "tree", "static", "model", "ngram", "merged"])
def test_a_round_reads_once_and_its_shapes_do_not_depend_on_what_is_said(
    shape: str, sampling: str
) -> None:
    warm = rounds(running(shape, sampling, 0), 140)
    assert rounds(running(shape, sampling, 7), 110) - warm == set()


def test_the_watch_sees_what_it_is_for() -> None:
    with watched() as watch:
        x = torch.arange(4)
        assert x.sum().item() == 6
        x[x > 1]
        bool(x.any())
        x.tolist()
    assert {"item", "index by mask", "__bool__", "tolist"} <= set(watch.reads)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_round_on_cuda_waits_for_nothing_but_its_result() -> None:
    engine = running("tree", "all", 0)
    engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            engine.step()  # The one read at the end is the first that the driver sees.
    finally:
        torch.cuda.set_sync_debug_mode("default")
