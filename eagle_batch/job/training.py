"""A head trained by several processes under Ray: one for each GPU, or sharing a machine's cores."""

from __future__ import annotations

import os
import queue
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from eagle_batch.errors import EagleBatchError, StoppedError
from eagle_batch.job.session import ray_session
from eagle_batch.pipeline import Workers

if TYPE_CHECKING:
    from eagle_batch.training.config import TrainingConfig
    from eagle_batch.training.trainer import Progress, TrainingResult

#: Seconds between two looks at how far the first process is.
_LOOK_S = 0.2


class TrainingActor:
    """One process of the team; the first one tells how far it is."""

    def __init__(self) -> None:
        self._news: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def meeting(self) -> str:
        """Return an address on this process's node where the team can meet."""
        import ray

        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"tcp://{host}:{probe.getsockname()[1]}"

    def train(self, config: TrainingConfig, paths: _Paths, rank: int, address: str) -> Any:
        """Run this process's part; returns the result, or the error that a user can mend."""
        if config.threads is not None:
            os.environ["OMP_NUM_THREADS"] = str(config.threads)
        from eagle_batch.training.run import train_head, training_device
        from eagle_batch.training.team import joined

        os.chdir(paths.here)
        try:
            device = training_device(config.device)
            with joined(address, rank, config.workers, device) as team:
                return train_head(
                    config,
                    base=paths.base,
                    target=paths.target,
                    on_file=lambda path, tokens: self._news.put((path, tokens)),
                    on_step=self._news.put,
                    team=team,
                )
        except EagleBatchError as error:
            return error

    def news(self) -> list[Any]:
        """Return what happened since the last call: files that were read, and steps."""
        found = []
        while not self._news.empty():
            found.append(self._news.get())
        return found


class _Paths:
    """Where the data and the target are, by the paths of the process that asked."""

    def __init__(self, base: Path, target: str) -> None:
        self.here = str(Path.cwd())
        self.base = base.absolute()
        self.target = target


def train_on_ray(
    config: TrainingConfig,
    *,
    base: Path,
    target: str,
    on_file: Callable[[Path, int], None],
    on_step: Callable[[Progress], None],
    say: Callable[[str], None],
) -> TrainingResult:
    """Train with `config.workers` processes on the cluster of RAY_ADDRESS, or on this machine.

    Every process must find data and target at the same paths; `out` is written by the first.
    Raises what `train_head` raises, and StoppedError when a process dies.
    """
    import ray

    gpus: float | Literal["auto"] = 0.0 if config.device == "cpu" else "auto"
    cpus = float(config.threads or 1)
    workers = Workers(count=config.workers, min=config.workers, cpus=cpus, gpus=gpus)
    with ray_session(workers, config.threads, say) as resources:
        options = {"num_cpus": resources.cpus, "num_gpus": resources.gpus, "max_concurrency": 2}
        kind = ray.remote(TrainingActor).options(**options)
        actors = [kind.remote() for _ in range(config.workers)]
        address = ray.get(actors[0].meeting.remote())
        # Ray shows each process its own GPU alone, as cuda:0.
        paths = _Paths(base, target)
        running = [a.train.remote(config, paths, n, address) for n, a in enumerate(actors)]
        try:
            result = _follow(actors[0], running, on_file, on_step)
        finally:
            for actor in actors:
                ray.kill(actor)
    if isinstance(result, EagleBatchError):
        raise result
    trained: TrainingResult = result
    return trained


def _follow(
    first: Any,
    running: list[Any],
    on_file: Callable[[Path, int], None],
    on_step: Callable[[Progress], None],
) -> Any:
    """Pass on what the first process tells, until all are done or one failed."""
    import ray

    results: list[Any] = []
    while running:
        done, running = ray.wait(running, timeout=0)
        try:
            results += ray.get(done)
            news = ray.get(first.news.remote())
        except ray.exceptions.RayError as error:
            said = str(error).strip().splitlines()[-1]
            raise StoppedError(
                f"a training process failed: {said}; the same command goes on from the last state"
            ) from error
        for item in news:
            on_file(*item) if isinstance(item, tuple) else on_step(item)
        failed = [each for each in results if isinstance(each, EagleBatchError)]
        if failed:
            return failed[0]
        time.sleep(0 if done else _LOOK_S)
    return results[0]
