"""`dgemma doctor`: what this machine offers, what it lacks, and how fast it multiplies."""

from __future__ import annotations

import os
import platform
import sys
import time
from importlib import metadata
from typing import Any

import mlx.core as mx

from . import backend
from .render import size

PACKAGES = ("dgemma", "mlx", "mlx-cpu", "mlx-metal", "mlx-cuda-12", "mlx-cuda-13", "transformers", "numpy", "pillow")
# mlx runs g++ to fuse element-wise operations on a CPU, but only those that a program compiles; dgemma.cpu compiles none.
NO_COMPILER = "; not needed, its absence costs no speed: dgemma fuses nothing at run time on a CPU"
SLOW = 50.0  # GFLOP/s in float32: the reference BLAS does 8 on two cores, a good one 200


def examine() -> dict[str, Any]:
    """All findings, ready for JSON. Takes a few seconds, most of them multiplying."""
    blas, gpu = backend.blas(), backend.is_gpu()
    found: dict[str, Any] = {
        "device": backend.device_name(),
        "dtype": "the checkpoint's dtype" if gpu else "float32",
        "versions": {"python": platform.python_version()} | versions(),
        "platform": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "blas": {"name": blas.name, "path": blas.path, "fast": blas.fast, "note": blas.note},
        "compiler": backend.has_compiler(),
        "gflops": {"cpu float32": round(gflops(mx.cpu, mx.float32, 1024), 1)},
        "memory": memory(gpu),
    }
    if gpu:
        found["gflops"]["gpu bfloat16"] = round(gflops(mx.gpu, mx.bfloat16, 8192), 1)
    return found | {"advice": advice(found, gpu), "verdict": verdict(found, gpu)}


def versions() -> dict[str, str]:
    """Installed versions of what dgemma stands on."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def gflops(device: mx.Device, dtype: mx.Dtype, n: int, seconds: float = 0.5) -> float:
    """The best rate of n x n matrix products within about `seconds`, in 1e9 multiplications and additions a second."""
    with mx.stream(device):
        a = mx.random.uniform(shape=(n, n)).astype(dtype)
        mx.eval(a, a @ a)  # kernels are made and threads started outside the measurement
        best, end = float("inf"), time.perf_counter() + seconds
        while True:
            began = time.perf_counter()
            mx.eval(a @ a)
            now = time.perf_counter()
            best = min(best, now - began)
            if now > end:
                return 2 * n**3 / best / 1e9


def memory(gpu: bool) -> dict[str, int]:
    """Bytes of memory: the machine's, what is free of it (where Linux tells), the GPU's."""
    found = {}
    if hasattr(os, "sysconf"):
        found["total"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/proc/meminfo") as file:
            found["available"] = next(1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        pass
    if gpu:
        of_gpu = mx.device_info().get("memory_size") or mx.device_info().get("total_memory")
        if of_gpu:
            found["gpu"] = int(of_gpu)
    return found


def advice(found: dict[str, Any], gpu: bool) -> list[str]:
    """What would make this machine faster, the weightiest first."""
    lines = []
    if not gpu and not found["blas"]["fast"]:
        lines.append(f"a faster BLAS: {found['blas']['note']}")
    if not gpu and sys.platform == "linux" and os.path.exists("/dev/nvidiactl"):
        lines.append("an NVIDIA driver is here: in a clone, pip install -e '.[cuda13]' (or cuda12) computes on the GPU")
    return lines


def verdict(found: dict[str, Any], gpu: bool) -> str:
    """One line: is this machine ready?"""
    rate = found["gflops"]["gpu bfloat16" if gpu else "cpu float32"]
    if gpu:
        return f"ready: computes on {found['device']} at {rate:,.0f} GFLOP/s"
    if rate >= SLOW:
        return f"ready: computes on the CPU at {rate:.0f} GFLOP/s"
    if advice(found, gpu):
        return f"works, but slowly: {rate:.0f} GFLOP/s on the CPU; see advice"
    return f"ready, but slow for its BLAS: {rate:.0f} GFLOP/s on the CPU; is it busy with something else?"


def text(found: dict[str, Any]) -> str:
    """What `examine` found, for a person."""
    blas, memory_found = found["blas"], found["memory"]
    lines = [
        ("device", f"{found['device']}, computes in {found['dtype']}"),
        ("platform", found["platform"]),
        ("versions", ", ".join(f"{name} {version}" for name, version in found["versions"].items())),
        ("BLAS", f"{blas['name']}: {blas['note']}" + (f" ({blas['path']})" if blas["path"] else "")),
        ("C++ compiler", ("present" if found["compiler"] else "none") + NO_COMPILER),
        *((f"speed, {name}", f"{rate:,.1f} GFLOP/s") for name, rate in found["gflops"].items()),
        ("memory", ", ".join(f"{name} {size(count)}" for name, count in memory_found.items()) or "unknown"),
        *(("advice", line) for line in found["advice"]),
        ("verdict", found["verdict"]),
    ]
    return "".join(f"{name:<20} {value}\n" for name, value in lines)
