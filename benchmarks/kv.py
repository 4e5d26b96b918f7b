"""What do packed keys and values cost, and save? Right answers, bytes and step time of the demo checkpoint, for each way to keep them.

    python benchmarks/kv.py --n 10        the table of docs/kv.md; needs scikit-learn (dgemma's `evaluate` extra)

Questions and grading are those of examples/demo/evaluate.py. Bytes are those of the caches after a prompt of `--prefix` random
tokens; a step is one of the loop's own after that prompt, the ways taking turns.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples" / "demo"))

from evaluate import CHECKPOINT, SETS, cases  # noqa: E402

from dgemma import Pipeline  # noqa: E402: before mlx, so that a fast BLAS serves
from dgemma.attention import Packing  # noqa: E402
from dgemma.denoise import Prefilled, denoise  # noqa: E402
from dgemma.runtime import Dgemma, endless  # noqa: E402

import mlx.core as mx  # noqa: E402, I001: see above

WAYS = {"as they are": None} | {
    f"{bits} bit, groups of {group}": Packing(bits, group) for bits, group in ((8, 64), (8, 32), (4, 64), (4, 32))
}
STEPS, TURNS = 8, 5


def answered(pipe: Pipeline, packing: Packing | None, n: int, seed: int) -> tuple[int, int]:
    """Right answers, and questions."""
    right = asked = 0
    settings = {} if packing is None else {"kv_bits": packing.bits, "kv_group_size": packing.group_size}
    for task in SETS:
        for i, case in enumerate(cases(task, n, seed, swap=False)):
            pictures = [picture.image for picture in case.shown]
            answer = pipe(case.messages(), pictures, seed=1000 * seed + i, image_budget=case.budget, **settings)
            right, asked = right + (not case.faults(answer.text)), asked + 1
    return right, asked


def held(pipe: Pipeline, packing: Packing | None, ids) -> tuple[int, int]:
    """Bytes of full and of sliding layers' caches after a prompt."""
    caches = pipe.model.make_caches(packing=packing)
    pipe.model.prefill(ids, [], caches)
    sliding = sum(cache.nbytes for cache in caches if hasattr(cache, "window"))
    return sum(cache.nbytes for cache in caches) - sliding, sliding


def steps(pipe: Pipeline, packing: Packing | None, ids, canvas: int) -> list[float]:
    """Milliseconds of the steps of one block."""
    options, times = replace(endless(canvas, STEPS), packing=packing), []
    for event in denoise(pipe.model, ids, [], options=options, seeds=[0]):
        times.append(time.perf_counter())
        if not isinstance(event, Prefilled) and len(times) == STEPS + 1:
            break
    return [1e3 * (b - a) for a, b in zip(times[1:], times[2:])]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=10, help="questions of each task (default %(default)s)")
    parser.add_argument("--seed", type=int, default=3, help="of questions and answers (default %(default)s)")
    parser.add_argument("--prefix", type=int, default=1024, help="tokens of the prompt of bytes and times (default %(default)s)")
    o = parser.parse_args()
    pipe, runtime = Pipeline.from_pretrained(CHECKPOINT), Dgemma()
    runtime.use(pipe.model, [])
    ids, taken = runtime.prompt(1, o.prefix), {way: [] for way in WAYS}
    for _ in range(TURNS):
        for way, packing in WAYS.items():
            taken[way] += steps(pipe, packing, ids, runtime.canvas)
    print("| keys and values | full layers, bytes | sliding layers, bytes | right answers | step, ms: median (best) |\n|---|--:|--:|---|--:|")
    for way, packing in WAYS.items():
        (full, sliding), (right, asked) = held(pipe, packing, ids), answered(pipe, packing, o.n, o.seed)
        accuracy = f"{100 * right / asked:.1f} % ({right} of {asked})"
        print(f"| {way} | {full:,} | {sliding:,} | {accuracy} | {median(taken[way]):.1f} ({min(taken[way]):.1f}) |", flush=True)
        mx.clear_cache()


if __name__ == "__main__":
    main()
