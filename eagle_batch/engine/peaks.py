"""What a device can do at most: arithmetic and reading of memory.

For GPUs that are listed, their makers' figures, dense and without sparsity. Everything else is
measured, in about a second: a product of two matrices, and the sum of a long vector.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

#: Part of the name that torch gives -> TFLOP/s in 16 bits, in float32, TB/s. The first that fits.
GPUS: dict[str, tuple[float, float, float]] = {
    "B200": (2250.0, 80.0, 8.0),
    "H200": (989.0, 67.0, 4.8),
    "GH200": (989.0, 67.0, 4.0),
    "H100 NVL": (835.0, 60.0, 3.9),
    "H100 PCIe": (756.0, 51.0, 2.0),
    "H100": (989.0, 67.0, 3.35),
    "A100-SXM4-80GB": (312.0, 19.5, 2.04),
    "A100 80GB PCIe": (312.0, 19.5, 1.94),
    "A100": (312.0, 19.5, 1.56),
    "L40S": (362.0, 91.6, 0.86),
    "L4": (121.0, 30.3, 0.3),
    "A10G": (70.0, 35.0, 0.6),
    "A10": (125.0, 31.2, 0.6),
    "V100": (125.0, 15.7, 0.9),
    "T4": (65.0, 8.1, 0.32),
    "RTX 4090": (165.0, 82.6, 1.01),
    "RTX 3090": (71.0, 35.6, 0.94),
    "MI300X": (1307.0, 163.4, 5.3),
}
#: Rows of the matrices, bytes of the vector.
_MATRIX, _VECTOR_BYTES = 1024, 256 << 20


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that a device does in a second."""

    device: str
    flops: float
    bytes_per_s: float
    #: Where the numbers are from, for people.
    source: str


def find_peak(device: str, dtype: str) -> Peak:
    """Return the peak of a device; a GPU that is not listed and any CPU are measured."""
    if not device.startswith("cuda"):
        return _measured(torch.device(device), torch.float32, _cpu_name())
    name = torch.cuda.get_device_name(device)
    known = next((numbers for part, numbers in GPUS.items() if part in name), None)
    kind = getattr(torch, dtype)
    if known is None:
        return _measured(torch.device(device), kind, name)
    half, single, memory = known
    flops = single if dtype == "float32" else half
    return Peak(name, flops * 1e12, memory * 1e12, f"its maker's figures for {dtype}")


def _measured(device: torch.device, dtype: torch.dtype, name: str) -> Peak:
    size = _MATRIX if device.type == "cpu" else 8 * _MATRIX
    a = torch.rand(size, size, device=device).to(dtype)
    flops = 2 * size**3 / _least_seconds(lambda: a @ a, device)
    vector = torch.ones(_VECTOR_BYTES // 4, device=device)
    speed = _VECTOR_BYTES / _least_seconds(vector.sum, device)
    threads = f" with {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    source = f"measured{threads}: a product of {size:,} x {size:,} matrices, a sum of 256 MiB"
    return Peak(name, flops, speed, source)


def _least_seconds(work: Callable[[], object], device: torch.device, turns: int = 5) -> float:
    seconds = []
    for _ in range(turns):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _cpu_name() -> str:
    """Return the processor's own name, where the system tells it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text("utf-8", "replace").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
