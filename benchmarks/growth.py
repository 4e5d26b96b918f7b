"""How does the time grow: a step with the prefix, the batch and the canvas, prefill with the length of the prompt?

    python benchmarks/growth.py --geometry full          docs/growth.png and docs/growth.json, on a GPU with 80 GB
    python benchmarks/growth.py --geometry small --out /tmp/growth --prefix 128 512 2048      to try it

Random weights of a geometry, or the demo checkpoint. A step is one of the loop's own, sampler included; beside it stand
its attention in sliding and in full layers (dgemma.parts), since only the latter may grow with the prefix. Needs
matplotlib (dgemma's `evaluate` extra).
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import dgemma  # noqa: F401: first, so that a fast BLAS is in the process before mlx

import mlx.core as mx

from dgemma import backend, bench, kernels
from dgemma.breakdown import STREAK
from dgemma.denoise import Prefilled, denoise
from dgemma.parts import step_parts
from dgemma.plan import dtype_name
from dgemma.runtime import Dgemma, endless
from dgemma.subject import Subject
from dgemma.terminal import Progress

DOCS = Path(__file__).resolve().parent.parent / "docs" / "growth"
ATTENTION = ("sliding attention", "full attention")
# Colours of Okabe and Ito, which also differ in lightness.
STYLES = {
    "whole step": ("#000000", "o"), "sliding attention": ("#0072B2", "s"), "full attention": ("#D55E00", "^"),
    "step": ("#000000", "o"), "step / row": ("#009E73", "D"), "prefill": ("#000000", "o"),
}  # fmt: skip


# -- measuring --------------------------------------------------------------------------------------------------------


def run(o: argparse.Namespace) -> dict[str, Any]:
    """All four curves, ready for JSON."""
    with Progress() as progress:
        runtime = Dgemma()
        model = Subject(geometry=o.geometry, bits=o.bits).load(progress)
        runtime.use(model, bench.reserved(model.config))
        most = model.config.text.max_position_embeddings - 2 * max(o.canvas)
        prefixes, at = [n for n in o.prefix if n <= most], min(o.at, most)
        found: dict[str, Any] = {
            "machine": bench.machine() | {"device": backend.device_name(), "kernels": kernels.name},
            "model": {"name": o.geometry, "dtype": dtype_name(model.dtype), "bits": o.bits, "canvas": runtime.canvas},
            "at": at, "prefix": [], "batch": [], "canvas": [],
        }  # fmt: skip
        for prefix in prefixes:
            progress.now("measuring", f" prefix {prefix:,}")
            taken = step(runtime, prefix, 1, o.seconds) | attention(runtime, prefix, o.seconds)
            found["prefix"].append({"prefix": prefix} | taken)
        for batch in o.batch:
            progress.now("measuring", f" batch {batch}")
            found["batch"].append({"batch": batch} | step(runtime, at, batch, o.seconds))
        for canvas in o.canvas:
            progress.now("measuring", f" canvas {canvas}")
            model.config = replace(model.config, canvas_length=canvas)
            runtime.use(model)
            found["canvas"].append({"canvas": canvas} | step(runtime, at, 1, o.seconds))
    return found


def step(runtime: Dgemma, prefix: int, batch: int, seconds: float) -> dict[str, float]:
    """Milliseconds to read a prompt, the second time, and of a step of the loop."""
    ids, options = runtime.prompt(batch, prefix), endless(runtime.canvas, 1 << 20)
    for _ in range(2):  # the first time, kernels are made
        began = time.perf_counter()
        loop = denoise(runtime.model, ids, [], options=options, seeds=range(batch))
        assert isinstance(next(loop), Prefilled)
        prefill = 1e3 * (time.perf_counter() - began)
    next(loop)
    next(loop)
    streak = several(lambda: [next(loop) for _ in range(STREAK)], seconds)
    return {"prefill": prefill, "step": streak / STREAK}


def attention(runtime: Dgemma, prefix: int, seconds: float) -> dict[str, float]:
    """Milliseconds of the attention of a step, in layers of each kind."""
    caches, canvas, logits = runtime.prefilled(prefix, 1)
    parts = {part.name: part for part in step_parts(runtime.model, canvas, caches, logits)}
    return {name: several(lambda part=parts[name]: mx.eval(part.run()), seconds) for name in ATTENTION if name in parts}


def several(thing, seconds: float) -> float:
    """The median of the milliseconds of calls that go on for about `seconds`, after one that does not count."""
    thing()
    mx.synchronize()
    taken, end = [], time.perf_counter() + seconds
    while len(taken) < 3 or time.perf_counter() < end:
        began = time.perf_counter()
        thing()
        mx.synchronize()
        taken.append(1e3 * (time.perf_counter() - began))
    return median(taken)


# -- drawing ----------------------------------------------------------------------------------------------------------


def plot(found: dict[str, Any], path: Path) -> None:
    """Four panels: a step against prefix, batch and canvas, prefill against length."""
    import matplotlib  # a script that only measures needs none

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, ((prefix, prefill), (batch, canvas)) = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    lines = {"whole step": "step", **{name: name for name in ATTENTION if name in found["prefix"][0]}}
    draw(prefix, found["prefix"], "prefix", lines, "a denoising step against its prefix", "tokens before the canvas", "ms")
    for row in found["prefix"]:
        row["rate"] = 1e3 * row["prefix"] / row["prefill"]
    title, labels = "reading the prompt (flat: in proportion)", ("tokens of the prompt", "tokens a second")
    draw(prefill, found["prefix"], "prefix", {"prefill": "rate"}, title, *labels)
    for row in found["batch"]:
        row["per row"] = row["step"] / row["batch"]
    at = f"prefix {found['at']:,}"
    draw(batch, found["batch"], "batch", {"step": "step", "step / row": "per row"}, f"a denoising step, {at}", "rows", "ms")
    draw(canvas, found["canvas"], "canvas", {"step": "step"}, f"a denoising step, {at}", "tokens of the canvas", "ms")
    model, machine = found["model"], found["machine"]
    packed = f"{model['bits']} bit, " if model["bits"] else ""
    device = machine["device"] if machine["device"] != "CPU" else f"{machine['cpu']}, {machine['cores']} cores"
    figure.suptitle(f"{model['name']}, {packed}{model['dtype']}, canvas {model['canvas']} — {device}", fontsize=11)
    figure.savefig(path, dpi=110)


def draw(axis, rows: list[dict[str, float]], x: str, lines: dict[str, str], title: str, label: str, unit: str) -> None:
    """One panel: the curves of `lines` (legend -> what of each row), from zero up, sizes on a logarithmic axis."""
    sizes = [row[x] for row in rows]
    for name, what in lines.items():
        colour, marker = STYLES[name]
        axis.plot(sizes, [row[what] for row in rows], color=colour, marker=marker, linewidth=1.5, markersize=5, label=name)
    axis.set(title=title, xlabel=label, ylabel=unit, xscale="log")
    axis.set_ylim(bottom=0)
    axis.set_xticks(sizes, [f"{size:,}" for size in sizes], fontsize=8)
    axis.minorticks_off()
    axis.grid(alpha=0.25)
    if len(lines) > 1:
        axis.legend(frameon=False)


def main() -> None:
    """Measure, write the JSON, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default="mid", help="demo, small, mid or full (default %(default)s)")
    parser.add_argument("--bits", type=int, help="pack the weights")
    parser.add_argument("--prefix", type=int, nargs="+", default=[128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--canvas", type=int, nargs="+", default=[32, 64, 128, 256, 512])
    parser.add_argument("--at", type=int, default=1024, help="the prefix of the other two curves (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each point (default %(default)s)")
    parser.add_argument("--out", type=Path, default=DOCS, help="files to write, without their ending (default %(default)s)")
    o = parser.parse_args()
    found = run(o)
    o.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    plot(found, o.out.with_suffix(".png"))
    print(f"{o.out.with_suffix('.png')} and .json")


if __name__ == "__main__":
    main()
