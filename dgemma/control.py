"""`dgemma read`, `dgemma fill` and `dgemma revise`: canvases of which a part is given.

As in dgemma.talk, all that can be checked is checked before the weights are read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from . import render
from .errors import OptionError, PromptError
from .infill import FillJob, ReviseJob
from .messages import Message, conversation
from .pipeline import Filled, Pipeline, Read, Revision, Step, Unloaded
from .reading import ReadJob
from .settings import FILL_SETTINGS, REVISE_SETTINGS, packing_of, split_settings
from .talk import begin, home, job_of, load, prepare, read_stdin, watcher
from .terminal import Progress

Settings = dict[str, Any]
Job = ReadJob | FillJob | ReviseJob
SHOWN = 6  # choices of a slot that are printed


def read(args: argparse.Namespace, settings: Settings) -> int:
    """Say what the model believes about the slots of templates; returns the exit code."""
    choices = read_choices(args.choice)
    more = {name: value for name, value in vars(args).items() if name in ("width", "end", "steps", "draws", "temperature") and value is not None}

    def job(unloaded: Unloaded, messages: Sequence[Message], images: Sequence[str]) -> ReadJob:
        own = {name: value for name, value in settings.items() if name in ("seed", "image_budget", "chunk")}
        options = replace(unloaded.options, packing=packing_of(dict(settings)))
        return ReadJob.of(
            unloaded.processor, options, messages, images, template=args.template, choices=choices, **own, **more
        )

    found = perform(args, job, lambda job, pipe, _: job.run(pipe.model))
    if args.json:
        sys.stdout.write(render.json_line({"reads": [read_json(one) for one in found], "model": args.model or "demo"}))
    else:
        sys.stdout.write(render.printable("".join(read_text(one) for one in found)))
    return 0


def fill(args: argparse.Namespace, settings: Settings) -> int:
    """Fill the holes of a template; returns the exit code."""
    template = read_stdin() if args.template == "-" else args.template

    def job(unloaded: Unloaded, messages: Sequence[Message], images: Sequence[str]) -> FillJob:
        given = settings | {"end": args.end} | ({} if args.width is None else {"width": args.width})
        own, options = split_settings(unloaded.options, given, FILL_SETTINGS)
        return FillJob.of(unloaded.processor, options, template, messages, images, **own)

    return show(args, perform(args, job, played(args, settings)))


def revise(args: argparse.Namespace, settings: Settings) -> int:
    """Write a draft again; returns the exit code."""
    draft = read_stdin() if args.draft == "-" else args.draft

    def job(unloaded: Unloaded, messages: Sequence[Message], images: Sequence[str]) -> ReviseJob:
        own, options = split_settings(unloaded.options, settings | {"strength": args.strength}, REVISE_SETTINGS)
        return ReviseJob.of(unloaded.processor, options, draft, messages, images, **own)

    return show(args, perform(args, job, played(args, settings)))


def perform(args: argparse.Namespace, job_of_call: Callable[..., Job], run: Callable[[Any, Pipeline, Progress], Any]) -> Any:
    """Check a job, load the checkpoint, run it."""
    messages, images = asked(args), [home(path) for path in args.image]
    with Progress(wanted=not args.quiet) as progress:
        unloaded = prepare(args, progress)
        job = job_of_call(unloaded, messages, images)
        pipe = load(unloaded, args, progress, job_of(job.asked.prompt, unloaded.opened.config.canvas_length, args.chunk))
        progress.now("reading the prompt")
        return run(job, pipe, progress)


def played(args: argparse.Namespace, settings: Settings) -> Callable[..., Filled | Revision]:
    """What runs a fill or a revision: its steps are drawn (`--watch`) or counted, and its end is returned."""

    def play(job: FillJob | ReviseJob, pipe: Pipeline, progress: Progress) -> Filled | Revision:
        watch = watcher(pipe, settings) if args.watch else None
        try:
            for event in job.run(pipe.model):
                if not isinstance(event, Step):
                    made = event
                elif watch is None:
                    progress.now("denoising", f", step {event.step}")
                else:
                    progress.hide()
                    watch.step(event)
        finally:
            progress.hide()
            if watch is not None:
                watch.close()
        return made

    return play


def asked(args: argparse.Namespace) -> list[Message]:
    """What stands before the canvas: a system turn, and the prompt or the pictures alone."""
    if args.prompt is None:
        if not args.image:
            raise PromptError("neither --prompt nor --image is given; the canvas has to stand after something")
        return [*begin(args.system), {"role": "user", "content": [{"type": "image"} for _ in args.image]}]
    return begin(args.system) + conversation(args.prompt, args.image)


def read_choices(given: Sequence[str]) -> dict[str, list[str]]:
    """`--choice NAME=WORD,WORD`; one that is given again adds words."""
    choices: dict[str, list[str]] = {}
    for one in given:
        name, equals, words = one.partition("=")
        if not equals:
            raise OptionError(f"--choice {one!r} names no slot; --choice colour=red,green,blue does")
        choices.setdefault(name.strip(), []).extend(word.strip() for word in words.split(",") if word.strip())
    return choices


# -- output -----------------------------------------------------------------------------------------------------------


def show(args: argparse.Namespace, made: Filled | Revision) -> int:
    """Print a result; returns the exit code."""
    if args.json:
        sys.stdout.write(render.json_line(fields(made) | {"model": args.model or "demo"}))
    else:
        sys.stdout.write(render.printable(made.text + "\n"))
    return 0


def fields(made: Filled | Revision) -> dict[str, Any]:
    """A result as the object that `--json` prints."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(made).items()}


def read_json(read: Read) -> dict[str, Any]:
    """A read as the object that `--json` prints; the tables of the whole vocabulary are left out."""
    slots = {
        name: {
            "best": slot.best,
            "probabilities": dict(slot.probabilities),
            "logprobs": dict(slot.logprobs),
            "entropy": slot.entropy,
            "mass": slot.mass,
        }
        for name, slot in read.slots.items()
    }
    return {"template": read.template, "text": read.text, "slots": slots}


def read_text(read: Read) -> str:
    """A read for a reader: the most likely text, and a line for each slot."""
    lines = [read.text]
    for name, slot in read.slots.items():
        lines.append(f"  {name}: {_ranked(slot.probabilities)} | entropy {slot.entropy:.3g}, mass {slot.mass:.3g}")
    return "\n".join(lines) + "\n"


def _ranked(probabilities: Mapping[str, float]) -> str:
    best = sorted(probabilities.items(), key=lambda item: -item[1])
    told = ", ".join(f"{word} {chance:.3g}" for word, chance in best[:SHOWN])
    return told + (f", {len(best) - SHOWN} more" if len(best) > SHOWN else "")
