"""The same operations for mlx's CPU backend, in float32; other dtypes get the plain ones.

Two facts about mlx 0.32.4 on x86-64 shape this module (measured on two cores of an AMD EPYC). It takes exponentials one
value at a time: 10 ns each, where numpy's are vectorised and take 1.3. And it computes on a thread of its own: handing an
operation over and waiting for it costs 10 to 100 us, which on a canvas of a few thousand numbers is most of the time. So
large matrix products stay mlx's, and the rest is done by numpy, on the calling thread and in mlx's own memory:
`np.array(a, copy=False)` of an evaluated array is a view of it (mlx documentation, "Conversion to NumPy and Other
Frameworks").

Everything here evaluates, so nothing here can be traced by mx.compile or mx.grad.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from . import backend, plain
from .matrices import ExpertStack, Packed
from .plain import Angles

THREADS = backend.cores()
STRIP = 1 << 15  # numbers of a strip that stays in a core's cache through several passes (128 KiB)
SMALL = 1 << 23  # multiplications of a matrix product that numpy does faster than mlx's thread would be woken
PIECE = 1 << 24  # attention scores held at once (64 MiB); longer queries go piece by piece
RUN = 64  # tokens of a vocabulary that are added up together, for a draw
GELU = np.float32(0.7978845608028654)

_pool = ThreadPoolExecutor(max(1, THREADS - 1), thread_name_prefix="dgemma-cpu")


def _of_float32(function: Callable) -> Callable:
    """`function` for float32, the plain formulation of the same name for anything else: numpy knows no bfloat16."""
    other = getattr(plain, function.__name__)

    @functools.wraps(function)
    def chosen(x: mx.array, *arguments, **named) -> mx.array:
        return (function if x.dtype == mx.float32 else other)(x, *arguments, **named)

    return chosen


def _view(x: mx.array) -> np.ndarray:
    """mlx's own memory as a numpy array, evaluated first if need be.

    Writes reach the array, so write only to results that nobody else reads.
    """
    return np.array(x, copy=False)


def _in_strips(function, *arrays: np.ndarray) -> None:
    """function(*strips) over strips of rows of every array, on all cores; the arrays share their first axis."""
    rows, width = len(arrays[0]), max(1, arrays[0].size // max(1, len(arrays[0])))
    if arrays[0].size <= STRIP:
        function(*arrays)
        return
    strip = max(1, STRIP // width)

    def work(begin: int, end: int) -> None:
        for i in range(begin, end, strip):
            function(*(a[i : min(i + strip, end)] for a in arrays))

    cuts = [rows * i // THREADS for i in range(THREADS + 1)]
    others = [_pool.submit(work, *cut) for cut in zip(cuts[1:], cuts[2:])]
    work(cuts[0], cuts[1])
    for other in others:
        other.result()


@_of_float32
def linear(x: mx.array, layer: nn.Module) -> mx.array:
    """As plain.linear; a packed matrix is unpacked on the way: mlx multiplies packed ones at 3 GFLOP/s here."""
    if isinstance(layer, Packed):
        return scores(x, layer)
    if type(layer) is not nn.Linear or x.size * layer["weight"].shape[0] > SMALL:
        return layer(x)
    return mx.array(_view(x) @ _view(layer["weight"]).T)


@_of_float32
def scores(x: mx.array, table: nn.Module) -> mx.array:
    """As plain.scores."""
    if not isinstance(table, Packed):
        return table.scores(x)
    parts = []
    for _, rows in table.pieces(x.dtype):
        parts.append(x @ rows.T)
        mx.eval(parts[-1])  # or all pieces would lie unpacked before the first is multiplied
    return mx.concatenate(parts, axis=-1)


@_of_float32
def mix(shares: mx.array, table: nn.Module) -> mx.array:
    """As plain.mix."""
    if not isinstance(table, Packed):
        return table.mix(shares)
    out = 0
    for where, rows in table.pieces(shares.dtype):
        out = out + shares[..., where] @ rows
        mx.eval(out)  # as above
    return out


@_of_float32
def rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """As plain.rms_norm."""
    return mx.array(_normed(_view(x), weight, eps))


def _normed(x: np.ndarray, weight: mx.array | None, eps: float) -> np.ndarray:
    scale = np.einsum("...i,...i->...", x, x)
    scale /= x.shape[-1]
    scale += eps
    np.sqrt(scale, out=scale)
    out = x / scale[..., None]
    if weight is not None:
        out *= _view(weight)
    return out


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
    turned = (_rotated(_normed(_view(x), w, eps), angles) for x, w in ((queries, query_weight), (keys, key_weight)))
    return (*turned, mx.array(_normed(_view(values), None, eps)))


def _rotated(x: np.ndarray, angles: Angles) -> mx.array:
    (cos, sin), half = (_view(a) for a in angles), x.shape[-1] // 2
    out = x * cos
    out[..., :half] += x[..., half:] * sin[..., :half]
    out[..., half:] += x[..., :half] * sin[..., half:]
    return mx.array(out)


@_of_float32
def add_normed(x: mx.array, branch: mx.array, weight: mx.array, eps: float) -> mx.array:
    """As plain.add_normed."""
    mx.eval(x, branch)
    out = _normed(_view(branch), weight, eps)
    out += _view(x)
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
    summed = _normed(_view(dense), weights[0], eps)
    summed += _normed(_view(sparse), weights[1], eps)
    out = _normed(summed, weights[2], eps)
    out += _view(x)
    out *= _view(scalar)
    return mx.array(out)


@_of_float32
def attention(queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: mx.array | None) -> mx.array:
    """As plain.attention; long queries go piece by piece, so that the scores stay within 64 MiB."""
    piece = max(1, PIECE // (queries.shape[0] * queries.shape[1] * keys.shape[2]))
    return plain.in_pieces(lambda part, seen: _attend(part, keys, values, scale, seen), queries, mask, piece)


def _attend(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | None) -> mx.array:
    batch, heads, length, width = queries.shape
    groups, stored = keys.shape[1], keys.shape[2]
    small = queries.size * stored <= SMALL
    # The products are numpy's or mlx's; `scores` is of that kind, `view` shows its numbers.
    q, k, v = (_view(x) for x in (queries, keys, values)) if small else (queries, keys, values)
    q = q if scale == 1.0 else q * scale
    scores = q.reshape(batch, groups, -1, width) @ k.swapaxes(2, 3)  # [B, K, H/K L, T]
    view = (scores if small else _view(scores)).reshape(batch, groups, -1, length, stored)  # [B, K, H/K, L, T]
    if mask is not None:
        np.copyto(view, np.float32(-np.inf), where=~_view(mask)[:, :, None])
    sums = np.empty((*view.shape[:-1], 1), np.float32)
    _in_strips(_exponentials, view.reshape(-1, stored), sums.reshape(-1, 1))
    sums = sums.reshape(batch, groups, -1, 1)
    # Dividing after the product touches E numbers a row instead of T.
    out = mx.array((scores @ v) / sums) if small else (scores @ v) / mx.array(sums)
    return out.reshape(batch, heads, length, width)


def _exponentials(scores: np.ndarray, sums: np.ndarray) -> None:
    scores -= scores.max(axis=1, keepdims=True)
    np.exp(scores, out=scores)
    np.sum(scores, axis=1, keepdims=True, out=sums)


@_of_float32
def geglu(gate: mx.array, up: mx.array) -> mx.array:
    """As plain.geglu."""
    mx.eval(gate, up)
    a, b = (np.array(x, copy=False).reshape(-1, x.shape[-1]) for x in (gate, up))
    out = np.empty(a.shape, np.float32)
    _in_strips(_geglu, a, b, out)
    return mx.array(out.reshape(gate.shape))


def _geglu(gate: np.ndarray, up: np.ndarray, out: np.ndarray) -> None:
    np.multiply(gate, gate, out=out)
    out *= np.float32(0.044715) * GELU
    out += GELU
    out *= gate
    np.tanh(out, out=out)
    out += np.float32(1)
    out *= gate
    out *= up
    out *= np.float32(0.5)


@_of_float32
def softcap(logits: mx.array, cap: float) -> mx.array:
    """As plain.softcap."""
    out = np.multiply(_view(logits), np.float32(1 / cap), order="C")  # rows in a row, for the strips
    rows = out.reshape(-1, out.shape[-1])
    _in_strips(lambda part: np.tanh(part, out=part), rows)
    out *= np.float32(cap)
    return mx.array(out)


@_of_float32
def softmax(logits: mx.array) -> mx.array:
    """As plain.softmax."""
    out = np.array(logits, order="C")  # a copy, rows in a row: the caller keeps the logits
    rows = out.reshape(-1, out.shape[-1])
    sums = np.empty((len(rows), 1), np.float32)
    _in_strips(_exponentials, rows, sums)
    rows /= sums
    return mx.array(out)


@_of_float32
def believe(
    scores: mx.array, cap: float, t: float, uniforms: mx.array
) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array]:
    """As plain.believe, some rows at a time, which stay in a core's cache from the scores to the probabilities."""
    mx.eval(scores, uniforms)
    raw, numbers = _view(scores), _view(uniforms)
    best, drawn = np.empty((2, len(raw)), np.int32)
    entropy, confidence = np.empty((2, len(raw)), np.float32)
    probabilities = np.empty(raw.shape, np.float32)
    _in_strips(functools.partial(_believe, cap, t), raw, numbers, best, entropy, confidence, drawn, probabilities)
    return tuple(mx.array(found) for found in (best, entropy, confidence, drawn, probabilities))


