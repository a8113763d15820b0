"""What workers ask of a cluster, and how many of them it holds."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from eagle_batch.errors import ConfigError
from eagle_batch.job.nodes import fullest_with_room
from eagle_batch.job.resources import Node, Resources, choose_resources, describe_nodes
from eagle_batch.pipeline import Workers, parse_pipeline

HEAD: Node = {"CPU": 0.0, "node:10.0.0.1": 1.0, "memory": 8.0 * (1 << 30)}
L4: Node = {"CPU": 8.0, "GPU": 1.0, "accelerator_type:L4": 1.0, "memory": 32.0 * (1 << 30)}
H100: Node = {"CPU": 64.0, "GPU": 8.0, "accelerator_type:H100": 1.0, "memory": 512.0 * (1 << 30)}
LAPTOP: Node = {"CPU": 8.0}


@pytest.mark.parametrize(
    ("workers", "threads", "cores", "nodes", "wanted"),
    [
        (Workers(), None, 8, [LAPTOP], Resources(1, 1.0, 0.0, "cpu", 8)),
        (Workers(count=2), None, 8, [LAPTOP], Resources(2, 1.0, 0.0, "cpu", 4)),
        (Workers(count=3), None, 2, [LAPTOP], Resources(3, 1.0, 0.0, "cpu", 1)),
        (Workers(count=2), 3, 8, [LAPTOP], Resources(2, 1.0, 0.0, "cpu", 3)),
        (Workers(), None, None, [LAPTOP], Resources(1, 1.0, 0.0, "cpu", None)),
        (Workers(gpus=0), None, None, [H100], Resources(1, 1.0, 0.0, "cpu", None)),
        (
            Workers(count=4, gpus=1),
            None,
            None,
            [HEAD],
            Resources(4, 1.0, 1.0, "cuda", None),
        ),
    ],
)
def test_workers_are_sized_by_cores(
    workers: Workers, threads: int | None, cores: int | None, nodes: list[Node], wanted: Resources
) -> None:
    assert choose_resources(workers, threads, nodes, cores) == wanted


@pytest.mark.parametrize(
    ("fields", "nodes", "count"),
    [
        ({}, [HEAD, L4, H100], 9),
        ({"gpus": 0.5}, [HEAD, L4, L4], 4),
        ({"gpus": 2}, [HEAD, L4, H100], 4),  # one GPU of a node is none for a worker of two
        ({"cpus": 16.0}, [H100], 4),
        ({"memory_gib": 100.0}, [L4, H100], 5),
        ({"accelerator": "L4"}, [L4, H100], 1),
        ({"accelerator": "H100", "gpus": 4}, [L4, H100], 2),
        ({"resources": {"licence": 1.0}}, [{**H100, "licence": 3.0}, L4], 3),
        ({"min": 12}, [H100], 12),  # waited for
        ({"max": 6}, [H100], 6),
        ({"gpus": 1}, [HEAD], 1),  # nothing there yet: the least
    ],
)
def test_auto_takes_as_many_workers_as_the_nodes_hold(
    fields: dict[str, Any], nodes: list[Node], count: int
) -> None:
    chosen = choose_resources(Workers(**fields), None, nodes)
    assert chosen.count == count
    assert chosen.follows
    assert chosen.device == "cuda"


def test_only_gpus_have_a_type_so_that_the_same_file_runs_on_a_laptop() -> None:
    chosen = choose_resources(Workers(accelerator="L4"), None, [LAPTOP], 8)
    assert chosen == Resources(1, 1.0, 0.0, "cpu", 8)


def test_packing_fills_the_fullest_node_that_has_room() -> None:
    nodes = {"big": H100, "small": L4, "head": HEAD}
    asked = Resources(9, 1.0, 1.0, "cuda", None)
    workers: Counter[str] = Counter()
    order = []
    while (node := fullest_with_room(nodes, asked, workers)) is not None:
        order.append(node)
        workers[node] += 1
    assert order == ["small"] + ["big"] * 8


def test_needs_and_nodes_are_told_in_words() -> None:
    asked = replace(Resources(1, 4.0, 2.0, "cuda", None), memory=64 << 30, accelerator="H100")
    assert asked.describe_needs() == "4 CPU, 2 GPU, 64 GiB memory, 0.001 accelerator_type:H100"
    assert describe_nodes([L4, L4, {"CPU": 2.0}]) == (
        "2 x (8 CPU, 1 GPU, 1 accelerator_type:L4, 32 GiB memory); 1 x (2 CPU)"
    )
    assert describe_nodes([]) == "no nodes"


@pytest.mark.parametrize(
    ("workers", "said"),
    [
        ({"min": 3, "max": 2}, "workers.max and workers.min: found 2 and 3"),
        ({"count": 4, "max": 2}, "workers.max and workers.count: found 2 and 4"),
        ({"count": 2, "min": 3}, "workers.min and workers.count: found 3 and 2"),
        ({"gpus": 1.5}, "workers.gpus: found 1.5"),
        ({"resources": {"GPU": 1.0}}, "workers.resources: found CPU, GPU or memory"),
        ({"placement": "far"}, "workers.placement"),
    ],
)
def test_what_no_cluster_can_do_is_refused(workers: dict[str, Any], said: str) -> None:
    document = {
        "name": "p",
        "input": {"path": "in.parquet"},
        "target": {"model": "owner/name"},
        "stages": [{"name": "one", "prompt": "a"}],
        "output": {"path": "out"},
        "workers": workers,
    }
    refused(document, said)


def refused(document: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_pipeline(document, "p.yaml")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"engine": {"tensor_parallel": 2}},
            "engine.tensor_parallel and engine.kind: found 2 and 'own', which never splits",
        ),
        (
            {"engine": {"kind": "vllm", "tensor_parallel": 2}},
            "engine.tensor_parallel and workers.gpus: found 2 and auto",
        ),
        (
            {"engine": {"kind": "vllm"}, "workers": {"gpus": 2}},
            "engine.tensor_parallel and workers.gpus: found 1 and 2.0; expected the same number",
        ),
        (
            {"engine": {"kind": "vllm"}, "workers": {"gpus": 0.5}},
            "workers.gpus: found 0.5; vllm takes whole GPUs",
        ),
        (
            {"engine": {"kind": "vllm"}, "speculation": {"method": "eagle", "tree": "static"}},
            "speculation.tree: found 'static'; vllm drafts chains",
        ),
        (
            {"engine": {"kind": "vllm"}, "speculation": {"method": "ngram"}},
            "stages.0.sampling.min_p: vllm has no such sampling while it drafts",
        ),
    ],
)
def test_what_vllm_cannot_do_is_refused_before_anything_runs(
    fields: dict[str, Any], said: str
) -> None:
    document = {
        "name": "p",
        "input": {"path": "in.parquet"},
        "target": {"model": "owner/name"},
        "stages": [{"name": "one", "prompt": "a", "sampling": {"temperature": 1.0, "min_p": 0.1}}],
        "output": {"path": "out"},
    }
    speculation = {"head": "head", **fields.get("speculation", {})}
    if speculation.get("method") == "ngram":
        del speculation["head"]
    refused(document | fields | {"speculation": speculation}, said)
