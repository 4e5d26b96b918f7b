"""`dgemma profile`: where the time of one denoising step, and of one picture, goes.

Every part (dgemma.parts) is run by itself, one evaluation at its end, in turns with a whole step of the real loop, and
stands beside the bytes that it cannot avoid to read or write and the operations that it cannot avoid. What the parts leave
of the whole is the host's: Python, launches, waits, numbers read back. On a GPU a part alone waits for its own launches, which
in the loop go beside what runs before them: there the parts may come to more than the whole.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import mlx.core as mx

from . import backend, bench, kernels, render, results
from .denoise import denoise
from .parts import Part, image_parts, step_parts
from .plan import dtype_name
from .runtime import Dgemma, endless, noise_picture
from .step import Step
from .subject import Subject
from .terminal import Progress

ENDLESS = 1 << 20  # denoising steps of a block that is to go on
STREAK = 4  # steps in a row: the loop lays one out while a GPU computes another
BUDGET = 280  # soft tokens of the picture


def read(args: argparse.Namespace) -> dict[str, Any]:
    """All of it for the command line's arguments, ready for JSON. OptionError for sizes that do not fit."""
    settings = bench.Settings(
        subject=Subject.of(args), seconds=args.seconds, prefixes=(args.prefix,), batches=(args.batch,),
        budgets=(args.image_budget,) if args.image_budget else None,
    )  # fmt: skip
    budget = args.image_budget or BUDGET
    with Progress() as progress:
        model = settings.subject.load(progress, lambda opened: bench.plan(opened, settings))
        runtime = Dgemma()
        runtime.use(model, bench.reserved(model.config))
        found = {
            "machine": bench.machine() | {"device": backend.device_name(), "kernels": kernels.name},
            "model": {"name": settings.subject.name, "dtype": dtype_name(model.dtype), "bits": args.bits},
            "prefix": args.prefix, "batch": args.batch,
        }  # fmt: skip
        found["step"] = step(runtime, args.prefix, args.batch, args.seconds, progress)
        reads = not bench.too_large(model.config, budget)
        found["image"] = image(runtime, budget, args.seconds, progress) if reads else None
    return found


def step(runtime: Dgemma, prefix: int, batch: int, seconds: float, progress: Progress) -> dict[str, Any]:
    """The parts of a denoising step and the whole, measured."""
    options = endless(runtime.canvas, ENDLESS)
    loop = denoise(runtime.model, runtime.prompt(batch, prefix), [], options=options, seeds=range(batch))
    progress.now("reading the prompt")
    for event in loop:
        if isinstance(event, Step):
            break
    caches, canvas, logits = runtime.prefilled(prefix, batch)
    parts = step_parts(runtime.model, canvas, caches, logits)
    return told(parts, lambda: next(loop), seconds, progress)


def image(runtime: Dgemma, budget: int, seconds: float, progress: Progress) -> dict[str, Any]:
    """The parts of encoding a picture and the whole, measured."""
    columns, rows = bench.grid(budget)
    parts, picture = image_parts(runtime.model, columns, rows), noise_picture(columns, rows)
    found = told(parts, lambda: mx.eval(runtime.model.encode_images([picture])), seconds, progress)
    return found | {"image_tokens": columns * rows // 9}


def told(parts: Sequence[Part], whole: Callable[[], Any], seconds: float, progress: Progress) -> dict[str, Any]:
    """Medians of the whole and of each part, and what they come to; `seconds` for each of them, all in turns."""
    things = [lambda: [whole() for _ in range(STREAK)], *(lambda part=part: mx.eval(part.run()) for part in parts)]
    for thing in things:
        thing()  # kernels are made
    rounds, end = [], time.perf_counter() + seconds * len(things)
    while not rounds or time.perf_counter() < end:
        progress.now("measuring", f", round {len(rounds) + 1}")
        rounds.append([_milliseconds(thing) * times for thing, times in zip(things, [1 / STREAK, *(part.times for part in parts)])])
    (whole_ms, *taken), rest = map(median, zip(*rounds)), median(first - sum(others) for first, *others in rounds)
    found = [
        {
            "part": part.name, "layers": part.layers, "ms": ms, "share": ms / whole_ms,
            "bytes": part.times * part.nbytes, "operations": part.times * part.operations,
            "gb_per_second": part.times * part.nbytes / ms / 1e6, "gflops": part.times * part.operations / ms / 1e6,
        }
        for part, ms in zip(parts, taken)
    ]  # fmt: skip
    return {"whole_ms": whole_ms, "rest_ms": rest, "rounds": len(rounds), "parts": found}


def _milliseconds(thing: Callable[[], Any]) -> float:
    mx.synchronize()
    began = time.perf_counter()
    thing()
    mx.synchronize()
    return 1e3 * (time.perf_counter() - began)


def text(found: dict[str, Any]) -> str:
    """What `read` found, for a person; the tables are Markdown."""
    model, machine = found["model"], found["machine"]
    packed = f"{model['bits']} bit, " if model["bits"] else ""
    lines = [
        f"{model['name']}, {packed}{model['dtype']} on {machine['device']}, kernels {machine['kernels']}; "
        f"{machine['cpu']}, {machine['cores']} cores",
        f"one denoising step, prefix {found['prefix']:,}, batch {found['batch']}: {results.number(found['step']['whole_ms'])} ms",
        "",
        *_table(found["step"], "host: the rest"),
    ]
    if found["image"]:
        image = found["image"]
        lines += ["", f"one picture of {image['image_tokens']} soft tokens: {results.number(image['whole_ms'])} ms", ""]
        lines += _table(image, "norms, pooling, host: the rest")
    return "\n".join(lines) + "\n"


def _table(of: dict[str, Any], rest: str) -> list[str]:
    rows = [["part", "layers", "ms", "share", "must move", "GB/s", "must do, GFLOP", "GFLOP/s"]]
    for one in of["parts"]:
        rows.append([
            one["part"], str(one["layers"]), results.number(one["ms"]), f"{100 * one['share']:.0f} %", render.size(one["bytes"]),
            results.number(one["gb_per_second"]), results.number(one["operations"] / 1e9), results.number(one["gflops"]),
        ])  # fmt: skip
    rows.append([rest, "", results.number(of["rest_ms"]), f"{100 * of['rest_ms'] / of['whole_ms']:.0f} %", "", "", "", ""])
    return results.aligned(rows)