def _believe(cap, t, raw, uniforms, best, entropy, confidence, drawn, out) -> None:
    """One strip of rows `[r, V]`: reads `raw` and `uniforms`, writes the others."""
    below = raw * np.float32(1 / cap)
    np.tanh(below, out=below)
    below *= np.float32(cap / t)
    best[:] = below.argmax(axis=1)
    below -= np.take_along_axis(below, best[:, None], axis=1)  # how far each logit is below the best
    np.exp(below, out=out)
    cumulative = _run_sums(out).cumsum(axis=1, dtype=np.float64)
    total = cumulative[:, -1:]
    weighted = np.matmul(below[:, None, :], out[:, :, None])[:, 0, 0]
    entropy[:] = np.maximum(np.log(total[:, 0]) - weighted / total[:, 0], 0)
    confidence[:] = 1 / total[:, 0]
    drawn[:] = _drawn(out, cumulative, uniforms[:, None] * total)
    out *= (1 / total).astype(np.float32)


def _run_sums(odds: np.ndarray) -> np.ndarray:
    """The sum of every RUN neighbours of `odds [r, V]`, of the rest at the end too: `[r, V / RUN]`."""
    runs = odds.shape[1] // RUN
    whole = np.einsum("rnk->rn", odds[:, : runs * RUN].reshape(len(odds), runs, RUN))  # reduceat takes twice as long
    rest = odds[:, runs * RUN :]
    return np.concatenate([whole, rest.sum(axis=1, keepdims=True)], axis=1) if rest.size else whole


