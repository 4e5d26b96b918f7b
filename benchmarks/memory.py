"""Does `dgemma fit` tell the truth? Its prediction beside the measured peak, for several jobs on this machine.

    python benchmarks/memory.py CHECKPOINT [--jobs 512:0:1 4096:2:1 2048:0:4]

A job is PROMPT:IMAGES:BATCH; images have 280 soft tokens. A job encodes its images, prefills, and takes two denoising
steps. On a GPU the peak is mlx's; on a CPU it is the growth of the process's resident memory since before loading, since
part of the work is numpy's. Every job runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

JOBS = ("512:0:1", "4096:0:1", "3000:2:1", "1024:0:4", "16384:0:1")


def resident(name: str) -> int:
    """VmRSS or VmHWM of this process, bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def measure(folder: str, prompt: int, images: int, batch: int) -> dict[str, int]:
    """Predicted and measured bytes of one job."""
    import dgemma  # noqa: F401: here, so that the comparing process stays small

    import mlx.core as mx
    import numpy as np

    from dgemma import backend, fit, weights
    from dgemma.config import GenerationConfig
    from dgemma.denoise import Block, denoise
    from dgemma.step import Options
    from dgemma.vision import preprocess

    opened = weights.Checkpoint.open(folder)
    config, random = opened.config, np.random.RandomState(0)
    pictures = [preprocess(random.randint(0, 255, (640, 960, 3)).astype(np.uint8), budget=280) for _ in range(images)]
    most = pictures[0].soft_tokens if pictures else 280
    job = fit.Job(context=prompt, images=images, image_tokens=most, batch=batch)
    before = resident("VmRSS")
    model = weights.load(opened)
    said = fit.need(opened, job)
    ids = random.randint(400, min(30_000, config.text.vocab_size), (batch, prompt))
    at = 3
    for picture in pictures:
        ids[0, at] = config.boi_token_id
        ids[0, at + 1 : at + 1 + picture.soft_tokens] = config.image_token_id
        ids[0, at + 1 + picture.soft_tokens] = config.eoi_token_id
        at += picture.soft_tokens + 12
    mx.reset_peak_memory()
    features = model.encode_images(pictures)
    mx.eval(features)
    options = replace(Options.of(GenerationConfig()), max_denoising_steps=2, max_redraws=0)
    for event in denoise(model, ids, features, options=options, seeds=list(range(batch))):
        if isinstance(event, Block):
            break
    peak = mx.get_peak_memory() if backend.is_gpu() else resident("VmHWM") - before
    return {"predicted": said.peak, "measured": peak, "weights": said.weights}


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="CHECKPOINT")
    parser.add_argument("--jobs", nargs="+", default=JOBS, metavar="PROMPT:IMAGES:BATCH")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    jobs = [tuple(map(int, job.split(":"))) for job in arguments.jobs]
    if arguments.measure:
        print(json.dumps(measure(arguments.folder, *jobs[0])))
        return
    print("| prompt | images | batch | weights, GB | predicted, GB | measured, GB | predicted / measured |\n|---|---|---|---|---|---|---|")
    for prompt, images, batch in jobs:
        command = [sys.executable, __file__, arguments.folder, "--jobs", f"{prompt}:{images}:{batch}", "--measure"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr[-2000:])
        found = json.loads(done.stdout.splitlines()[-1])
        held, said, peak = (found[name] / 1e9 for name in ("weights", "predicted", "measured"))
        print(f"| {prompt:,} | {images} | {batch} | {held:.2f} | {said:.2f} | {peak:.2f} | {said / peak:.3f} |", flush=True)


if __name__ == "__main__":
    main()
