"""What a call is asked for, read and checked: prompts, pictures, and settings put over a checkpoint's options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from dgemma.attention import Packing

from . import presets
from .errors import OptionError, PromptError
from .messages import conversation
from .processor import Processor, Prompt
from .sampler import ConfidenceThreshold, EntropyBound
from .step import Options, Pins
from .stopping import StableAndConfident

# Settings that shape the prompt -> keywords of Processor.prompt.
OF_THE_PROMPT = {"image_budget": "budget", "tools": "tools", "enable_thinking": "thinking"}
FILL_SETTINGS = ("seed", "width", "end", "image_budget", "chunk")
REVISE_SETTINGS = ("seed", "strength", "pins", "image_budget", "chunk")


# -- one call ---------------------------------------------------------------------------------------------------------


class Opened(Protocol):
    """A checkpoint with its weights (Pipeline) or before them (Unloaded)."""

    options: Options
    processor: Processor  # asked for last: wrong settings are refused before a tokenizer is read


@dataclass(frozen=True, kw_only=True)
class Request:
    """One call, checked: prompts read, options resolved, everything one entry a row."""

    prompts: tuple[Prompt, ...] = ()  # read when all else has been checked
    options: Options
    seeds: tuple[int, ...]
    chunk: int | None
    canvas: np.ndarray | None
    pins: tuple[Pins, ...] | None
    stops: tuple[str, ...]
    thinking_budget: int | None

    @classmethod
    def read(cls, of: Opened, prompt: Any, images: Any, settings: dict[str, Any]) -> Request:
        """A call, its settings over the checkpoint's options; PromptError, ImageError, OptionError."""
        rest, batch = dict(settings), is_batch(prompt)
        prompts = list(prompt) if batch else [prompt]
        pictures = _per_prompt(images, len(prompts), batch)
        how = {keyword: rest.pop(name) for name, keyword in OF_THE_PROMPT.items() if rest.get(name) is not None}
        _flag("enable_thinking", how.get("thinking", False))
        rest = {name: value for name, value in rest.items() if name not in OF_THE_PROMPT}
        request = cls.of(of.options, len(prompts), batch, rest)
        processor = of.processor
        read = [processor.prompt(conversation(one, own), own, **how) for one, own in zip(prompts, pictures)]
        processor.reader(read[0], request.stops, request.thinking_budget)  # refuses what this tokenizer cannot do
        longest, limit = max(len(one.ids) for one in read), processor.config.text.max_position_embeddings
        room = -(-request.options.max_new_tokens // processor.config.canvas_length) * processor.config.canvas_length
        if longest + room > limit:
            raise PromptError(
                f"the prompt has {longest} tokens and the answer may take {room}; the context is {limit}: "
                "shorten the prompt, or lower max_new_tokens or the image budget"
            )
        return replace(request, prompts=tuple(read))

    @classmethod
    def of(cls, options: Options, rows: int, batch: bool, settings: dict[str, Any]) -> Request:
        """Settings of a call over the checkpoint's `options`; OptionError names the one that is wrong."""
        rest = dict(settings)
        seed, chunk = rest.pop("seed", 0), rest.pop("chunk", None)
        canvas, pins = rest.pop("canvas", None), rest.pop("pins", None)
        stops, budget = _stops(rest.pop("stop", None)), rest.pop("thinking_budget", None)
        if budget is not None:
            whole("thinking_budget", budget, 1)
        if chunk is not None:
            whole("chunk", chunk, 1)
        return cls(
            options=with_settings(options, rest),
            seeds=_seeds(seed, rows),
            chunk=chunk,
            canvas=None if canvas is None else _canvas(canvas),
            pins=None if pins is None else _pins(pins, rows, batch),
            stops=stops,
            thinking_budget=budget,
        )


def is_batch(prompt: Any) -> bool:
    """Whether `prompt` is a list of prompts: its items are strings or conversations, not messages."""
    if isinstance(prompt, str):
        return False
    if not isinstance(prompt, (list, tuple)) or not prompt:
        raise PromptError("the prompt is empty; a string, messages, or a list of either is needed")
    return not isinstance(prompt[0], dict)


def _per_prompt(images: Any, rows: int, batch: bool) -> list[list[Any]]:
    """The image sources of each prompt."""
    if images is None:
        return [[] for _ in range(rows)]
    if not batch:
        return [list(images) if isinstance(images, (list, tuple)) else [images]]
    if not isinstance(images, (list, tuple)) or len(images) != rows:
        raise PromptError(f"a batch of {rows} prompts takes images as {rows} lists, one a prompt (empty for none)")
    return [list(row) if isinstance(row, (list, tuple)) else [] if row is None else [row] for row in images]


# -- settings over options --------------------------------------------------------------------------------------------


def with_settings(options: Options, settings: dict[str, Any]) -> Options:
    """`options` with the settings of one call (Pipeline.__call__ lists them) put over them; None leaves one as it is."""
    given = presets.spell_out(settings)
    bound, threshold = given.pop("entropy_bound", None), given.pop("confidence_threshold", None)
    if bound is not None and threshold is not None:
        raise OptionError("entropy_bound and confidence_threshold name two samplers; give one of them")
    changes: dict[str, Any] = {}
    if bound is not None:
        changes["sampler"] = EntropyBound(_real("entropy_bound", bound))
    if threshold is not None:
        changes["sampler"] = ConfidenceThreshold(_real("confidence_threshold", threshold))
    stability, confidence = given.pop("stability", None), given.pop("confidence", None)
    if stability is not None or confidence is not None:
        rule = options.rule if isinstance(options.rule, StableAndConfident) else StableAndConfident()
        changes["rule"] = StableAndConfident(
            rule.stability if stability is None else whole("stability", stability),
            rule.confidence if confidence is None else _real("confidence", confidence),
        )
    if (packing := packing_of(given)) is not None:
        changes["packing"] = packing
    for setting, field, kind in (
        ("max_new_tokens", "max_new_tokens", whole),
        ("steps", "max_denoising_steps", whole),
        ("redraws", "max_redraws", whole),
        ("t_min", "t_min", _real),
        ("t_max", "t_max", _real),
    ):
        if setting in given:
            changes[field] = kind(setting, given.pop(setting))
    if changes.get("max_redraws", 0) < 0:
        raise OptionError(f"redraws is {changes['max_redraws']}; a whole number of at least 0 is needed (default 2)")
    if given:
        raise OptionError(f"unknown setting {sorted(given)[0]!r}; help(Pipeline.__call__) lists them")
    return replace(options, **changes)


def packing_of(given: dict[str, Any]) -> Packing | None:
    """How caches are packed by the settings kv_bits, kv_group_size and kv_start, which are taken out of `given`."""
    named = {name: given.pop(f"kv_{name}") for name in ("bits", "group_size", "start") if f"kv_{name}" in given}
    if named and "bits" not in named:
        raise OptionError(f"kv_{next(iter(named))} says how to pack keys and values; give kv_bits (8 or 4) as well")
    return Packing(**{name: whole(f"kv_{name}", value) for name, value in named.items()}) if named else None


def split_settings(options: Options, settings: dict[str, Any], own: Sequence[str]) -> tuple[dict[str, Any], Options]:
    """The settings that a fill or a revision takes itself, and the options with the others put over them."""
    for name in ("max_new_tokens", "redraws"):  # of answers that may be longer than a canvas, or empty
        if settings.get(name) is not None:
            raise OptionError(f"unknown setting {name!r}; one canvas is written, once")
    rest = {name: value for name, value in settings.items() if name not in own}
    return {name: value for name, value in settings.items() if name in own}, with_settings(options, rest)


# -- single values ----------------------------------------------------------------------------------------------------


def whole(name: str, value: Any, least: int | None = None) -> int:
    """A whole number, of at least `least` if that is given; OptionError."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise OptionError(f"{name} is {value!r}; a whole number is needed")
    if isinstance(value, int) and value.bit_length() > 1000:  # Python writes no number of more than 4,300 digits
        raise OptionError(f"{name} is a number of {value.bit_length()} bits; a smaller one is needed")
    if least is not None and value < least:
        raise OptionError(f"{name} is {value}; at least {least} is needed")
    return int(value)


def check_seed(seed: Any) -> int:
    """The seed; OptionError when it is none."""
    if not 0 <= whole("seed", seed) < 2**64:
        raise OptionError(f"seed is {seed}; 0 to 2**64 - 1 is allowed")
    return int(seed)


def _real(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        raise OptionError(f"{name} is {value!r}; a number is needed")
    try:
        return float(value)
    except OverflowError:
        raise OptionError(f"{name} is a whole number too large for a float; a number is needed") from None


def _flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise OptionError(f"{name} is {value!r}; True or False is needed")


def _stops(stop: Any) -> tuple[str, ...]:
    """The stop strings of a call."""
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, (list, tuple)) or not all(isinstance(one, str) for one in stops):
        raise OptionError(f"stop is {stop!r}; a string or a list of strings is needed")
    if not all(stops):
        raise OptionError("stop holds an empty string; a stop string has at least one character")
    return tuple(stops)


def _canvas(canvas: Any) -> np.ndarray:
    """The seed canvas `[B, C]`; one row may come without its outer list."""
    try:
        found = np.atleast_2d(np.asarray(canvas))
    except ValueError:
        raise OptionError("the seed canvas has rows of different lengths; each needs as many tokens as a canvas") from None
    if found.dtype.kind not in "iu":
        raise OptionError(f"the seed canvas holds {found.dtype}; whole numbers are needed")
    return found


def _pins(pins: Any, rows: int, batch: bool) -> tuple[Pins, ...]:
    """The pins of each row."""
    given = pins if batch else [pins]
    if not isinstance(given, (list, tuple)) or len(given) != rows:
        raise OptionError(f"a batch of {rows} prompts takes pins as a list of {rows} dicts, one a prompt (empty for none)")
    for one in given:
        if not isinstance(one, dict):
            raise OptionError(f"pins are {one!r}; a dict from answer positions to token ids is needed")
    return tuple({whole("a pin's position", p): whole("a pinned token", t) for p, t in one.items()} for one in given)


def _seeds(seed: Any, rows: int) -> tuple[int, ...]:
    """One seed a row."""
    seeds = list(seed) if isinstance(seed, (list, tuple)) else [whole("seed", seed) + i for i in range(rows)]
    if len(seeds) != rows:
        raise OptionError(f"{len(seeds)} seeds for {rows} prompt(s)")
    return tuple(check_seed(one) for one in seeds)
