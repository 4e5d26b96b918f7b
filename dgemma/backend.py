"""Where the arithmetic runs: device, dtype, and the BLAS under mlx's CPU backend.

mlx's Linux CPU wheel links the reference BLAS (8 GFLOP/s in float32 on two x86-64 cores). A faster one that exports
the plain `cblas_*` names takes its place when it is in the process before mlx is: `prepare` sees to that, and is
therefore the first thing that `import dgemma` does.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import os
import shutil
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

BLAS_VARIABLE = "DGEMMA_BLAS"  # a library to load, or "none" to keep mlx's own


@dataclass(frozen=True, kw_only=True)
class Blas:
    """Which BLAS serves mlx's CPU backend, and why."""

    name: str
    path: str | None  # the library that dgemma loaded; None when mlx's own serves
    fast: bool
    note: str


_blas: Blas | None = None


def prepare() -> None:
    """Load a fast BLAS before mlx, where that helps; later calls do nothing."""
    global _blas
    if _blas is not None:
        return
    _blas = _choose_blas()
    # transformers would greet whoever has no torch with a warning; dgemma needs none.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def blas() -> Blas:
    """The BLAS in use."""
    prepare()
    return _blas


def one_blas_thread() -> None:
    """One thread for each product of numpy's BLAS, in this process: dgemma.strips shares them out.

    OPENBLAS_NUM_THREADS or OMP_NUM_THREADS in the environment decide instead, if set.
    """
    if "OPENBLAS_NUM_THREADS" in os.environ or "OMP_NUM_THREADS" in os.environ:
        return
    setter = getattr(_numpy_blas(), "scipy_openblas_set_num_threads64_", None)
    if setter is not None:
        setter(1)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _numpy_blas() -> ctypes.CDLL | None:
    """The OpenBLAS inside numpy's wheel; None where numpy was built otherwise."""
    spec = importlib.util.find_spec("numpy")
    found = sorted((Path(spec.origin).parent.parent / "numpy.libs").glob("libscipy_openblas*.so")) if spec else []
    return ctypes.CDLL(str(found[0])) if found else None


def _choose_blas() -> Blas:
    if sys.platform == "darwin":
        return Blas(name="Accelerate", path=None, fast=True, note="macOS's own")
    wanted = os.environ.get(BLAS_VARIABLE)
    if wanted == "none":
        return Blas(name="mlx's own", path=None, fast=False, note=f"{BLAS_VARIABLE}=none asks for it")
    if "mlx.core" in sys.modules:
        note = "mlx was imported before dgemma; import dgemma first"
        if _candidates() and not is_gpu():
            warnings.warn(f"{note}: until then mlx's own BLAS serves, 10 to 30 times slower", RuntimeWarning, stacklevel=4)
        return Blas(name="mlx's own", path=None, fast=False, note=note)
    os.environ.setdefault("KMP_BLOCKTIME", "1")  # MKL's idle threads would spin for 200 ms against mlx's own thread
    for name, path in [("custom", wanted)] if wanted else _candidates():
        try:
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL).cblas_sgemm  # AttributeError where the names are prefixed
        except (OSError, AttributeError) as error:
            if wanted:
                return Blas(name="mlx's own", path=None, fast=False, note=f"{BLAS_VARIABLE}={wanted} failed: {error}")
            continue
        return Blas(name=name, path=str(path), fast=True, note="loaded before mlx")
    return Blas(
        name="mlx's own",
        path=None,
        fast=False,
        note="no faster one found: pip install mkl (x86-64), or apt-get install libopenblas0",
    )


def _candidates() -> list[tuple[str, str]]:
    """Libraries that export plain cblas_* names: MKL's wheel beside this Python, then the system's."""
    found = []
    if importlib.util.find_spec("mlx") is None:
        return found
    for prefix in dict.fromkeys((sys.prefix, sys.base_prefix)):
        found += [("MKL", str(path)) for path in sorted((Path(prefix) / "lib").glob("libmkl_rt.so*"), reverse=True)]
    for name, library in (("MKL", "mkl_rt"), ("OpenBLAS", "openblas")):
        path = ctypes.util.find_library(library)
        if path:
            found.append((name, path))
    return found


def has_compiler() -> bool:
    """Whether mlx could compile fused CPU kernels (it runs `g++`); dgemma's own CPU formulations need none."""
    return sys.platform == "darwin" or shutil.which("g++") is not None


def free_memory() -> int | None:
    """Bytes that the device's memory can still take: the GPU's, or the machine's (None where it does not tell)."""
    import mlx.core as mx  # not above: see prepare

    if is_gpu():
        info = mx.device_info()
        total = info.get("max_recommended_working_set_size") or info.get("memory_size") or info.get("total_memory")
        return None if total is None else int(total) - mx.get_active_memory()
    try:
        with open("/proc/meminfo") as file:
            free = next(1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None
    return min([free, *_group_room()])


def _group_room() -> list[int]:
    """What the control group that this process runs in (a container's limit) still allows, if it says so."""
    group = Path("/sys/fs/cgroup")
    try:
        most, used = int((group / "memory.max").read_text()), int((group / "memory.current").read_text())
        kept = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return [most - used + int(kept["file"])]  # cached files make room when it is needed
    except (OSError, ValueError, KeyError):  # no group, or no limit ("max")
        return []


def is_gpu() -> bool:
    """Whether mlx computes on a GPU (Metal or CUDA)."""
    import mlx.core as mx  # not above: see prepare

    return mx.default_device() == mx.gpu


def device_name() -> str:
    """"Metal", "CUDA" or "CPU", with the device's name where mlx knows it."""
    import mlx.core as mx  # not above: see prepare

    if not is_gpu():
        return "CPU"
    kind = "Metal" if mx.metal.is_available() else "CUDA"
    return f"{kind} ({mx.device_info().get('device_name', 'unknown')})"


def activation_dtype(stored: object) -> object:
    """The dtype to compute in, for weights stored in `stored`: float32 on a CPU (bf16 is 30 times slower there)."""
    import mlx.core as mx  # not above: see prepare

    return stored if is_gpu() else mx.float32
