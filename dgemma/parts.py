"""The parts of a denoising step, and of encoding a picture: what runs each by itself, and what it cannot avoid to do.

A canvas pass is walked once (`walk`), and what each part works on is kept: a part then runs on exactly that, all layers of
its kind in a row. Letters as elsewhere; R = B C rows of a canvas pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from . import backend, kernels
from . import sampler as sampling
from .config import FULL, SLIDING, TextConfig
from .layers import Block, Read
from .model import Cache, DiffusionGemma
from .runtime import noise_picture

ELEMENTWISE = 7  # operations that each score of a step cannot avoid: cap, peak, difference, exponential, two sums, running sum


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part: what runs it, in how many layers, and what it cannot avoid. `times`: how often the whole has such a piece."""

    name: str
    layers: int
    run: Callable[[], list[mx.array]]
    nbytes: float
    operations: float
    times: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Met:
    """What one layer met in a canvas pass, all evaluated: `[B, C, D]`, rows `[R, D]`, and the way to its keys."""

    block: Block
    kind: str
    angles: tuple[mx.array, mx.array]
    read: Read
    x: mx.array
    normed: mx.array
    attended: mx.array
    after: mx.array  # x with the attention added
    dense_in: mx.array
    dense: mx.array
    rows: mx.array  # what the router reads
    sparse_in: mx.array
    chosen: mx.array
    shares: mx.array
    sparse: mx.array

    def attend(self, normed: mx.array) -> mx.array:
        """The layer's attention."""
        return self.block.self_attn(normed, self.angles, self.read)

    def consult(self, sparse_in: mx.array) -> mx.array:
        """The layer's experts, those that its rows chose."""
        return self.block.experts(sparse_in, self.chosen, self.shares)

    def frame(self, x: mx.array) -> list[mx.array]:
        """All that stands around attention, MLP and experts: norms, residuals, the merge. The layer's result is the last."""
        block = self.block
        normed = block.input_layernorm(x)
        after = kernels.add_normed(x, self.attended, block.post_attention_layernorm.weight, block.eps)
        ready = block.pre_feedforward_layernorm(after), block.pre_feedforward_layernorm_2(self.rows)
        norms = (block.post_feedforward_layernorm_1, block.post_feedforward_layernorm_2, block.post_feedforward_layernorm)
        ends = tuple(norm.weight for norm in norms)
        return [normed, *ready, kernels.merge(after, self.dense, self.sparse, ends, block.eps, block.layer_scalar)]


def walk(model: DiffusionGemma, canvas: mx.array, caches: Sequence[Cache], belief: mx.array) -> Iterator[Met]:
    """What every layer meets in the canvas pass of `canvas [B, C]`; each takes the last one's result, as in the model."""
    x = model.self_conditioning(model._embed(canvas), belief)
    angles = model._angles(caches[0], canvas.shape[1])
    for block, cache, layer in zip(model.layers, caches, model.config.text.layers):
        normed = block.input_layernorm(x)
        attended = block.self_attn(normed, angles[layer.kind], cache.read_block)
        after = kernels.add_normed(x, attended, block.post_attention_layernorm.weight, block.eps)
        dense_in, rows = block.pre_feedforward_layernorm(after), after.reshape(-1, after.shape[-1])
        sparse_in, (chosen, shares) = block.pre_feedforward_layernorm_2(rows), block.router(rows)
        met = Met(
            block=block, kind=layer.kind, angles=angles[layer.kind], read=cache.read_block, x=x, normed=normed,
            attended=attended, after=after, dense_in=dense_in, dense=block.mlp(dense_in), rows=rows, sparse_in=sparse_in,
            chosen=chosen, shares=shares, sparse=block.experts(sparse_in, chosen, shares).reshape(x.shape),
        )  # fmt: skip
        x = met.frame(x)[-1]
        mx.eval(x, met.angles, *(one for one in vars(met).values() if isinstance(one, mx.array)))
        yield met


# -- the parts of a step ----------------------------------------------------------------------------------------------


