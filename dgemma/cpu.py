"""The same operations for mlx's CPU backend, in float32; other dtypes get the plain ones.

Three facts about mlx 0.32.4 on x86-64 shape this module (measured on two cores of an AMD EPYC). It takes exponentials one
value at a time: 10 ns each, where numpy's are vectorised and take 1.3 to 2. It computes on a thread of its own: handing an
operation over and waiting for it costs 10 to 100 us, which on a canvas of a few thousand numbers is most of the time. And
the BLAS beside it, MKL, takes up to twice as long there as the OpenBLAS inside numpy's wheel. So numpy does what it can,
in mlx's own memory: `np.array(a, copy=False)` of an evaluated array is a view of it (mlx documentation, "Conversion to
NumPy and Other Frameworks"). mlx still multiplies packed matrices.

Everything here evaluates, so nothing here can be traced by mx.compile or mx.grad.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from . import beliefs, plain
from .flash import attend
from .matrices import ExpertStack, Packed
from .plain import Angles
from .strips import WAKE, in_strips, in_turns, product, view

GELU, MOST = np.float32(0.7978845608028654), np.float32(85)


def _of_float32(function: Callable) -> Callable:
    """`function` for float32, the plain formulation of the same name for anything else: numpy knows no bfloat16."""
    other = getattr(plain, function.__name__)

    @functools.wraps(function)
    def chosen(x: mx.array, *arguments, **named) -> mx.array:
        return (function if x.dtype == mx.float32 else other)(x, *arguments, **named)

    return chosen


@_of_float32
def linear(x: mx.array, layer: nn.Module) -> mx.array:
    """As plain.linear; a packed matrix is unpacked on the way: mlx multiplies packed ones at 3 GFLOP/s here."""
    if type(layer) is nn.Linear:
        return mx.array(_projected(view(x), view(layer["weight"])))
    return scores(x, layer) if isinstance(layer, Packed) else layer(x)


def _projected(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """`x [..., I]` times `weight [O, I]`: `[..., O]`, one product of all rows."""
    return product(x.reshape(-1, x.shape[-1]), weight.T).reshape(*x.shape[:-1], -1)


@_of_float32
def scores(x: mx.array, table: nn.Module) -> mx.array:
    """As plain.scores."""
    if not isinstance(table, Packed):
        return mx.array(_projected(view(x), view(table.weight)))
    parts = []
    for _, rows in table.pieces(x.dtype):
        parts.append(x @ rows.T)
        mx.eval(parts[-1])  # or all pieces would lie unpacked before the first is multiplied
    return mx.concatenate(parts, axis=-1)


@_of_float32
def mix(shares: mx.array, table: nn.Module) -> mx.array:
    """As plain.mix."""
    if not isinstance(table, Packed):
        return mx.array(_projected(view(shares), view(table.weight).T))
    out = 0
    for where, rows in table.pieces(shares.dtype):
        out = out + shares[..., where] @ rows
        mx.eval(out)  # as above
    return out


@_of_float32
def rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """As plain.rms_norm."""
    return mx.array(_normed(view(x), weight, eps))


def _normed(x: np.ndarray, weight: mx.array | None, eps: float) -> np.ndarray:
    out, scale = np.empty(x.shape, np.float32), None if weight is None else view(weight)
    width = x.shape[-1]
    in_strips(lambda part, normed: _norm(part, scale, eps, normed), x.reshape(-1, width), out.reshape(-1, width))
    return out


def _norm(x: np.ndarray, weight: np.ndarray | None, eps: float, out: np.ndarray) -> None:
    scale = np.einsum("ri,ri->r", x, x)
    scale /= x.shape[-1]
    scale += eps
    np.sqrt(scale, out=scale)
    np.divide(x, scale[:, None], out=out)
    if weight is not None:
        out *= weight


@_of_float32
def rotate(x: mx.array, angles: Angles) -> mx.array:
    """As plain.rotate."""
    mx.eval(x, *angles)
    return _rotated(view(x), angles)


@_of_float32
def heads(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    query_weight: mx.array,
    key_weight: mx.array,
    eps: float,
    angles: Angles,
) -> tuple[mx.array, mx.array, mx.array]:
    """As plain.heads."""
    mx.eval(queries, keys, values, *angles)  # one wait for all
    turned = (_rotated(_normed(view(x), w, eps), angles) for x, w in ((queries, query_weight), (keys, key_weight)))
    return (*turned, mx.array(_normed(view(values), None, eps)))


def _rotated(x: np.ndarray, angles: Angles) -> mx.array:
    (cos, sin), half = (view(a) for a in angles), x.shape[-1] // 2
    out = x * cos
    out[..., :half] += x[..., half:] * sin[..., :half]
    out[..., half:] += x[..., :half] * sin[..., half:]
    return mx.array(out)


@_of_float32
def add_normed(x: mx.array, branch: mx.array, weight: mx.array, eps: float) -> mx.array:
    """As plain.add_normed."""
    mx.eval(x, branch)
    out = _normed(view(branch), weight, eps)
    out += view(x)
    return mx.array(out)


@_of_float32
def merge(
    x: mx.array,
    dense: mx.array,
    sparse: mx.array,
    weights: tuple[mx.array, mx.array, mx.array],
    eps: float,
    scalar: mx.array,
) -> mx.array:
    """As plain.merge."""
    mx.eval(x, dense, sparse)
    summed = _normed(view(dense), weights[0], eps)
    summed += _normed(view(sparse), weights[1], eps)
    out = _normed(summed, weights[2], eps)
    out += view(x)
    out *= view(scalar)
    return mx.array(out)


@_of_float32
def attention(queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: mx.array | None) -> mx.array:
    """As plain.attention, some rows of scores at a time, which stay in a core's cache from one product to the other."""
    mx.eval(queries, keys, values, *([] if mask is None else [mask]))
    q, k, v = view(queries), view(keys), view(values)
    found = attend(q, k, v, scale, None if mask is None else view(mask))
    return mx.array(found).swapaxes(1, 2)