def _drawn(odds: np.ndarray, cumulative: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The first token of each row of `odds [r, V]` at which their running sum passes `target [r, 1]`: int `[r]`.

    `cumulative [r, V / RUN]` is that sum after every RUN tokens, so that only the run of the target has to be added up.
    """
    run = np.minimum((cumulative <= target).sum(axis=1, keepdims=True), cumulative.shape[1] - 1)
    places = np.minimum(run * RUN + np.arange(RUN), odds.shape[1] - 1)  # [r, RUN]
    within = np.take_along_axis(odds, places, axis=1).cumsum(axis=1, dtype=np.float64)
    within += np.where(run > 0, np.take_along_axis(cumulative, np.maximum(run - 1, 0), axis=1), 0)
    # A run adds up to something else than `sums` by a rounding: the last token that adds anything is its end.
    chosen = np.minimum((within <= target).sum(axis=1), (within < within[:, -1:]).sum(axis=1))
    return np.take_along_axis(places, chosen[:, None], axis=1)[:, 0]


@_of_float32
def route(scores: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """As plain.route."""
    found = _view(scores)
    chosen = np.argpartition(-found, k - 1, axis=-1)[:, :k]
    shares = np.take_along_axis(found, chosen, axis=-1)
    _exponentials(shares, sums := np.empty((len(shares), 1), np.float32))
    shares /= sums
    return mx.array(chosen), mx.array(shares)


@_of_float32
def experts(rows: mx.array, chosen: mx.array, weights: mx.array, gate_up: nn.Module, down: nn.Module) -> mx.array:
    """As plain.experts, one expert after the other on the rows that chose it: mlx's gather_mm is slow here."""
    count, k = chosen.shape
    mx.eval(rows, chosen, weights)
    picked = np.array(chosen).reshape(-1)  # [T k]
    order = np.argsort(picked, kind="stable")  # pairs of row and expert, expert after expert
    ends = np.cumsum(np.bincount(picked, minlength=gate_up.weight.shape[0]))
    x = np.array(rows, copy=False)[order // k]  # [T k, D]
    hidden = _by_expert(x, ends, gate_up)  # [T k, 2 I]
    gate, up = np.split(hidden, 2, axis=-1)
    inner = np.empty(gate.shape, np.float32)
    _in_strips(_geglu, gate, up, inner)
    out = np.empty((count * k, rows.shape[1]), np.float32)
    out[order] = _by_expert(inner, ends, down)
    return mx.array(np.einsum("tkd,tk->td", out.reshape(count, k, -1), np.array(weights, copy=False)))


def _by_expert(x: np.ndarray, ends: np.ndarray, stack: nn.Module) -> np.ndarray:
    """x `[R, I]`, sorted by expert and ending where `ends [X]` says, times each expert's matrix `[O, I]`: `[R, O]`."""
    whole = _view(stack.weight) if isinstance(stack, ExpertStack) else None
    out, begin = np.empty((len(x), stack.weight.shape[1]), np.float32), 0
    for expert, end in enumerate(ends.tolist()):
        if end > begin:
            matrix = _view(stack.unpacked(expert, mx.float32)) if whole is None else whole[expert]
            np.matmul(x[begin:end], matrix.T, out=out[begin:end])
        begin = end
    return out
