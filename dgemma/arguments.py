"""Arguments that commands of `dgemma` share, in groups, and what values they take.

The options are the library's settings under other names: SETTINGS says which. Nothing here needs mlx or transformers.
"""

from __future__ import annotations

import argparse

from .errors import OptionError
from .presets import PRESETS

BUDGETS = (70, 140, 280, 560, 1120)  # dgemma.vision.BUDGETS, which comes with numpy
GEOMETRIES = ("demo", "small", "mid", "full")  # the shipped checkpoint, and dgemma.geometry's, which comes with mlx
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


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one line like any other."""

    def error(self, message: str) -> None:
        """Raise OptionError instead of printing the usage."""
        raise OptionError(f"{message}; see {self.prog} --help")


def settings(args: argparse.Namespace) -> dict:
    """The settings of Pipeline.stream that were given."""
    return {name: value for arg, name in SETTINGS.items() if (value := getattr(args, arg, None)) is not None}


# -- values -----------------------------------------------------------------------------------------------------------


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


# -- groups -----------------------------------------------------------------------------------------------------------


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