def step_parts(model: DiffusionGemma, canvas: mx.array, caches: Sequence[Cache], logits: mx.array) -> list[Part]:
    """The parts of a step that begins from `canvas [B, C]`, told what `logits [B, C, V]` believed."""
    belief = model.soft_embed(kernels.softmax(logits))
    mx.eval(belief)
    met = list(walk(model, canvas, caches, belief))
    text, rows, length = model.config.text, canvas.size, canvas.shape[1]
    line = rows * text.hidden_size * model.dtype.size  # bytes of the rows of one activation
    begin = Part(
        name="embedding, self-conditioning",
        layers=1,
        run=lambda: [model.self_conditioning(model._embed(canvas), belief), *_flat(model._angles(caches[0], length))],
        nbytes=held(model.self_conditioning) + 3 * line,
        operations=2 * rows * 3 * text.hidden_size * text.intermediate_size,
    )
    return [begin, *_layer_parts(met, text, rows, line), *_wide_parts(model, met[-1], canvas.shape)]


def _layer_parts(met: list[Met], text: TextConfig, rows: int, line: int) -> list[Part]:
    """The parts that every layer has; each layer's experts are counted that its rows chose."""
    hidden, inner, count = text.hidden_size, text.moe_intermediate_size, len(met)
    kinds = sorted({one.kind for one in met}, key=(SLIDING, FULL).index)
    used = sum(len(np.unique(np.array(one.chosen))) for one in met) / text.num_experts
    experts = met[0].block.experts
    return [
        *(_attention_part(kind, [one for one in met if one.kind == kind], line) for kind in kinds),
        Part(
            name="dense MLP", layers=count, run=lambda: _in_a_row([(one.block.mlp, one.dense_in) for one in met]),
            nbytes=count * (held(met[0].block.mlp) + 2 * line), operations=count * 2 * rows * 3 * hidden * text.intermediate_size,
        ),
        Part(
            name="router", layers=count, run=lambda: _in_a_row([(one.block.router, one.rows) for one in met]),
            nbytes=count * (held(met[0].block.router) + line), operations=count * 2 * rows * hidden * text.num_experts,
        ),
        Part(
            name="experts", layers=count,
            run=lambda: _in_a_row([(one.consult, one.sparse_in) for one in met]),
            nbytes=used * held(experts) + count * 2 * line,
            operations=count * 2 * rows * text.top_k_experts * 3 * hidden * inner,
        ),
        Part(
            name="norms, residuals, merge", layers=count, run=lambda: _in_a_row([(one.frame, one.x) for one in met]),
            nbytes=count * 13 * line, operations=count * 7 * 4 * rows * hidden,
        ),
    ]  # fmt: skip


def _attention_part(kind: str, met: list[Met], line: int) -> Part:
    """Attention of the layers of one kind: projections, keys and values as they are kept, scores."""
    attention, (batch, length, _) = met[0].block.self_attn, met[0].x.shape
    projections = sum(math.prod(shape_of(layer)) for name, layer in attention.items() if name.endswith("_proj"))
    one = mx.zeros((batch, attention.kv_heads, length, attention.head_dim), met[0].x.dtype)
    keys = met[0].read(one, one).keys  # [B, K, T, E]
    scores = batch * attention.heads * length * keys.shape[2] * attention.head_dim
    return Part(
        name="sliding attention" if kind == SLIDING else "full attention",
        layers=len(met),
        run=lambda: _in_a_row([(one.attend, one.normed) for one in met]),
        nbytes=len(met) * (held(attention) + 2 * keys.nbytes + 2 * line),
        operations=len(met) * (2 * batch * length * projections + 4 * scores),
    )


