"""The commands of `dgemma` and what each takes: argparse's parsers, without anything that they run.

Nothing here needs mlx or transformers, so that `dgemma --help` answers at once.
"""

from __future__ import annotations

import argparse

from .arguments import (
    BUDGETS, Parser, add_channel_options, add_model_options, add_packing_options, add_question_options, add_sampler_options,
    add_weights_options, add_width_options, real, whole,
)  # fmt: skip

PROG = "dgemma"


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


def command(commands, name: str, summary: str, *lines: str) -> Parser:
    """A subcommand with its help; what it parses has its name as `command`."""
    made = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=examples(*lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.set_defaults(command=name)
    return made


def add_generate(commands) -> None:
    """The options of `generate`."""
    made = command(
        commands,
        "generate",
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
        "talk in several turns; /help lists its commands",
        "dgemma chat",
        'echo "Count from 3 to 14." | dgemma chat',
        'dgemma chat --system "Answer briefly." --seed 7',
    )
    add_model_options(made)
    add_sampler_options(made)
    add_channel_options(made)
    made.add_argument("--resume", metavar="FILE", help="go on with a conversation that /save has kept")
    made.add_argument("--watch", action="store_true", help="draw the canvas on stderr as it settles")
    made.add_argument("--stats", action="store_true", help="say on stderr what each answer took")
    made.add_argument("--quiet", action="store_true", help="no progress on a terminal")


def add_watch_option(made: argparse.ArgumentParser) -> None:
    """--watch of a command that writes one canvas."""
    made.add_argument("--watch", action="store_true", help="draw the canvas on stderr as it settles; of several, the first")


def add_read(commands) -> None:
    """The options of `read`."""
    made = command(
        commands,
        "read",
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
        "fill the holes of a text",
        'dgemma fill --image two_shapes.png --prompt "What is in this image?" "I see a [[1-3]] square left of an [[1]] circle."',
        'dgemma fill --prompt "Count from 3 to 9." --json "3, 4, [[1]], 6, [[1]], 8, 9."',
    )
    made.add_argument("template", metavar="TEMPLATE", help='a text with holes of so many tokens, [[2]] or [[1-3]]; "-" reads stdin')
    add_question_options(made)
    add_width_options(made)
    add_model_options(made)
    add_sampler_options(made, answers=False)
    add_watch_option(made)


def add_revise(commands) -> None:
    """The options of `revise`."""
    made = command(
        commands,
        "revise",
        "write a draft again: a share of it becomes noise, and is denoised",
        'dgemma revise --image two_shapes.png --prompt "What is in this image?" "I see a red square left of a blue circle."',
        'echo "3, 4, 7, 6." | dgemma revise --prompt "Count from 3 to 6." --strength 0.2 --json -',
    )
    made.add_argument("draft", metavar="DRAFT", help='the text to revise; "-" reads stdin')
    made.add_argument("--strength", metavar="X", type=real, default=0.4, help="the share that becomes noise, up to 1; default 0.4")
    add_question_options(made)
    add_model_options(made)
    add_sampler_options(made, answers=False)
    add_watch_option(made)


def add_info(commands) -> None:
    """The options of `info`."""
    made = command(
        commands,
        "info",
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


def add_doctor(commands) -> None:
    """The options of `doctor`."""
    made = command(
        commands,
        "doctor",
        "check this machine: device, BLAS, compiler, versions, measured speed",
        "dgemma doctor",
        "dgemma doctor --json",
    )
    made.add_argument("--json", action="store_true", help="print one JSON object")
