"""The loop: a canvas of noise becomes a block of text, block after block, on token ids alone.

    prefill the prompt
    for each block:      canvas = noise
        for each step:   logits -> believe -> accept some positions, draw them; renoise the rest
                         until the row has settled or the steps are used up
        the most likely canvas is the block: emit it, and encode it into the caches

`denoise` is a generator of events. It prints, decodes and measures nothing. `settle` is its inner loop alone: one canvas of any
width, begun by `seed_canvas`, on caches that somebody else has filled and that it leaves as they are.

Draws. Every row owns a key, `mx.random.key(seed)`, so that its answer does not depend on its neighbours. A block begins by
splitting the key and drawing C uniform numbers for its canvas; each step splits it again and draws `[2, C]`: the first
row of numbers chooses the tokens, the second the noise. A settled row draws nothing.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from dgemma.attention import Packing

from . import kernels
from . import sampler as sampling
from .canvas import MANY
from .config import GenerationConfig
from .errors import OptionError
from .model import Cache, DiffusionGemma
from .past import Past
from .sampler import EntropyBound, Sampler
from .stopping import AnswerRule, BlockRule, StableAndConfident, StepsOnly, cut

Pins = Mapping[int, int]  # position in the answer -> the token that it holds from the first step to the last
FORBIDDEN = -1e4  # added to a score: the soft-cap makes it the least of all, whatever the dtype, and never a NaN


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to sample and when to stop."""

    max_new_tokens: int
    max_denoising_steps: int
    t_min: float
    t_max: float
    sampler: Sampler
    rule: BlockRule
    end_token_ids: tuple[int, ...]
    max_redraws: int = 2  # how often an empty first block is drawn again
    packing: Packing | None = None  # of keys and values in the caches

    def __post_init__(self) -> None:
        for name, value in (("max_new_tokens", self.max_new_tokens), ("max_denoising_steps", self.max_denoising_steps)):
            if value < 1:
                raise OptionError(f"{name} is {value}; at least 1 is needed")
        if not 0 < self.t_min <= self.t_max < float("inf"):
            raise OptionError(f"t_min is {self.t_min} and t_max {self.t_max}; 0 < t_min <= t_max is needed")

    @classmethod
    def of(cls, config: GenerationConfig) -> Options:
        """The options that a checkpoint's own generation config asks for."""
        return cls(
            max_new_tokens=config.max_new_tokens,
            max_denoising_steps=config.max_denoising_steps,
            t_min=config.t_min,
            t_max=config.t_max,
            sampler=EntropyBound(config.entropy_bound),
            rule=StableAndConfident(config.stability_threshold, config.confidence_threshold),
            end_token_ids=config.end_token_ids,
        )

    def exactly(self, steps: int) -> Options:
        """These options with `steps` denoising steps a canvas, neither fewer nor more."""
        return replace(self, max_denoising_steps=steps, rule=StepsOnly())


@dataclass(frozen=True)
class Allowed:
    """Which tokens each position of a canvas may become: kind k of position (r, c) may take token v where `bias[k, v]` is 0."""

    kinds: mx.array  # [R, C] int
    bias: mx.array  # [K, V] 0 or FORBIDDEN, in the dtype of activations


@dataclass(frozen=True)
class Prefilled:
    """The prompt is in the caches."""

    prompt_tokens: tuple[int, ...]  # per row, images included, padding not
    cached: int = 0  # of these, how many were there already (of a conversation)


@dataclass(frozen=True)
class Step:
    """One denoising step of the rows still at work on this block; arrays are read-only numpy, one entry a row of `rows`."""

    block: int
    step: int  # 1, 2, ...; from 1 again when an empty first block is drawn again
    temperature: float
    rows: tuple[int, ...]  # their places in the batch
    active: np.ndarray  # [R] bool: rows that took this step; the others repeat what they last showed
    canvas: np.ndarray  # [R, C] what the next step will read: accepted tokens and new noise
    best: np.ndarray  # [R, C] the most likely tokens
    entropy: np.ndarray  # [R, C] nats
    accepted: np.ndarray  # [R, C] bool


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


@dataclass(frozen=True)
class _Canvas:
    """A block being written, between two steps; R rows."""

    tokens: mx.array  # [R, C]
    keys: tuple[mx.array, ...]  # the rows' randomness from here on
    pinned: mx.array | None  # [R, C] bool
    active: np.ndarray  # [R] bool
    steps: np.ndarray  # [R] int: steps taken
    belief: mx.array | None = None  # [R, C, D] what the last step believed, as a soft embedding
    best: tuple[np.ndarray, ...] = ()  # the newest canvases of most likely tokens, [R, C] each, for the block rule
    shown: tuple[np.ndarray, ...] | None = None  # best, entropy and accepted of each row's last step, [R, C] each
    allowed: Allowed | None = None


