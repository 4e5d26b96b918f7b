"""The `dgemma` command: parse, call the pipeline, print its events.

Answers go to stdout, everything else to stderr. Exit codes: 0 done, 2 a mistake in the input (UserError), 1 a failure,
130 interrupted, 141 nobody reads on. Modules that need mlx or transformers are imported when a command runs, so that
`dgemma --help` answers at once.
"""

from __future__ import annotations

import argparse
import errno
import os
import re
import sys
import traceback
import warnings
from collections.abc import Sequence

from . import render
from .arguments import settings
from .errors import DgemmaError, OptionError, PromptError, UserError
from .parsers import PROG, parser

FLAGS = {  # the library's names in its messages -> what was typed here
    "max_new_tokens": "--max-tokens",
    "max_denoising_steps": "--steps",
    "max_redraws": "--redraws",
    "t_min": "--t-min",
    "t_max": "--t-max",
    "shard_size": "--shard-size",
    "kv_bits": "--kv-bits",
    "kv_group_size": "--kv-group-size",
    "kv_start": "--kv-start",
    "thinking_budget": "--thinking-budget",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Whatever goes wrong is one line on stderr."""
    quieten()
    try:
        code = run(argv)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as stop:
        return complain(f"interrupted {stop}".rstrip(), 130)
    except BrokenPipeError:
        discard_stdout()
        return 141
    except Exception as error:  # noqa: BLE001: a traceback is a defect
        if os.environ.get("DGEMMA_DEBUG"):
            traceback.print_exc()
        return report(error)


def run(argv: Sequence[str] | None) -> int:
    """Parse and run one command; returns its exit code."""
    try:
        args = parser().parse_args(argv)
    except SystemExit as end:  # --help and --version have printed what was asked for
        return end.code or 0
    return COMMANDS[args.command](args)


def report(error: Exception) -> int:
    """Say on stderr what went wrong; returns the exit code."""
    if isinstance(error, UserError):
        return complain(in_flags(error), 2)
    if isinstance(error, DgemmaError):
        return complain(error, 1)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
        discard_stdout()
        return complain(f"{error.filename or 'the output'} cannot be written ({error.strerror})", 2)
    if isinstance(error, MemoryError):
        return complain("out of memory; a smaller model, a shorter prompt or fewer images need less", 1)
    return complain(f"failed ({type(error).__name__}: {error}); DGEMMA_DEBUG=1 shows where", 1)


def complain(message: object, code: int) -> int:
    """One line on stderr; returns `code`."""
    print(f"{PROG}: {render.one_line(message)}", file=sys.stderr)
    return code


def in_flags(error: UserError) -> str:
    """A message with this command's spelling of the options."""
    if not isinstance(error, (OptionError, PromptError)):
        return str(error)
    return re.sub(r"\b(" + "|".join(FLAGS) + r")\b", lambda name: FLAGS[name[1]], str(error))


def discard_stdout() -> None:
    """Nothing can be written any more: keep Python from trying again, and failing aloud, when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def quieten() -> None:
    """Libraries have no say on stderr; DGEMMA_DEBUG=1 gives it back."""
    if os.environ.get("DGEMMA_DEBUG"):
        return
    warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


# -- commands ---------------------------------------------------------------------------------------------------------


def generate(args: argparse.Namespace) -> int:
    """`dgemma generate`."""
    from . import talk  # here, as the module's docstring says

    return talk.generate(args, settings(args))


def chat(args: argparse.Namespace) -> int:
    """`dgemma chat`."""
    from . import talk

    return talk.chat(args, settings(args))


def read(args: argparse.Namespace) -> int:
    """`dgemma read`."""
    from . import control  # here, as the module's docstring says

    return control.read(args, settings(args))


def fill(args: argparse.Namespace) -> int:
    """`dgemma fill`."""
    from . import control

    return control.fill(args, settings(args))


def revise(args: argparse.Namespace) -> int:
    """`dgemma revise`."""
    from . import control

    return control.revise(args, settings(args))


def info(args: argparse.Namespace) -> int:
    """`dgemma info`."""
    from . import info as module  # here, as the module's docstring says

    found = module.read(args.model, args.revision)
    sys.stdout.write(render.json_line(found) if args.json else module.text(found))
    return 0


def fit(args: argparse.Namespace) -> int:
    """`dgemma fit`; the exit code is 2 when the job does not fit."""
    from . import fit as module  # here, as the module's docstring says

    names = ("context", "images", "batch", "chunk", "kv_bits", "kv_group_size")
    job = {"image_tokens": args.image_budget} | {name: getattr(args, name) for name in names}
    found = module.read(args.model, args.revision, **job)
    sys.stdout.write(render.json_line(found) if args.json else module.text(found))
    return 2 if found["fits"] is False else 0


def convert(args: argparse.Namespace) -> int:
    """`dgemma convert`."""
    from . import convert as module  # here, as the module's docstring says

    return module.run(args)


def bench(args: argparse.Namespace) -> int:
    """`dgemma bench`."""
    from . import bench as module  # here, as the module's docstring says

    return module.run(args)


def profile(args: argparse.Namespace) -> int:
    """`dgemma profile`."""
    from . import breakdown  # here, as the module's docstring says

    found = breakdown.read(args)
    sys.stdout.write(render.json_line(found) if args.json else breakdown.text(found))
    return 0


def doctor(args: argparse.Namespace) -> int:
    """`dgemma doctor`."""
    from . import doctor as module  # here, as the module's docstring says

    found = module.examine()
    sys.stdout.write(render.json_line(found) if args.json else module.text(found))
    return 0


COMMANDS = {one.__name__: one for one in (generate, chat, read, fill, revise, info, fit, convert, bench, profile, doctor)}


if __name__ == "__main__":
    sys.exit(main())
