"""`dgemma bench`: how fast this library is here, beside its peers, in one run on the same weights and inputs.

Weights are random ones of a geometry (dgemma.geometry) in a temporary folder, the demo checkpoint's, or those of a folder.
Every runtime reads them in a process of its own (dgemma.turns) and does the same jobs (dgemma.peers): an answer of one
block of a fixed number of steps, a bare canvas pass, a picture. Each prefix is measured with the first batch size, each
other batch size at the prefix nearest BATCHED.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from . import backend, fit, peers, render, results
from .config import ModelConfig
from .errors import OptionError
from .files import check_output, write_whole
from .plan import dtype_name
from .subject import Subject
from .terminal import Progress
from .turns import Contender, Job, compete
from .weights import Checkpoint

PREFIXES, BATCHES, BUDGETS = (256, 1024, 8192, 32_768), (1, 4, 8), (70, 280, 1120)  # where no others are asked for
BATCHED = 1024
OURS = "dgemma"
BESIDE = 1.5  # a peer may take so many times the memory that we do


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure, how often, and against whom."""

    subject: Subject = Subject()
    prefixes: tuple[int, ...] | None = None  # None: those of PREFIXES that fit
    batches: tuple[int, ...] | None = None
    budgets: tuple[int, ...] | None = None
    steps: int = 8
    turns: int = 3
    seconds: float = 1.0
    peers: tuple[tuple[str, str], ...] = ()  # (name, Python)

    def __post_init__(self) -> None:
        for name, least in (("steps", 3), ("turns", 1)):
            if getattr(self, name) < least:
                raise OptionError(f"{name} is {getattr(self, name)}; at least {least} is needed")
        for name in ("prefixes", "batches"):
            for value in getattr(self, name) or ():
                if value < 1:
                    raise OptionError(f"one of the {name} is {value}; at least 1 is needed")
        if not 0 < self.seconds < float("inf"):
            raise OptionError(f"seconds is {self.seconds}; a number above 0 is needed")
        if len({name for name, _ in self.peers}) < len(self.peers):
            raise OptionError("a peer is named twice; once is enough")
        if self.subject.bits is not None:
            _refuse_packed(self.peers)

    @classmethod
    def of(cls, args: argparse.Namespace) -> Settings:
        """From the command line's arguments."""
        several = {"prefixes": args.prefix, "batches": args.batch, "budgets": args.image_budget}
        return cls(
            subject=Subject.of(args), steps=args.steps, turns=args.turns, seconds=args.seconds,
            peers=tuple(peer(text) for text in args.peer),
            **{name: None if given is None else tuple(dict.fromkeys(given)) for name, given in several.items()},
        )  # fmt: skip


