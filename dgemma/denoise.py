"""The loop: a canvas of noise becomes a block of text, block after block, on token ids alone.

    prefill the prompt
    for each block:      canvas = noise
        for each step:   believe, accept, renoise (dgemma.step)
                         until the row has settled or the steps are used up
        the most likely canvas is the block: emit it, and encode it into the caches

`denoise` is a generator of events. It prints, decodes and measures nothing. `settle` is its inner loop alone: one canvas of any
width, begun by `step.seed_canvas`, on caches that somebody else has filled and that it leaves as they are.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from . import kernels
from .canvas import MANY
from .errors import OptionError
from .model import Cache, DiffusionGemma
from .past import Past
from .step import Canvas, Options, Pins, Step, begin_block, lay_out, read
from .stopping import AnswerRule, cut


@dataclass(frozen=True)
class Prefilled:
    """The prompt is in the caches."""

    prompt_tokens: tuple[int, ...]  # per row, images included, padding not
    cached: int = 0  # of these, how many were there already (of a conversation)


@dataclass(frozen=True)
class Block:
    """A finished block. `tokens` are cut at the end token and at max_new_tokens; rows that ended earlier are absent."""

    block: int
    rows: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]
    steps: tuple[int, ...]  # denoising steps of each row, those of redrawn and amended canvases included


@dataclass(frozen=True)
class Done:
    """Every row is finished."""

    reasons: tuple[str, ...]  # "stop": an end token, or an answer rule; "length": max_new_tokens
    redrawn: tuple[int, ...]  # how often a row's empty first block was drawn again


Event = Prefilled | Step | Block | Done


@dataclass
class _Row:
    """One row of the batch: its own randomness, its pins, and what became of it."""

    place: int
    key: mx.array
    pins: Pins
    room: int  # tokens that may still be emitted
    judge: AnswerRule | None = None
    reason: str | None = None
    redrawn: int = 0


def denoise(
    model: DiffusionGemma,
    ids: np.ndarray,
    features: Sequence[mx.array],
    *,
    options: Options,
    seeds: Sequence[int],
    padding: Sequence[int] | None = None,
    chunk: int | None = None,
    canvas: np.ndarray | None = None,
    pins: Sequence[Pins] | None = None,
    judges: Sequence[AnswerRule] | None = None,
    past: Past | None = None,
) -> Iterator[Event]:
    """Answer a batch of prompts `ids [B, L]`, row b beginning with `padding[b]` slots of padding.

    `features` are the images' prompt rows (Past.features), `seeds` one whole number a row, `canvas [B, C]`
    tokens to begin the first block from, `pins` for each row the answer positions that hold a given token, `judges` for each
    row what reads its blocks as they are finished, `past` what the prompts are read into (None: new caches). Closed between
    two events, it leaves there what was finished by then.
    """
    length, size = model.config.canvas_length, ids.shape[0]
    _check(model, options, size, seeds, canvas, pins)
    if judges is not None and len(judges) != size:
        raise OptionError(f"{size} prompt(s), {len(judges)} answer rule(s)")
    past = past or Past(model, padding, options.packing)
    cached = past.read(ids, features, chunk)
    hidden = padding if padding is not None else [0] * size
    yield Prefilled(tuple(ids.shape[1] - int(p) for p in hidden), cached)

    rows = [
        _Row(b, mx.random.key(seed), pins[b] if pins else {}, options.max_new_tokens, judges[b] if judges else None)
        for b, seed in enumerate(seeds)
    ]
    everyone = list(rows)
    for block in range(-(-options.max_new_tokens // length)):
        start = canvas if block == 0 else None
        tokens, steps = yield from _write_block(model, past.caches, rows, block, options, start)
        yield _finish_block(rows, block, tokens, steps, options)
        going = [i for i, row in enumerate(rows) if row.reason is None]
        if not going:
            break
        if len(going) < len(rows):  # finished rows leave the batch
            rows, tokens = [rows[i] for i in going], tokens[going]
            past.keep(going)
        past.write(tokens)
    yield Done(tuple(row.reason for row in everyone), tuple(row.redrawn for row in everyone))


def settle(
    model: DiffusionGemma, caches: Sequence[Cache], state: Canvas, options: Options, places: Sequence[int], block: int = 0
) -> Generator[Step, None, Canvas]:
    """Denoise one canvas that stands after what `caches` hold, and write nothing to them; returns its last state.

    Steps are taken until every row has settled or they are used up. `places` are the numbers by which the events name the
    rows, `block` that by which they name the canvas. `shown[0]` of what is returned is the most likely canvas.

    While a GPU computes a step the next one is laid out, and started as soon as it is known to be wanted: between two steps
    the GPU waits for one read-back of four small arrays and for nothing else. Only what a step begins with decides what it
    computes, so nothing changes but the time.
    """
    laid = lay_out(model, caches, state, 1, options).start()
    while True:
        ahead = None
        if kernels.LAZY and laid.number < options.max_denoising_steps and state.tokens.size < MANY:
            ahead = lay_out(model, caches, laid.leave(state), laid.number + 1, options)
        state, step = read(laid, state, places, block, options)
        last = laid.number == options.max_denoising_steps or not state.active.any()
        if ahead is not None and not last:
            # It was laid out for the rows that were at work then; if one has settled since, it is of no use.
            ahead = ahead.start() if np.array_equal(ahead.active, state.active) else None
        yield step
        if last:
            return state
        laid = ahead or lay_out(model, caches, state, laid.number + 1, options).start()


def _check(model, options, size, seeds, canvas, pins) -> None:
    """Refuse seeds, canvases and pins that do not fit the batch, the canvas or the vocabulary."""
    length, vocabulary = model.config.canvas_length, model.config.text.vocab_size
    if len(seeds) != size or (pins is not None and len(pins) != size):
        raise OptionError(f"{size} prompt(s), {len(seeds)} seed(s), {size if pins is None else len(pins)} set(s) of pins")
    if canvas is not None:
        if canvas.shape != (size, length):
            raise OptionError(f"the seed canvas has shape {canvas.shape}; ({size}, {length}) is needed")
        if canvas.min() < 0 or canvas.max() >= vocabulary:
            raise OptionError(f"the seed canvas holds tokens outside 0..{vocabulary - 1}")
    for position, token in (item for row in pins or () for item in row.items()):
        if not 0 <= position < options.max_new_tokens or not 0 <= token < vocabulary:
            raise OptionError(
                f"pin {position} -> {token}: positions run to {options.max_new_tokens - 1}, tokens to {vocabulary - 1}"
            )


def _write_block(
    model: DiffusionGemma, caches: Sequence[Cache], rows: list[_Row], block: int, options: Options, start: np.ndarray | None
) -> Generator[Step, None, tuple[np.ndarray, np.ndarray]]:
    """Write one block; returns its tokens `[R, C]` and the steps that each row took `[R]`.

    A first block that begins with an end token would be an empty answer: such rows are drawn again, a few times at most.
    Rows that their judges amend are written again once, with what is to stay pinned.
    """
    pending, amended = np.ones(len(rows), dtype=bool), np.zeros(len(rows), dtype=bool)
    state, steps = None, np.zeros(len(rows), dtype=int)
    keys, places = [row.key for row in rows], [row.place for row in rows]
    while pending.any():
        state = begin_block(model, keys, pending, start, _pins(rows, block, model.config.canvas_length), state)
        state = yield from settle(model, caches, state, options, places, block)
        tokens = state.shown[0]
        steps += state.steps
        empty = np.isin(tokens[:, 0], options.end_token_ids)
        again = np.array([block == 0 and row.redrawn < options.max_redraws and 0 not in row.pins for row in rows])
        pending, start = pending & empty & again, None
        for i in np.flatnonzero(pending):
            rows[i].redrawn += 1
        for i in np.flatnonzero(~pending & ~amended):
            amended[i] = pending[i] = _amend(rows[i], block, tokens[i], options)
    for row, key in zip(rows, state.keys):
        row.key = key
    return tokens, steps


def _amend(row: _Row, block: int, tokens: np.ndarray, options: Options) -> bool:
    """Let a row's judge see a block `[C]`; True: it is to be written again, with the row's new pins."""
    if row.judge is None:
        return False
    held = row.judge.amend(cut(tokens.tolist(), options.end_token_ids, row.room)[0])
    if held is not None:  # the caller's own pins stay
        row.pins = {block * len(tokens) + position: token for position, token in held.items()} | dict(row.pins)
    return held is not None


def _pins(rows: list[_Row], block: int, length: int) -> tuple[mx.array, mx.array] | None:
    """Which positions of this block are pinned `[R, C]`, and to which tokens; None when none is."""
    pinned = np.zeros((len(rows), length), dtype=bool)
    held = np.zeros((len(rows), length), dtype=np.int32)
    for i, row in enumerate(rows):
        for position, token in row.pins.items():
            if position // length == block:
                pinned[i, position % length], held[i, position % length] = True, token
    return (mx.array(pinned), mx.array(held)) if pinned.any() else None


def _finish_block(rows: list[_Row], block: int, tokens: np.ndarray, steps: np.ndarray, options: Options) -> Block:
    """Cut each row's tokens to what is emitted, and note the rows that end here."""
    emitted = []
    for row, line in zip(rows, tokens.tolist()):
        kept, row.reason = cut(line, options.end_token_ids, row.room)
        ends = None if row.judge is None else row.judge.push(kept)
        if ends is not None:
            kept, row.reason = kept[:ends], "stop"
        row.room -= len(kept)
        emitted.append(tuple(kept))
    return Block(block, tuple(row.place for row in rows), tuple(emitted), tuple(steps.tolist()))
