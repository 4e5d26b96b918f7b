"""The few operations that have one formulation per backend.

mlx is tuned for GPUs. Its x86 build takes exponentials one value at a time (10 ns each) and multiplies gathered rows
slowly, so the CPU gets formulations of its own; everything else in dgemma is written once, in plain mlx.
"""

from __future__ import annotations

import mlx.core as mx

from . import backend


def attention(queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: mx.array | None) -> mx.array:
    """Softmax attention: queries `[B, H, L, E]`, keys and values `[B, K, T, E]`, mask `[B or 1, 1, L, T]` or None."""
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)


def gelu(x: mx.array) -> mx.array:
    """The tanh form of GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415), elementwise."""
    return 0.5 * x * (1.0 + mx.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


def tanh(x: mx.array) -> mx.array:
    """Hyperbolic tangent, elementwise."""
    return mx.tanh(x)


def softmax(x: mx.array) -> mx.array:
    """Softmax over the last axis, float32."""
    return mx.softmax(x, axis=-1, precise=True)


def experts(
    rows: mx.array, chosen: mx.array, weights: mx.array, gate_up: mx.array, down: mx.array
) -> mx.array:
    """The weighted sum of each row's chosen experts.

    rows `[T, D]`, chosen `[T, k]` int, weights `[T, k]`, gate_up `[X, 2 I, D]` (gate first), down `[X, D, I]`; returns
    `[T, D]`.
    """
    count, k = chosen.shape
    order = mx.argsort(chosen.flatten())  # rows of one expert side by side, so that its weights are read once
    expert, source = chosen.flatten()[order], order // k
    hidden = mx.gather_mm(rows[source][:, None], gate_up.swapaxes(1, 2), rhs_indices=expert, sorted_indices=True)
    gate, up = mx.split(hidden, 2, axis=-1)  # [T k, 1, I] each
    out = mx.gather_mm(gelu(gate) * up, down.swapaxes(1, 2), rhs_indices=expert, sorted_indices=True)
    out = out[:, 0][mx.argsort(order)].reshape(count, k, -1)  # [T, k, D]
    return (out * weights[..., None].astype(out.dtype)).sum(axis=1)
