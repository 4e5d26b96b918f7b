"""One denoising step, as a pure function of a canvas: what it computes, and which rows have settled by it.

    seed_canvas, begin_block   a canvas before its first step
    lay_out                    logits -> believe -> accept some positions, draw them; renoise the rest: for mlx to compute
    read                       wait for that: the canvas after it, and what to tell of it

Draws. Every row owns a key, `mx.random.key(seed)`, so that its answer does not depend on its neighbours. A block begins by
splitting the key and drawing C uniform numbers for its canvas; each step splits it again and draws `[2, C]`: the first
row of numbers chooses the tokens, the second the noise. A settled row draws nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from dgemma.attention import Packing

from . import kernels
from . import sampler as sampling
from .config import GenerationConfig
from .errors import OptionError
from .model import Cache, DiffusionGemma
from .sampler import EntropyBound, Sampler
from .stopping import BlockRule, StableAndConfident, StepsOnly

Pins = Mapping[int, int]  # position in the answer -> the token that it holds from the first step to the last
FORBIDDEN = -1e4  # added to a score: the soft-cap makes it the least of all, whatever the dtype, and never a NaN


# -- values -----------------------------------------------------------------------------------------------------------


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
class Canvas:
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
class Laid:
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

    def start(self) -> Laid:
        """Let mlx compute it while Python goes on."""
        mx.async_eval(self.tokens, self.best, self.entropy, self.accepted, self.belief)
        return self

    def leave(self, state: Canvas) -> Canvas:
        """What the next step begins with."""
        return replace(state, tokens=self.tokens, keys=self.keys, belief=self.belief)


# -- before the first step --------------------------------------------------------------------------------------------


def seed_canvas(
    model: DiffusionGemma,
    canvas: np.ndarray,
    keys: Sequence[mx.array],
    pinned: np.ndarray | None = None,
    allowed: Allowed | None = None,
) -> Canvas:
    """A canvas before its first step, of any width: `canvas [R, C]` of token ids, -1 where noise is to be drawn.

    `keys` are the rows' randomness (the canvas takes the draw that `denoise` takes at the start of a block), `pinned [R, C]`
    says which positions keep their token at every step.
    """
    active = np.ones(len(canvas), dtype=bool)
    left, uniforms = _uniforms(keys, active, canvas.shape[1:])
    given = mx.array(canvas.astype(np.int32))
    tokens = mx.where(given < 0, sampling.noise(uniforms, model.config.text.vocab_size), given)
    held = None if pinned is None or not pinned.any() else mx.array(pinned)
    return Canvas(tokens, left, held, active, np.zeros(len(canvas), dtype=int), allowed=allowed)


def begin_block(
    model: DiffusionGemma,
    keys: Sequence[mx.array],
    active: np.ndarray,
    start: np.ndarray | None,
    pins: tuple[mx.array, mx.array] | None,
    before: Canvas | None,
) -> Canvas:
    """The canvas of a block before its first step: noise, or the caller's tokens `start [R, C]`.

    `keys` are the rows' randomness, `pins` which positions are held `[R, C]` and at which tokens `[R, C]`. When a block is
    drawn again, inactive rows draw nothing and keep what they had `before`, and all go on with its keys.
    """
    length, vocabulary = model.config.canvas_length, model.config.text.vocab_size
    keys = tuple(keys) if before is None else before.keys
    if start is None:
        keys, uniforms = _uniforms(keys, active, (length,))
        tokens = sampling.noise(uniforms, vocabulary)
    else:
        tokens = mx.array(start.astype(np.int32))
    pinned, held = (None, None) if pins is None else pins
    if pinned is not None:
        tokens = mx.where(pinned, held, tokens)
    if before is not None:
        tokens = mx.where(mx.array(active)[:, None], tokens, before.tokens)
    shown = None if before is None else before.shown
    return Canvas(tokens, keys, pinned, active.copy(), np.zeros(len(active), dtype=int), shown=shown)


def _uniforms(
    keys: Sequence[mx.array], active: np.ndarray, shape: tuple[int, ...]
) -> tuple[tuple[mx.array, ...], mx.array]:
    """The next keys, and uniform numbers `[R, *shape]` from the present ones; rows that are not active draw nothing."""
    pairs = [mx.random.split(key) if a else (key, None) for key, a in zip(keys, active)]
    drawn = [mx.zeros(shape) if now is None else mx.random.uniform(shape=shape, key=now) for _, now in pairs]
    return tuple(key for key, _ in pairs), mx.stack(drawn)


# -- a step -----------------------------------------------------------------------------------------------------------


def lay_out(model: DiffusionGemma, caches: Sequence[Cache], state: Canvas, number: int, options: Options) -> Laid:
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
    return Laid(number, t, state.active, keys, tokens, seen.best, seen.entropy, accepted, belief)


def read(laid: Laid, state: Canvas, places: Sequence[int], block: int, options: Options) -> tuple[Canvas, Step]:
    """Wait for a step from `state`, read it and judge which rows have settled; its event names rows by their `places`."""
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
    step = Step(block, laid.number, laid.temperature, tuple(places), state.active, canvas, *shown)
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