@dataclass(frozen=True)
class _Laid:
    """A step laid out for mlx, perhaps under way, and nothing of it read; R rows."""

    number: int
    temperature: float
    active: np.ndarray  # [R] bool: the rows that take it
    keys: tuple[mx.array, ...]  # the rows' randomness after it
    tokens: mx.array  # [R, C]
    best: mx.array  # [R, C]
    entropy: mx.array  # [R, C]
    accepted: mx.array  # [R, C]
    belief: mx.array  # [R, C, D]

    def start(self) -> _Laid:
        """Let mlx compute it while Python goes on."""
        mx.async_eval(self.tokens, self.best, self.entropy, self.accepted, self.belief)
        return self

    def leave(self, state: _Canvas) -> _Canvas:
        """What the next step begins with."""
        return replace(state, tokens=self.tokens, keys=self.keys, belief=self.belief)


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


def seed_canvas(
    model: DiffusionGemma,
    canvas: np.ndarray,
    keys: Sequence[mx.array],
    pinned: np.ndarray | None = None,
    allowed: Allowed | None = None,
) -> _Canvas:
    """A canvas before its first step, of any width: `canvas [R, C]` of token ids, -1 where noise is to be drawn.

    `keys` are the rows' randomness (the canvas takes the draw that `denoise` takes at the start of a block), `pinned [R, C]`
    says which positions keep their token at every step.
    """
    active = np.ones(len(canvas), dtype=bool)
    left, uniforms = _uniforms(keys, active, canvas.shape[1:])
    given = mx.array(canvas.astype(np.int32))
    tokens = mx.where(given < 0, sampling.noise(uniforms, model.config.text.vocab_size), given)
    held = None if pinned is None or not pinned.any() else mx.array(pinned)
    return _Canvas(tokens, left, held, active, np.zeros(len(canvas), dtype=int), allowed=allowed)


def settle(
    model: DiffusionGemma, caches: Sequence[Cache], state: _Canvas, options: Options, places: Sequence[int]
) -> Generator[Step, None, _Canvas]:
    """Denoise one canvas that stands after what `caches` hold, and write nothing to them; returns its last state.

    `places` are the numbers by which the events name the rows. `shown[0]` of what is returned is the most likely canvas.
    """
    return (yield from _write_canvas(model, caches, [_Row(p, k, {}, 0) for p, k in zip(places, state.keys)], 0, state, options))


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
    while pending.any():
        state = yield from _write_canvas(model, caches, rows, block, _begin(model, rows, block, pending, start, state), options)
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


def _write_canvas(
    model: DiffusionGemma, caches: Sequence[Cache], rows: list[_Row], block: int, state: _Canvas, options: Options
) -> Generator[Step, None, _Canvas]:
    """Take steps until every row has settled or they are used up.

    While a GPU computes a step the next one is laid out, and started as soon as it is known to be wanted: between two steps
    the GPU waits for one read-back of four small arrays and for nothing else. Only what a step begins with decides what it
    computes, so nothing changes but the time.
    """
    laid = _lay_out(model, caches, state, 1, options).start()
    while True:
        ahead = None
        if kernels.LAZY and laid.number < options.max_denoising_steps and state.tokens.size < MANY:
            ahead = _lay_out(model, caches, laid.leave(state), laid.number + 1, options)
        state, step = _read(laid, state, rows, block, options)
        last = laid.number == options.max_denoising_steps or not state.active.any()
        if ahead is not None and not last:
            # It was laid out for the rows that were at work then; if one has settled since, it is of no use.
            ahead = ahead.start() if np.array_equal(ahead.active, state.active) else None
        yield step
        if last:
            return state
        laid = ahead or _lay_out(model, caches, state, laid.number + 1, options).start()


def _begin(
    model: DiffusionGemma,
    rows: list[_Row],
    block: int,
    active: np.ndarray,
    start: np.ndarray | None,
    before: _Canvas | None,
) -> _Canvas:
    """The canvas before its first step: noise, or the caller's tokens; pins hold theirs.

    When a block is drawn again, inactive rows draw nothing and keep what they had `before`.
    """
    length, vocabulary = model.config.canvas_length, model.config.text.vocab_size
    keys = tuple(row.key for row in rows) if before is None else before.keys
    if start is None:
        keys, uniforms = _uniforms(keys, active, (length,))
        tokens = sampling.noise(uniforms, vocabulary)
    else:
        tokens = mx.array(start.astype(np.int32))
    pinned, held = _pins(rows, block, length)
    if pinned is not None:
        tokens = mx.where(pinned, held, tokens)
    if before is not None:
        tokens = mx.where(mx.array(active)[:, None], tokens, before.tokens)
    shown = None if before is None else before.shown
    return _Canvas(tokens, keys, pinned, active.copy(), np.zeros(len(rows), dtype=int), shown=shown)


