"""The operations that have one formulation per backend, in plain mlx: what GPUs run, and what the others must equal.

Letters: B batch, L positions, H query heads, K key/value heads, E head width, T rows or keys, D hidden, X experts, I their
inner width, R rows of a canvas, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

# mlx 0.32.4's CUDA build multiplies wrong rows when gather_mm is told that its indices are sorted (every result off by its
# own size; measured on an H200 in float32 and bfloat16). Untold, it is right. Metal and the CPU are right either way.
SORTED = not mx.cuda.is_available()

SCORES = 1 << 26  # attention scores of one piece, 128 MiB in bfloat16

Angles = tuple[mx.array, mx.array]  # cosine and signed sine: see dgemma.attention.rope


def linear(x: mx.array, layer: nn.Module) -> mx.array:
    """`layer(x)`: a projection without bias of the last axis."""
    return layer(x)


def scores(x: mx.array, table: nn.Module) -> mx.array:
    """`x [..., D]` against every row of an embedding table: `[..., V]`."""
    return table.scores(x)


def mix(shares: mx.array, table: nn.Module) -> mx.array:
    """The rows' sum `[..., D]` of an embedding table, weighted by `shares [..., V]`."""
    return table.mix(shares)


def rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """`x / rms(x) * weight` over the last axis, computed in float32 (Zhang and Sennrich 2019, arXiv:1910.07467)."""
    return mx.fast.rms_norm(x, weight, eps)