@_of_float32
def geglu(gate: mx.array, up: mx.array) -> mx.array:
    """As plain.geglu."""
    mx.eval(gate, up)
    a, b = (view(x).reshape(-1, x.shape[-1]) for x in (gate, up))
    out = np.empty(a.shape, np.float32)
    in_strips(_geglu, a, b, out)
    return mx.array(out.reshape(gate.shape))


def _geglu(gate: np.ndarray, up: np.ndarray, out: np.ndarray) -> None:
    """With 1 + tanh(u) = 2 / (1 + exp(-2u)): numpy takes an exponential in two thirds of the time of a tanh."""
    np.multiply(gate, gate, out=out)
    out *= np.float32(-2 * 0.044715) * GELU
    out -= np.float32(2) * GELU
    out *= gate
    np.minimum(out, MOST, out=out)  # from there on the result is 0 either way, and no exponential overflows
    np.exp(out, out=out)
    out += np.float32(1)
    np.divide(gate, out, out=out)
    out *= up


def _exponentials(scores: np.ndarray, sums: np.ndarray) -> None:
    scores -= scores.max(axis=1, keepdims=True)
    np.exp(scores, out=scores)
    np.sum(scores, axis=1, keepdims=True, out=sums)


@_of_float32
def softcap(logits: mx.array, cap: float) -> mx.array:
    """As plain.softcap."""
    out = np.multiply(view(logits), np.float32(1 / cap), order="C")  # rows in a row, for the strips
    rows = out.reshape(-1, out.shape[-1])
    in_strips(lambda part: np.tanh(part, out=part), rows)
    out *= np.float32(cap)
    return mx.array(out)


@_of_float32
def softmax(logits: mx.array) -> mx.array:
    """As plain.softmax."""
    out = np.array(logits, order="C")  # a copy, rows in a row: the caller keeps the logits
    rows = out.reshape(-1, out.shape[-1])
    sums = np.empty((len(rows), 1), np.float32)
    in_strips(_exponentials, rows, sums)
    rows /= sums
    return mx.array(out)


@_of_float32
def believe(
    scores: mx.array, cap: float, t: float, uniforms: mx.array
) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array]:
    """As plain.believe, some rows at a time, which stay in a core's cache from the scores to the probabilities."""
    mx.eval(scores, uniforms)
    raw, numbers = view(scores), view(uniforms)
    best, drawn = np.empty((2, len(raw)), np.int32)
    entropy, confidence = np.empty((2, len(raw)), np.float32)
    probabilities = np.empty(raw.shape, np.float32)
    in_strips(functools.partial(beliefs.believe, cap, t), raw, numbers, best, entropy, confidence, drawn, probabilities)
    return tuple(mx.array(found) for found in (best, entropy, confidence, drawn, probabilities))


@_of_float32
def route(scores: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """As plain.route."""
    found = view(scores)
    chosen = np.argpartition(-found, k - 1, axis=-1)[:, :k]
    shares = np.take_along_axis(found, chosen, axis=-1)
    _exponentials(shares, sums := np.empty((len(shares), 1), np.float32))
    shares /= sums
    return mx.array(chosen), mx.array(shares)


@_of_float32
def experts(rows: mx.array, chosen: mx.array, weights: mx.array, gate_up: nn.Module, down: nn.Module) -> mx.array:
    """As plain.experts, each expert on the rows that chose it, experts side by side: mlx's gather_mm is slow here."""
    (count, k), (number, width, inner) = chosen.shape, down.shape
    mx.eval(rows, chosen, weights)
    picked = view(chosen).reshape(-1)  # [T k]
    order = np.argsort(picked, kind="stable")  # pairs of row and expert, expert after expert
    ends = np.cumsum(np.bincount(picked, minlength=number)).tolist()
    x, out = view(rows)[order // k], np.empty((count * k, width), np.float32)  # [T k, D]

    def consult(task: tuple[int, slice]) -> None:
        expert, pairs = task
        hidden = x[pairs] @ _matrix(gate_up, expert).T  # [pairs, 2 I]
        between = np.empty((len(hidden), inner), np.float32)
        _geglu(hidden[:, :inner], hidden[:, inner:], between)
        out[order[pairs]] = between @ _matrix(down, expert).T

    tasks = [(expert, slice(*pair)) for expert, pair in enumerate(zip([0, *ends], ends)) if pair[1] > pair[0]]
    packed = isinstance(gate_up, Packed) or isinstance(down, Packed)  # unpacked by mlx, on this thread
    in_turns(consult, tasks, alone=packed or count * k * inner * width < 2 * WAKE)
    return mx.array(np.einsum("tkd,tk->td", out.reshape(count, k, -1), view(weights)))


def _matrix(stack: nn.Module, expert: int) -> np.ndarray:
    return view(stack.weight)[expert] if isinstance(stack, ExpertStack) else view(stack.unpacked(expert, mx.float32))