def _uniforms(
    keys: Sequence[mx.array], active: np.ndarray, shape: tuple[int, ...]
) -> tuple[tuple[mx.array, ...], mx.array]:
    """The next keys, and uniform numbers `[R, *shape]` from the present ones; rows that are not active draw nothing."""
    pairs = [mx.random.split(key) if a else (key, None) for key, a in zip(keys, active)]
    drawn = [mx.zeros(shape) if now is None else mx.random.uniform(shape=shape, key=now) for _, now in pairs]
    return tuple(key for key, _ in pairs), mx.stack(drawn)


def _pins(rows: list[_Row], block: int, length: int) -> tuple[mx.array | None, mx.array | None]:
    """Which positions of this block are pinned `[R, C]`, and to which tokens; None when none is."""
    pinned = np.zeros((len(rows), length), dtype=bool)
    held = np.zeros((len(rows), length), dtype=np.int32)
    for i, row in enumerate(rows):
        for position, token in row.pins.items():
            if position // length == block:
                pinned[i, position % length], held[i, position % length] = True, token
    return (mx.array(pinned), mx.array(held)) if pinned.any() else (None, None)


def _lay_out(model: DiffusionGemma, caches: Sequence[Cache], state: _Canvas, number: int, options: Options) -> _Laid:
    """One step of all active rows, up to where it is judged: believe, accept, draw, renoise."""
    length, vocabulary = state.tokens.shape[1], model.config.text.vocab_size
    steps = options.max_denoising_steps
    t = sampling.temperature(steps + 1 - number, steps, options.t_min, options.t_max)
    keys, uniforms = _uniforms(state.keys, state.active, (2, length))  # [R, 2, C]

    seen, drawn, belief = _look(
        model, model.canvas_hidden(state.tokens, caches, state.belief), t, uniforms[:, 0], state.allowed
    )
    if state.pinned is not None:  # settled whatever the model believes, and no rival of the free positions
        seen = replace(
            seen,
            best=mx.where(state.pinned, state.tokens, seen.best),
            entropy=mx.where(state.pinned, 0.0, seen.entropy),
            confidence=mx.where(state.pinned, 0.0, seen.confidence),
        )
    accepted = options.sampler.accept(seen)
    tokens = mx.where(accepted, drawn, sampling.noise(uniforms[:, 1], vocabulary))
    if state.pinned is not None:
        tokens, accepted = mx.where(state.pinned, state.tokens, tokens), accepted | state.pinned
    tokens = mx.where(mx.array(state.active)[:, None], tokens, state.tokens)
    return _Laid(number, t, state.active, keys, tokens, seen.best, seen.entropy, accepted, belief)


def _read(laid: _Laid, state: _Canvas, rows: list[_Row], block: int, options: Options) -> tuple[_Canvas, Step]:
    """Wait for a step from `state`, read it and judge which rows have settled."""
    shown = (np.array(laid.best).astype(np.int32), np.array(laid.entropy), np.array(laid.accepted))
    if state.shown is not None:
        shown = tuple(np.where(state.active[:, None], new, old) for new, old in zip(shown, state.shown))
    canvas = np.array(laid.tokens)
    for array in (canvas, *shown, state.active):
        array.setflags(write=False)  # events show the loop's own memory
    history = (*state.best, shown[0])[-(options.rule.history + 1) :]
    after = replace(
        laid.leave(state),
        active=state.active & ~options.rule.settled(history, shown[1]),
        steps=state.steps + state.active,
        best=history,
        shown=shown,
    )
    step = Step(block, laid.number, laid.temperature, tuple(row.place for row in rows), state.active, canvas, *shown)
    return after, step


def _look(
    model: DiffusionGemma, hidden: mx.array, t: float, uniforms: mx.array, allowed: Allowed | None = None
) -> tuple[sampling.Statistics, mx.array, mx.array]:
    """All of a step that is as wide as the vocabulary: statistics, tokens drawn `[R, C]`, and the belief `[R, C, D]`.

    `hidden [R, C, D]`, `uniforms [R, C]`. Some positions at a time, so that no temporary has more than kernels.WIDE numbers.
    """
    shape, rows = hidden.shape, hidden.reshape(-1, hidden.shape[-1])  # [R C, D]
    text = model.config.text
    most, cap = max(1, kernels.WIDE // text.vocab_size), text.final_logit_softcapping
    pieces = []
    for begin in range(0, len(rows), most):
        scores = model.scores(rows[begin : begin + most])
        if allowed is not None:
            scores = scores + allowed.bias[allowed.kinds.reshape(-1)[begin : begin + most]]
        *seen, probabilities = kernels.believe(scores, cap, t, uniforms.reshape(-1)[begin : begin + most])
        pieces.append((*seen, model.soft_embed(probabilities)))
        if len(rows) > most:  # or the next piece would begin before this one has let go of its temporaries
            mx.eval(pieces[-1])
    best, entropy, confidence, drawn, belief = (
        mx.concatenate(parts).reshape(*shape[:2], *parts[0].shape[1:]) for parts in zip(*pieces)
    )
    return sampling.Statistics(best, entropy, confidence), drawn, belief


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
