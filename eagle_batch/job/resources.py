"""How many workers run, and what each of them gets: settled from the pipeline and the cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from eagle_batch.pipeline import Workers
from eagle_batch.report.progress import counted

#: Ray's names of what a node has -> how much of it.
Node = Mapping[str, float]
_GIB = 1 << 30
#: What Ray takes of a node's `accelerator_type:...` for an actor that asks for that type.
_TYPE_SHARE = 0.001


@dataclass(frozen=True, slots=True)
class Resources:
    """How many workers run at first, and what each gets."""

    count: int
    cpus: float
    gpus: float
    device: str
    #: CPU threads of each engine.
    threads: int | None
    #: Bytes of main memory that Ray reserves for each; None reserves none.
    memory: int | None = None
    #: Type of GPU, by Ray's name such as "L4"; None takes any.
    accelerator: str | None = None
    #: Resources that the cluster's nodes declare themselves -> how much of each.
    custom: Mapping[str, float] = field(default_factory=dict)
    #: "default", "spread" or "pack".
    placement: str = "default"
    #: Whether the number follows what the cluster has room for, as nodes join and leave.
    follows: bool = False
    #: What is kept free on one of the nodes for something else than workers, by Ray's names.
    beside: Mapping[str, float] = field(default_factory=dict)

    def needs(self) -> dict[str, float]:
        """Return what one worker takes of a node, by Ray's names."""
        needs = {"CPU": self.cpus, "GPU": self.gpus, "memory": float(self.memory or 0)}
        if self.accelerator is not None:
            needs[f"accelerator_type:{self.accelerator}"] = _TYPE_SHARE
        return {name: much for name, much in {**needs, **self.custom}.items() if much > 0}

    def room(self, nodes: Sequence[Node]) -> int:
        """Return how many workers these nodes hold in all, were they empty."""
        needs = self.needs()
        nodes = _without(nodes, self.beside)
        return sum(
            min(int(node.get(name, 0.0) / much + 1e-9) for name, much in needs.items())
            for node in nodes
        )

    def describe(self) -> str:
        """Return one line for people."""
        each = "all CPU threads" if self.threads is None else counted(self.threads, "CPU thread")
        if self.gpus:
            each = f"{self.gpus:g} GPU"
        of = "with" if self.count == 1 else "each with"
        return f"{counted(self.count, 'worker')} on {self.device}, {of} {each}"

    def describe_needs(self) -> str:
        """Return what one worker asks for, for people."""
        return _say(self.needs())


def choose_resources(
    workers: Workers,
    threads: int | None,
    nodes: Sequence[Node],
    cores: int | None = None,
    *,
    beside: Mapping[str, float] | None = None,
) -> Resources:
    """Settle the number and size of workers for a cluster of such nodes.

    One worker for each GPU; on the CPU one that uses all `cores`, since each holds a whole model.
    Where `cores` is None (hosts of a cluster), only the threads that the pipeline names are set.
    """
    has_gpu = any(node.get("GPU", 0.0) for node in nodes)
    each = (1.0 if has_gpu else 0.0) if workers.gpus == "auto" else float(workers.gpus)
    memory = None if workers.memory_gib is None else int(workers.memory_gib * _GIB)
    asked = Resources(
        count=1,
        cpus=workers.cpus,
        gpus=each,
        device="cuda" if each else "cpu",
        threads=threads,
        memory=memory,
        accelerator=workers.accelerator if each else None,
        custom=workers.resources,
        placement=workers.placement,
        follows=workers.count == "auto" and each > 0,
        beside=beside or {},
    )
    return _with_count(asked, workers, nodes, cores)


def _with_count(
    asked: Resources, workers: Workers, nodes: Sequence[Node], cores: int | None
) -> Resources:
    count = _automatic(asked, workers, nodes) if workers.count == "auto" else workers.count
    threads = asked.threads
    if threads is None and not asked.gpus and cores is not None:
        threads = max(1, cores // count)
    return replace(asked, count=count, threads=threads)


def _automatic(asked: Resources, workers: Workers, nodes: Sequence[Node]) -> int:
    count = max(asked.room(nodes) if asked.gpus else 1, workers.min)
    return count if workers.max is None else min(count, workers.max)


def _without(nodes: Sequence[Node], taken: Mapping[str, float]) -> list[Node]:
    """Return the nodes without what something else takes of the first that has it all."""
    left = [dict(node) for node in nodes]
    wanted = {name: much for name, much in taken.items() if much}
    for node in left:
        if wanted and all(node.get(name, 0.0) >= much for name, much in wanted.items()):
            for name, much in wanted.items():
                node[name] -= much
            break
    return list(left)


def describe_nodes(nodes: Sequence[Node]) -> str:
    """Return what a cluster has, for people."""
    texts = [_say({name: node[name] for name in sorted(node) if _is_told(name)}) for node in nodes]
    counted = {text: texts.count(text) for text in texts}
    return "; ".join(f"{many} x ({text})" for text, many in counted.items()) or "no nodes"


def _is_told(name: str) -> bool:
    return not name.startswith(("node:", "object_store_memory"))


def _say(much: Mapping[str, float]) -> str:
    return ", ".join(
        f"{value / _GIB:.3g} GiB memory" if name == "memory" else f"{value:g} {name}"
        for name, value in much.items()
    )