def peer(text: str) -> tuple[str, str]:
    """NAME or NAME=PYTHON; OptionError unless that Python has it."""
    name, _, python = text.partition("=")
    python = python or sys.executable
    if name not in peers.PEERS:
        raise OptionError(f"unknown peer {name!r}; allowed: {', '.join(peers.PEERS)}, each with =PYTHON behind it or not")
    if name.endswith("+blas") and not backend.blas().path:
        raise OptionError(f"--peer {name} is for mlx's CPU backend with a BLAS that dgemma loads; here it loads none")
    try:
        asked = subprocess.run([*peers.command(python, name), "--missing"], capture_output=True, text=True, timeout=60)
        lacks = json.loads(asked.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        raise OptionError(f"--peer {name}: {python} does not run as a Python; give --peer {name}=PYTHON") from None
    if lacks:
        raise OptionError(f"--peer {name}: {python} has no {' and no '.join(lacks)}; give --peer {name}=PYTHON that has")
    return name, python


def _refuse_packed(peers: Sequence[tuple[str, str]]) -> None:
    if any(name == "transformers" for name, _ in peers):
        raise OptionError("transformers reads no weights packed by mlx; leave out --peer transformers, or the packing (--bits)")


# -- the jobs ---------------------------------------------------------------------------------------------------------


def plan(opened: Checkpoint, settings: Settings) -> tuple[list[Job], list[str]]:
    """What to measure, and what of the usual sizes is left out and why. OptionError for a size that was asked for."""
    left_out: list[str] = []

    def fitting(name: str, asked: Sequence[int] | None, usual: Sequence[int], reason) -> list[int]:
        found = []
        for value in asked or usual:
            if why := reason(value):
                if asked:
                    raise OptionError(f"{name} {value:,} {why}")
                left_out.append(f"{name} {value:,} {why}")
            else:
                found.append(value)
        return found

    first, dtype = (settings.batches or BATCHES)[0], settings.subject.dtype or backend.activation_dtype(mx.bfloat16)
    prefixes = fitting("prefix", settings.prefixes, PREFIXES, lambda n: too_long(opened, n) or too_much(opened, n, first, dtype))
    if not prefixes:
        raise OptionError(f"no usual prefix fits; give --prefix ({left_out[0]})")
    at = min(prefixes, key=lambda prefix: abs(prefix - BATCHED))
    batches = fitting("batch", settings.batches, BATCHES, lambda n: too_much(opened, at, n, dtype))
    jobs = []
    for prefix, batch in [(prefix, first) for prefix in prefixes] + [(at, batch) for batch in batches if batch != first]:
        jobs.append(Job(what="answer", sizes={"prefix": prefix, "batch": batch, "steps": settings.steps}))
        jobs.append(Job(what="canvas_pass", sizes={"prefix": prefix, "batch": batch}))
    if opened.config.vision is not None or settings.budgets:
        for budget in fitting("image budget", settings.budgets, BUDGETS, lambda n: too_large(opened.config, n)):
            columns, rows = grid(budget)
            jobs.append(Job(what="image", sizes={"columns": columns, "rows": rows}))
    return jobs, left_out


def grid(budget: int) -> tuple[int, int]:
    """Patches a side of a picture in the shape 3 : 2 that has at most `budget` soft tokens, 3 x 3 patches each."""
    return 3 * math.isqrt(budget * 3 // 2), 3 * math.isqrt(budget * 2 // 3)


def too_long(opened: Checkpoint, prefix: int) -> str:
    """Why a checkpoint reads no such prompt; nothing where it does."""
    most = opened.config.text.max_position_embeddings - opened.config.canvas_length
    return f"is more than the {most:,} tokens that this checkpoint reads before a canvas" if prefix > most else ""


def too_much(opened: Checkpoint, prefix: int, batch: int, dtype: mx.Dtype) -> str:
    """Why the memory does not hold an answer to such prompts; nothing where it does."""
    free = backend.free_memory()
    needed = fit.need(opened, fit.Job(context=prefix, batch=batch), dtype).peak
    return f"needs {render.size(needed)}; {render.size(free)} are free" if free and needed > fit.SHARE * free else ""


def too_large(config: ModelConfig, budget: int) -> str:
    """Why a checkpoint reads no such picture; nothing where it does."""
    if config.vision is None:
        return "is for a checkpoint with a vision tower; this one has none"
    most = config.vision.position_embedding_size
    return f"is {max(grid(budget))} patches wide; this checkpoint has {most} positions a side" if max(grid(budget)) > most else ""


# -- the run ----------------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, write the JSON; returns the exit code, 1 where dgemma itself failed at something."""
    if args.json:
        check_output(args.json)
    with Progress() as progress:
        found = measure(Settings.of(args), progress)
    sys.stdout.write(results.text(found, OURS))
    if args.json:
        write_whole(args.json, json.dumps(found, indent=1) + "\n")
    return 1 if found["runtimes"][OURS]["failures"] else 0


def measure(settings: Settings, progress: Progress) -> dict[str, Any]:
    """Everything, ready for JSON."""
    where = machine()  # before it is busy with this
    with settings.subject.written(progress) as opened:
        jobs, left_out = plan(opened, settings)
        contenders = _contenders(settings, opened)
        dtype = dtype_name(settings.subject.dtype or backend.activation_dtype(opened.dtype))
        config = opened.config
        together = _fit_together(opened, jobs, len(contenders))
        records = compete(
            contenders,
            {"folder": str(opened.folder), "dtype": dtype, "reserved": reserved(config)},
            jobs,
            turns=settings.turns,
            seconds=settings.seconds,
            together=together,
            note=lambda doing: progress.now("measuring", f" {doing}"),
        )
    return {
        "machine": where,
        "model": {
            "name": settings.subject.name, "dtype": dtype, "bits": settings.subject.bits, "seed": settings.subject.seed,
            "canvas_length": config.canvas_length, "parameters": sum(math.prod(shape) for shape in opened.shapes.values()),
        },
        "settings": {"steps": settings.steps, "turns": settings.turns, "seconds": settings.seconds, "together": together},
        "runtimes": {
            name: record.about | {"failures": {str(jobs[number]): why for number, why in record.failures.items()}}
            for name, record in records.items()
        },
        "cells": results.cells(jobs, records, config.canvas_length, OURS),
        "left_out": left_out,
    }  # fmt: skip


def reserved(config: ModelConfig) -> list[int]:
    """Tokens that a prompt of random ones must not hold: an image's places."""
    return [config.boi_token_id, config.image_token_id, config.eoi_token_id]


def _contenders(settings: Settings, opened: Checkpoint) -> list[Contender]:
    if opened.formats:
        _refuse_packed(settings.peers)
    found = [Contender(name=OURS, command=[sys.executable, "-m", "dgemma.runtime"])]
    for name, python in settings.peers:
        blas = {peers.BLAS: backend.blas().path if name.endswith("+blas") else ""}
        found.append(Contender(name=name, command=peers.command(python, name), environment=blas))
    return found


def _fit_together(opened: Checkpoint, jobs: Sequence[Job], runtimes: int) -> bool:
    """Whether the memory holds every runtime at its largest job."""
    free = backend.free_memory()
    sizes = [job.sizes for job in jobs if job.what == "answer"] or [{"prefix": 1, "batch": 1}]
    most = max(fit.need(opened, fit.Job(context=one["prefix"], batch=one["batch"])).peak for one in sizes)
    return free is None or most * (1 + BESIDE * (runtimes - 1)) < fit.SHARE * free


def machine() -> dict[str, Any]:
    """Where this runs, and how many processes wanted its cores in the last minute."""
    name = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            name = next((line.partition(": ")[2].strip() for line in file if line.startswith("model name")), name)
    load = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    return {"cpu": name, "cores": backend.cores(), "system": f"{platform.system()} {platform.machine()}", "load": load}