def rotate(x: mx.array, angles: Angles) -> mx.array:
    """`x [B, heads, L, E]` turned by `angles`; in x's dtype, as the reference rounds the angles first.

    Any shape of x will do that the angles broadcast to; value i of the last axis pairs with value i + E/2.
    """
    cos, sin = (a.astype(x.dtype) for a in angles)
    return x * cos + mx.roll(x, x.shape[-1] // 2, axis=-1) * sin


def heads(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    query_weight: mx.array,
    key_weight: mx.array,
    eps: float,
    angles: Angles,
) -> tuple[mx.array, mx.array, mx.array]:
    """What attention works on: queries and keys normed and rotated, values normed without a weight.

    queries `[B, H, L, E]`, keys and values `[B, K, L, E]` as projected; `values` may be `keys` itself.
    """
    return (
        rotate(rms_norm(queries, query_weight, eps), angles),
        rotate(rms_norm(keys, key_weight, eps), angles),
        rms_norm(values, None, eps),
    )


def attention(queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: mx.array | None) -> mx.array:
    """Softmax attention: queries `[B, H, L, E]`, keys and values `[B, K, T, E]`, mask `[B or 1, 1, L, T]` or None.

    Long queries go piece by piece: heads of 256 and 512 are too wide for mlx's fused kernels, and what runs then holds all
    scores of a call at once.
    """
    piece = max(1, SCORES // (queries.shape[0] * queries.shape[1] * keys.shape[2]))

    def attend(part: mx.array, seen: mx.array | None) -> mx.array:
        return mx.fast.scaled_dot_product_attention(part, keys, values, scale=scale, mask=seen)

    return in_pieces(attend, queries, mask, piece)


def in_pieces(
    attend: Callable[[mx.array, mx.array | None], mx.array], queries: mx.array, mask: mx.array | None, piece: int
) -> mx.array:
    """`attend(queries, mask)` for at most `piece` positions of the queries at a time, joined."""
    length = queries.shape[2]
    if length <= piece:
        return attend(queries, mask)
    parts = []
    for i in range(0, length, piece):
        parts.append(attend(queries[:, :, i : i + piece], None if mask is None else mask[:, :, i : i + piece]))
        mx.eval(parts[-1])  # or mlx would lay out the scores of all pieces before it works on the first
    return mx.concatenate(parts, axis=2)


def add_normed(x: mx.array, branch: mx.array, weight: mx.array, eps: float) -> mx.array:
    """The residual `x [B, L, D]` plus a normed branch of the same shape."""
    return x + rms_norm(branch, weight, eps)


def merge(
    x: mx.array,
    dense: mx.array,
    sparse: mx.array,
    weights: tuple[mx.array, mx.array, mx.array],
    eps: float,
    scalar: mx.array,
) -> mx.array:
    """The end of a layer, all `[B, L, D]`: dense MLP and experts, each normed, summed, normed, added to x, and scaled.

    `weights` are those of the three norms: of the dense branch, of the sparse one, of their sum.
    """
    summed = rms_norm(dense, weights[0], eps) + rms_norm(sparse, weights[1], eps)
    return (x + rms_norm(summed, weights[2], eps)) * scalar


def gelu(x: mx.array) -> mx.array:
    """The tanh form of GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415), elementwise."""
    return 0.5 * x * (1.0 + mx.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


def geglu(gate: mx.array, up: mx.array) -> mx.array:
    """`gelu(gate) * up`; the gate in float32, since 1 + tanh cancels in bf16."""
    return gelu(gate.astype(mx.float32)).astype(gate.dtype) * up


def softcap(logits: mx.array, cap: float) -> mx.array:
    """Logits bent smoothly into (-cap, cap), float32."""
    return mx.tanh(logits / cap) * cap


def softmax(logits: mx.array) -> mx.array:
    """Softmax over the last axis, float32."""
    return mx.softmax(logits, axis=-1, precise=True)


def believe(
    scores: mx.array, cap: float, t: float, uniforms: mx.array
) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array]:
    """What the raw `scores [R, V]` of the head say of each position at temperature `t`: all of a step as wide as the vocabulary.

    `cap` bounds the logits (softcap); `uniforms [R]`, float32 in 0..1, draw one token each. Returns the most likely tokens
    `[R]`, their distributions' entropies `[R]` (float32, nats, at least 0), the probabilities of the most likely `[R]`
    (float32), the tokens drawn `[R]` (int32), and all probabilities `[R, V]` in the dtype of `scores`, as `mix` takes them.
    """
    logits = softcap(scores.astype(mx.float32), cap) / t  # float32: entropies of 0.005 need more than bf16 keeps
    probabilities = softmax(logits)
    peak, confidence = logits.max(axis=-1), probabilities.max(axis=-1)
    # H = log Z - E[logit]; with log Z = peak - log(confidence) no second pass of exponentials is needed.
    entropy = mx.maximum(peak - mx.log(confidence) - (probabilities * logits).sum(axis=-1), 0.0)
    drawn = draw(probabilities, uniforms)
    return logits.argmax(axis=-1), entropy, confidence, drawn, probabilities.astype(scores.dtype)


def draw(probabilities: mx.array, uniforms: mx.array) -> mx.array:
    """A token for each position of `probabilities [..., V]` by the inverse of the distribution function: int32 `[...]`."""
    cumulative = mx.cumsum(probabilities, axis=-1)
    target = uniforms[..., None] * cumulative[..., -1:]  # the last entry is 1 up to rounding
    below = (cumulative <= target).sum(axis=-1)
    return mx.minimum(below, probabilities.shape[-1] - 1).astype(mx.int32)


def route(scores: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """The k experts of highest score for each row, and their shares: `scores [T, X]` -> two `[T, k]`, shares float32."""
    scores = scores.astype(mx.float32)  # a softmax over 128 experts in bf16 would tie
    chosen = mx.argpartition(-scores, k - 1, axis=-1)[:, :k]
    # A softmax over all experts renormalised over the chosen equals the softmax over the chosen.
    return chosen, mx.softmax(mx.take_along_axis(scores, chosen, axis=-1), axis=-1)


def experts(rows: mx.array, chosen: mx.array, weights: mx.array, gate_up: nn.Module, down: nn.Module) -> mx.array:
    """The weighted sum of each row's chosen experts.

    rows `[T, D]`, chosen `[T, k]` int, weights `[T, k]`; gate_up (gate first) and down are stacks of X matrices, `[2 I, D]`
    and `[D, I]`, plain or packed (dgemma.matrices). Returns `[T, D]`.
    """
    count, k = chosen.shape
    order = mx.argsort(chosen.flatten())  # rows of one expert side by side, so that its weights are read once
    expert, source = chosen.flatten()[order], order // k
    hidden = gate_up(rows[source][:, None], expert, SORTED)
    gate, up = mx.split(hidden, 2, axis=-1)  # [T k, 1, I] each
    out = down(geglu(gate, up), expert, SORTED)
    out = out[:, 0][mx.argsort(order)].reshape(count, k, -1)  # [T, k, D]
    return (out * weights[..., None]).sum(axis=1).astype(rows.dtype)  # weights are float32: rounded once, at the end
