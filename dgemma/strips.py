"""How dgemma.cpu computes with numpy: in mlx's memory, in pieces that stay in a core's cache, on all cores.

numpy lets go of the interpreter's lock in all that takes time (products, exponentials, sums of more than a few hundred
numbers), so plain threads are enough. Its BLAS takes one thread then (backend.one_blas_thread): one that shares out a product
itself waits for all its threads at the end of each, and stands still when a core is busy with something else (seen: 7 ms for
a product of 0.7).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import TypeVar

import mlx.core as mx
import numpy as np

from . import backend

Task = TypeVar("Task")

THREADS = backend.cores()
STRIP = 1 << 16  # numbers of a strip that stays in a core's cache through several passes (256 KiB)
WAKE = 1 << 22  # multiplications that are worth waking another thread for
PIECES = 2 * THREADS  # of one product: small enough that a core which is busy with something else holds nobody up for long

_pool = ThreadPoolExecutor(max(1, THREADS - 1), thread_name_prefix="dgemma-cpu")


def view(x: mx.array) -> np.ndarray:
    """mlx's own memory as a numpy array, evaluated first if need be.

    Writes reach the array, so write only to results that nobody else reads.
    """
    return np.array(x, copy=False)


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """`a [M, N] @ b [N, O]`, the longer side of the result in as many pieces as are worth waking a thread for."""
    (rows, inner), columns = a.shape, b.shape[1]
    pieces = min(PIECES, rows * inner * columns // WAKE)
    if pieces < 2:
        return a @ b
    out = np.empty((rows, columns), np.float32)
    cuts = [max(rows, columns) * i // pieces for i in range(pieces + 1)]
    parts = [slice(*cut) for cut in zip(cuts, cuts[1:])]
    if rows >= columns:
        in_turns(lambda part: np.matmul(a[part], b, out=out[part]), parts)
    else:
        in_turns(lambda part: np.matmul(a, b[:, part], out=out[:, part]), parts)
    return out


def in_strips(function: Callable[..., None], *arrays: np.ndarray) -> None:
    """function(*strips) over strips of rows of every array, on all cores; the arrays share their first axis."""
    rows, width = len(arrays[0]), max(1, arrays[0].size // max(1, len(arrays[0])))
    if arrays[0].size <= STRIP:
        function(*arrays)
        return
    strip = max(1, STRIP // width)
    in_turns(lambda i: function(*(a[i : i + strip] for a in arrays)), range(0, rows, strip))


def in_turns(function: Callable[[Task], None], tasks: Sequence[Task], alone: bool = False) -> None:
    """function(task) for every task, on all cores: whoever is done takes the next, so that a core that is busy with something
    else is not waited for. `alone`: on this thread only.
    """
    if alone or len(tasks) == 1:
        for task in tasks:
            function(task)
        return
    left, lock = iter(tasks), Lock()

    def work() -> None:
        while True:
            with lock:
                task = next(left, left)
            if task is left:
                return
            function(task)

    others = [_pool.submit(work) for _ in range(THREADS - 1)]
    work()
    for other in others:
        other.result()
