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
from collections.abc import Callable, Sequence

from . import render
from .errors import DgemmaError, OptionError, OutputError, PromptError, UserError
from .presets import PRESETS

PROG = "dgemma"
BUDGETS = (70, 140, 280, 560, 1120)  # dgemma.vision.BUDGETS, which comes with numpy
GEOMETRIES = ("demo", "small", "mid", "full")  # the shipped checkpoint, and dgemma.geometry's, which comes with mlx
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
SETTINGS = {  # arguments -> settings of Pipeline.stream
    "max_tokens": "max_new_tokens",
    "think": "enable_thinking",
    **{
        name: name
        for name in (
            "seed", "steps", "t_min", "t_max", "entropy_bound", "confidence_threshold", "stability", "confidence",
            "redraws", "image_budget", "chunk", "preset", "kv_bits", "kv_group_size", "kv_start",
            "stop", "thinking_budget",
        )
    },
}  # fmt: skip


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
    return args.run(args)


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


# -- arguments --------------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one line like any other."""

    def error(self, message: str) -> None:
        """Raise OptionError instead of printing the usage."""
        raise OptionError(f"{message}; see {self.prog} --help")


def parser() -> Parser:
    """All commands and their options."""
    top = Parser(
        prog=PROG,
        description="DiffusionGemma on MLX: text and images in, text out, written a block at a time by denoising.",
        epilog=examples(
            'dgemma generate --image shapes.png "What is in this image?"',
            "dgemma chat",
            "dgemma info",
            "dgemma fit --context 2000",
            "dgemma convert demo demo-8bit --bits 8",
            "dgemma doctor",
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action=Version, help="print the version and exit")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_generate(commands)
    add_chat(commands)
    add_read(commands)
    add_fill(commands)
    add_revise(commands)
    add_info(commands)
    add_fit(commands)
    add_convert(commands)
    add_bench(commands)
    add_profile(commands)
    add_doctor(commands)
    return top


class Version(argparse.Action):
    """--version, looked up when asked for."""

    def __init__(self, **settings):
        super().__init__(nargs=0, **settings)

    def __call__(self, parser, *_) -> None:
        from . import __version__  # here, so that this module can be read before the package is whole

        print(f"{PROG} {__version__}")
        parser.exit()


def examples(*lines: str) -> str:
    """The end of a help text; tests/test_cli.py runs each line."""
    return "examples:\n" + "\n".join(f"  {line}" for line in lines)


def command(commands, name: str, run: Callable, summary: str, *lines: str) -> Parser:
    """A subcommand with its help."""
    made = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=examples(*lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.set_defaults(run=run)
    return made


def add_generate(commands) -> None:
    """The options of `generate`."""
    made = command(
        commands,
        "generate",
        generate,
        "answer one prompt",
        'dgemma generate "Count from 3 to 14."',
        'dgemma generate --image shapes.png "What is in this image?"',
        'dgemma generate --image shapes.png --watch "List every shape from left to right."',
        'dgemma generate --image shapes.png --image digits.png "Which picture has more shapes?"',
        'echo "Count from 3 to 14." | dgemma generate --json --seed 7 -',
        'dgemma generate --image digits.png --steps 16 --output answer.txt "Read the number."',
        'dgemma generate --stop " 9" "Count from 3 to 14."',
    )
    made.add_argument("prompt", metavar="PROMPT", help='what to ask; "-" reads it from stdin')
    made.add_argument("--image", metavar="FILE", action="append", default=[], help="a picture; may be given many times")
    made.add_argument("--tools", metavar="FILE", help="declare the tools of a JSON file; calls are printed as lines of JSON")
    add_model_options(made)
    add_sampler_options(made)
    add_channel_options(made)
    made.add_argument("--watch", action="store_true", help="draw the canvas on stderr as it settles")
    made.add_argument("--json", action="store_true", help="print one JSON object: the answer and what it took")
    made.add_argument("--output", metavar="FILE", help="write the answer to a file, whole or not at all, not to stdout")
    made.add_argument("--stats", action="store_true", help="say on stderr what it took (a terminal is always told)")
    made.add_argument("--quiet", action="store_true", help="no progress and no statistics on a terminal")


def add_chat(commands) -> None:
    """The options of `chat`."""
    made = command(
        commands,
        "chat",
        chat,
        "talk in several turns; /help lists its commands",
        "dgemma chat",
        'echo "Count from 3 to 14." | dgemma chat',
        'dgemma chat --system "Answer briefly." --seed 7',
    )
    add_model_options(made)
    add_sampler_options(made)
    add_channel_options(made)
    made.add_argument("--watch", action="store_true", help="draw the canvas on stderr as it settles")
    made.add_argument("--stats", action="store_true", help="say on stderr what each answer took")
    made.add_argument("--quiet", action="store_true", help="no progress on a terminal")


def add_read(commands) -> None:
    """The options of `read`."""
    made = command(
        commands,
        "read",
        read,
        "say how likely each choice for the slots of a text is, without writing anything",
        'dgemma read --image two_shapes.png --prompt "What color is the circle?" --choice c=red,orange,blue "The circle is [[c]]."',
        'dgemma read --image digits_92.png --prompt "Read the number." --choice n=92,97,29,9 --json "The number is [[n]]."',
    )
    made.add_argument("template", metavar="TEMPLATE", nargs="+", help='a text with [[named]] slots; several are read over one prefill')
    made.add_argument(
        "--choice", metavar="NAME=WORD,...", action="append", default=[], help="what a slot may hold; may be given many times"
    )
    add_question_options(made)
    made.add_argument("--steps", metavar="N", type=whole, help="canvas passes, the last of which is read; default 1")
    made.add_argument("--temperature", metavar="T", type=real, help="divides the logits that are read; default 1")
    made.add_argument("--seed", metavar="N", type=whole, default=0, help="of the noise in the slots; default 0")
    made.add_argument("--draws", metavar="N", type=whole, help="draws of that noise, of which the mean is told; default 1")
    add_width_options(made)
    add_model_options(made)


def add_fill(commands) -> None:
    """The options of `fill`."""
    made = command(
        commands,
        "fill",
        fill,
        "fill the holes of a text",
        'dgemma fill --image two_shapes.png --prompt "What is in this image?" "I see a [[1-3]] square left of an [[1]] circle."',
        'dgemma fill --prompt "Count from 3 to 9." --json "3, 4, [[1]], 6, [[1]], 8, 9."',
    )
    made.add_argument("template", metavar="TEMPLATE", help='a text with holes of so many tokens, [[2]] or [[1-3]]; "-" reads stdin')
    add_question_options(made)
    add_width_options(made)
    add_model_options(made)
    add_sampler_options(made, answers=False)


def add_revise(commands) -> None:
    """The options of `revise`."""
    made = command(
        commands,
        "revise",
        revise,
        "write a draft again: a share of it becomes noise, and is denoised",
        'dgemma revise --image two_shapes.png --prompt "What is in this image?" "I see a red square left of a blue circle."',
        'echo "3, 4, 7, 6." | dgemma revise --prompt "Count from 3 to 6." --strength 0.2 --json -',
    )
    made.add_argument("draft", metavar="DRAFT", help='the text to revise; "-" reads stdin')
    made.add_argument("--strength", metavar="X", type=real, default=0.4, help="the share that becomes noise, up to 1; default 0.4")
    add_question_options(made)
    add_model_options(made)
    add_sampler_options(made, answers=False)


def add_question_options(made: Parser) -> None:
    """What the canvas stands after, and how the result is told."""
    made.add_argument("--prompt", metavar="TEXT", help="what the text answers; default nothing but the pictures")
    made.add_argument("--image", metavar="FILE", action="append", default=[], help="a picture; may be given many times")
    made.add_argument("--json", action="store_true", help="print one JSON object")
    made.add_argument("--quiet", action="store_true", help="no progress on a terminal")


def add_width_options(made: Parser) -> None:
    """How much canvas there is around a template."""
    made.add_argument("--width", metavar="N", type=whole, help="tokens of the canvas; default as few as the text takes")
    made.add_argument("--no-end", dest="end", action="store_false", help="the text may go on: pin no end of the turn behind it")


def add_info(commands) -> None:
    """The options of `info`."""
    made = command(
        commands,
        "info",
        info,
        "show the geometry, parameters and bytes of a checkpoint, without loading it",
        "dgemma info",
        "dgemma info --json",
    )
    made.add_argument("model", metavar="MODEL", nargs="?", help="as --model of generate; default demo")
    made.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a hub repository")
    made.add_argument("--json", action="store_true", help="print one JSON object")


def add_fit(commands) -> None:
    """The options of `fit`."""
    made = command(
        commands,
        "fit",
        fit,
        "say how much memory a checkpoint needs, and which prompts fit, without loading it",
        "dgemma fit",
        "dgemma fit demo --context 2000 --images 4 --batch 2",
        "dgemma fit demo --context 4000 --json",
    )
    made.add_argument("model", metavar="MODEL", nargs="?", help="as --model of generate; default demo")
    made.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a hub repository")
    made.add_argument("--context", metavar="N", type=whole, default=1024, help="tokens of the prompt, images included; default 1024")
    made.add_argument("--images", metavar="N", type=whole, default=0, help="pictures among them; default none")
    made.add_argument(
        "--image-budget", metavar="N", type=whole, choices=BUDGETS, help="soft tokens of each: %(choices)s; default the checkpoint's"
    )
    made.add_argument("--batch", metavar="N", type=whole, default=1, help="prompts at a time; default 1")
    made.add_argument("--chunk", metavar="N", type=whole, help="as of generate")
    add_packing_options(made, start=False)
    made.add_argument("--json", action="store_true", help="print one JSON object")


def add_convert(commands) -> None:
    """The options of `convert`."""
    made = command(
        commands,
        "convert",
        convert,
        "quantise a checkpoint, or bring it into another format or dtype",
        "dgemma convert demo demo-4bit --bits 4 --group-size 32",
        "dgemma convert demo demo-mxfp4 --mode mxfp4 --recipe uniform",
        "dgemma convert demo demo-float32 --no-quantize --dtype float32",
    )
    made.add_argument("model", metavar="MODEL", help="a folder, a hub id such as google/name, or demo")
    made.add_argument("out", metavar="OUT", help="the folder to write: whole or not at all")
    made.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a hub repository")
    group = made.add_argument_group("what is packed, and how")
    group.add_argument("--mode", metavar="MODE", help="affine (default), mxfp4, mxfp8 or nvfp4")
    group.add_argument("--bits", metavar="N", type=whole, help="bits of a number: 2, 3, 4 (default), 5, 6 or 8; affine only")
    group.add_argument("--group-size", metavar="N", type=whole, help="numbers that share a scale: 32, 64 (default) or 128")
    group.add_argument(
        "--recipe",
        metavar="NAME",
        help="which parts stay at 8 bits: attention, embeddings and router (default); "
        "the dense MLP as well (mlx-vlm); none (uniform)",
    )
    group.add_argument("--quantize-vision", action="store_true", help="pack the vision tower and its projections too")
    group.add_argument("--no-quantize", action="store_true", help="pack nothing, and unpack what is packed")
    group.add_argument("--dtype", metavar="DTYPE", help="of the rest: bfloat16, float16 or float32; default as stored")
    group = made.add_argument_group("files")
    group.add_argument("--shard-size", metavar="GB", type=real, default=5.0, help="the largest file, in GB; default 5")
    group.add_argument("--overwrite", action="store_true", help="replace the checkpoint in OUT, once the new one is whole")


def add_bench(commands) -> None:
    """The options of `bench`."""
    made = command(
        commands,
        "bench",
        bench,
        "measure the speed of each part of an answer, beside other runtimes on the same weights",
        "dgemma bench --prefix 100 --batch 1 --image-budget 70 --steps 3 --turns 1 --seconds 0.01",
    )
    add_weights_options(made)
    group = made.add_argument_group("what is measured")
    several = {"metavar": "N", "type": whole, "nargs": "+"}
    group.add_argument("--prefix", **several, help="prompt lengths; default those of 256 1024 8192 32768 that fit")
    group.add_argument(
        "--batch", **several, help="rows: the first at each prefix, the others at that nearest 1024; default 1 4 8"
    )
    group.add_argument(
        "--image-budget", **several, choices=BUDGETS, help="soft tokens of a picture; default those of 70 280 1120 that fit"
    )
    group.add_argument("--steps", metavar="N", type=whole, default=8, help="denoising steps of a block; default 8")
    group.add_argument("--turns", metavar="N", type=whole, default=3, help="how often each runtime has its turn; default 3")
    group.add_argument("--seconds", metavar="S", type=real, default=1.0, help="for each measurement of a turn; default 1")
    group.add_argument(
        "--peer", metavar="NAME[=PYTHON]", action="append", default=[],
        help="also measure transformers, mlx-vlm or mlx-vlm+blas (with the BLAS that dgemma loads), run by that Python; "
        "may be given many times",
    )  # fmt: skip
    made.add_argument("--json", metavar="FILE", help="write every sample there as JSON")


def add_profile(commands) -> None:
    """The options of `profile`."""
    made = command(
        commands,
        "profile",
        profile,
        "break one denoising step, and one picture, down by part: time, bytes and operations",
        "dgemma profile --prefix 100 --image-budget 70 --seconds 0.01",
    )
    add_weights_options(made)
    group = made.add_argument_group("what is measured")
    group.add_argument("--prefix", metavar="N", type=whole, default=1024, help="tokens of the prompt; default 1024")
    group.add_argument("--batch", metavar="N", type=whole, default=1, help="rows; default 1")
    group.add_argument("--image-budget", metavar="N", type=whole, choices=BUDGETS, help="soft tokens of the picture; default 280")
    group.add_argument("--seconds", metavar="S", type=real, default=1.0, help="for each part; default 1")
    made.add_argument("--json", action="store_true", help="print one JSON object")


def add_weights_options(made: Parser) -> None:
    """Which weights a measurement runs on."""
    group = made.add_argument_group("weights")
    which = group.add_mutually_exclusive_group()
    which.add_argument(
        "--geometry", choices=GEOMETRIES, default="demo",
        help="the shipped checkpoint (default), or random weights: small, mid, or full, the released geometry",
    )  # fmt: skip
    which.add_argument("--model", metavar="MODEL", help="or a checkpoint: a folder, or a hub id such as google/name")
    group.add_argument("--bits", metavar="N", type=whole, help="pack the weights, by the default recipe of convert")
    group.add_argument("--dtype", metavar="DTYPE", help="of activations; default bfloat16 on a GPU, float32 on a CPU")
    group.add_argument("--seed", metavar="N", type=whole, default=0, help="of random weights; default 0")


def add_doctor(commands) -> None:
    """The options of `doctor`."""
    made = command(
        commands,
        "doctor",
        doctor,
        "check this machine: device, BLAS, compiler, versions, measured speed",
        "dgemma doctor",
        "dgemma doctor --json",
    )
    made.add_argument("--json", action="store_true", help="print one JSON object")


def add_model_options(made: Parser) -> None:
    """Which model, and how it reads prompts."""
    group = made.add_argument_group("model")
    group.add_argument("--model", metavar="MODEL", help="a folder, a hub id such as google/name, or demo (default)")
    group.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a hub repository")
    group.add_argument("--system", metavar="TEXT", help="a system turn before the first")
    group.add_argument(
        "--image-budget", metavar="N", type=whole, choices=BUDGETS, help="soft tokens an image may take: %(choices)s"
    )
    group.add_argument(
        "--image-attention",
        choices=("encoder-window", "bidirectional"),
        default="encoder-window",
        help="how the tokens of an image see each other: as in transformers (default), or as in Google's JAX code",
    )
    group.add_argument("--chunk", metavar="N", type=whole, help="prompt positions per encoder pass; fewer need less memory")
    add_packing_options(group)
    group.add_argument("--force", action="store_true", help="try even what dgemma fit says the memory cannot hold")


def add_packing_options(made: argparse._ActionsContainer, start: bool = True) -> None:
    """How keys and values are kept."""
    made.add_argument("--kv-bits", metavar="N", type=whole, choices=(4, 8), help="keep keys and values packed in 8 or 4 bits")
    made.add_argument("--kv-group-size", metavar="N", type=whole, choices=(32, 64, 128), help="numbers that share a scale; default 64")
    if start:
        made.add_argument("--kv-start", metavar="N", type=whole, help="... once there are N positions; default from the first on")


def add_sampler_options(made: Parser, answers: bool = True) -> None:
    """How to sample and when to stop; `answers`: of any length, and drawn again when empty."""
    group = made.add_argument_group("sampling (defaults: the checkpoint's)")
    group.add_argument("--seed", metavar="N", type=whole, default=0, help="default 0; one seed, one answer")
    meant = "; ".join(f"{name}: {preset}" for name, preset in PRESETS.items())
    group.add_argument("--preset", choices=tuple(PRESETS), help=f"settings that go together ({meant}); an option beside it wins")
    if answers:
        group.add_argument("--max-tokens", metavar="N", type=whole, help="the longest answer")
        group.add_argument("--redraws", metavar="N", type=whole, help="how often an empty answer is drawn again")
    group.add_argument("--steps", metavar="N", type=whole, help="denoising steps a block may take")
    group.add_argument("--t-max", metavar="T", type=real, help="temperature of the first step")
    group.add_argument("--t-min", metavar="T", type=real, help="temperature that the last step nears")
    accept = group.add_mutually_exclusive_group()
    accept.add_argument("--entropy-bound", metavar="X", type=real, help="accept the surest positions up to X nats in sum")
    accept.add_argument("--confidence-threshold", metavar="X", type=real, help="or: those at least X sure, and the surest below X")
    group.add_argument("--stability", metavar="N", type=whole, help="a block has settled when N steps changed nothing")
    group.add_argument("--confidence", metavar="X", type=real, help="... and its mean entropy is below X nats")


def add_channel_options(made: Parser) -> None:
    """Thoughts, and where the text ends."""
    group = made.add_argument_group("thoughts and stops")
    group.add_argument("--think", action="store_true", default=None, help="ask the model to think; its thoughts go to stderr")
    group.add_argument("--thinking-budget", metavar="N", type=whole, help="tokens after which a thought is closed")
    group.add_argument("--stop", metavar="TEXT", action="append", help="end the text before TEXT; may be given many times")


def whole(text: str) -> int:
    """A whole number from the command line."""
    try:
        return int(text)
    except ValueError:  # also for more than 4,300 digits
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number") from None


def real(text: str) -> float:
    """A number from the command line."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number") from None


def settings(args: argparse.Namespace) -> dict:
    """The settings of Pipeline.stream that were given."""
    return {name: value for arg, name in SETTINGS.items() if (value := getattr(args, arg, None)) is not None}


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


if __name__ == "__main__":
    sys.exit(main())