def _wide_parts(model: DiffusionGemma, last: Met, shape: tuple[int, int]) -> list[Part]:
    """What is as wide as the vocabulary, on as many rows as the loop takes at once."""
    text, width = model.config.text, model.dtype.size
    whole = last.frame(last.x)[-1].reshape(-1, text.hidden_size)  # [R, D]
    piece = whole[: max(1, kernels.WIDE // text.vocab_size)]
    rows, times = len(piece), len(whole) / len(piece)
    scores, cap = model.scores(model.norm(piece)), text.final_logit_softcapping
    uniforms, accept = mx.random.uniform(shape=(2, rows), key=mx.random.key(0)), sampling.EntropyBound().accept
    believed = kernels.believe(scores, cap, 0.6, uniforms[0])[-1]
    mx.eval(piece, scores, uniforms, believed)

    def sample() -> list[mx.array]:
        best, entropy, confidence, drawn, probabilities = kernels.believe(scores, cap, 0.6, uniforms[0])
        flat = sampling.Statistics(*(one.reshape(1, -1) for one in (best, entropy, confidence)))
        tokens = mx.where(accept(flat), drawn[None], sampling.noise(uniforms[1], text.vocab_size)[None])
        return [tokens, best, entropy, probabilities]

    table, line, wide = held(model.embed_tokens), rows * text.hidden_size * width, rows * text.vocab_size
    products = 2 * wide * text.hidden_size
    return [
        Part(name="head", layers=1, times=times, run=lambda: [model.scores(model.norm(piece))],
             nbytes=table + line + width * wide, operations=products),
        Part(name="sampler", layers=1, times=times, run=sample, nbytes=2 * width * wide, operations=ELEMENTWISE * wide),
        Part(name="soft embedding", layers=1, times=times, run=lambda: [model.soft_embed(believed)],
             nbytes=table + width * wide + line, operations=products),
    ]  # fmt: skip


def _in_a_row(calls: Sequence[tuple[Callable[[mx.array], Any], mx.array]]) -> list[mx.array]:
    """Every call on its input, one after the other: a GPU must not overlap what depends on each other in a real pass."""
    found: list[mx.array] = []
    for call, x in calls:
        if found and backend.is_gpu():
            x = mx.depends([x], found[-1:])[0]
        found += _flat(call(x))
    return found


def _flat(value: Any) -> list[mx.array]:
    return [array for _, array in tree_flatten(value)] if not isinstance(value, mx.array) else [value]


def held(module: nn.Module) -> int:
    """Bytes of a module's weights."""
    return sum(array.nbytes for _, array in tree_flatten(module.parameters()))


def shape_of(layer: nn.Module) -> tuple[int, ...]:
    """The shape of a projection's matrix, packed or not."""
    return layer.weight.shape if isinstance(layer, nn.Linear) else layer.shape


# -- the parts of a picture -------------------------------------------------------------------------------------------


def image_parts(model: DiffusionGemma, columns: int, rows: int) -> list[Part]:
    """The parts of encoding a picture of so many patches; every layer gets the first one's input."""
    config, tower, picture = model.config.vision, model.vision_tower, noise_picture(columns, rows)
    pixels, layers = mx.array(picture.pixels)[None], tower.encoder.layers
    width, patches, kept = config.hidden_size, columns * rows, {}

    def first(x: mx.array, *turn: mx.array) -> mx.array:  # what the tower hands to its layers
        kept.update(x=x, turn=turn)
        return x

    encoder, tower.encoder = tower.encoder, first
    try:
        mx.eval(tower(pixels, picture.positions))
    finally:
        tower.encoder = encoder
    x, turn, line = kept["x"], kept["turn"], patches * width * model.dtype.size
    mx.eval(x, turn)
    heads = config.num_attention_heads * config.head_dim
    projections = width * (2 * heads + 2 * config.num_key_value_heads * config.head_dim)
    count, soft = len(layers), mx.zeros((1, patches // config.pooling_kernel_size**2, width), model.dtype)
    return [
        Part(name="patch embedding", layers=1, run=lambda: [tower.patch_embedder(pixels, picture.positions)],
             nbytes=held(tower.patch_embedder.input_proj) + 4 * pixels.size + line, operations=2 * pixels.size * width),
        Part(name="attention", layers=count,
             run=lambda: _in_a_row([(lambda x, layer=layer: layer.self_attn(x, *turn), x) for layer in layers]),
             nbytes=count * (held(layers[0].self_attn) + 2 * line),
             operations=count * (2 * patches * projections + 4 * patches**2 * heads)),
        Part(name="MLP", layers=count, run=lambda: _in_a_row([(layer.mlp, x) for layer in layers]),
             nbytes=count * (held(layers[0].mlp) + 2 * line),
             operations=count * 2 * patches * 3 * width * config.intermediate_size),
        Part(name="projection", layers=1, run=lambda: [model.embed_vision(soft)], nbytes=held(model.embed_vision),
             operations=2 * soft.size * model.config.text.hidden_size),
    ]  # fmt: skip
