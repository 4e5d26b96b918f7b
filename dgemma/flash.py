"""Attention in numpy that never holds all scores: the inside of dgemma.cpu.attention.

A strip of queries meets all its keys; its scores stay in a core's cache between the two products, in the manner of Dao et
al. 2022, "FlashAttention" (arXiv:2205.14135). Letters: B batch, H query heads, K key/value heads, G = H / K, L positions, T
keys, E head width.
"""

from __future__ import annotations

import numpy as np

from .strips import THREADS, in_turns

ROWS = (32, 128)  # queries of a strip: OpenBLAS does a product of fewer at half its speed; of more, the scores leave the cache
SCORES = 1 << 18  # scores of a strip of more than the fewest queries
ALONE = 1 << 17  # scores of a call that one thread is done with before another would wake
BOUND = 60.0  # exp(60) times the largest value, summed over any number of keys, is far from float32's end; so is exp(-60)


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, mask: np.ndarray | None) -> np.ndarray:
    """Softmax attention of `q [B, H, L, E]` to `k` and `v [B, K, T, E]`; `mask [B or 1, 1, L, T]`, True where one may look.

    Returns `[B, L, H, E]`, as the projection that follows reads it.
    """
    (batch, heads, length, width), (_, groups, stored, _) = q.shape, k.shape
    shared = heads // groups
    q = (q if scale == 1.0 else q * np.float32(scale)).reshape(batch, groups, shared, length, width)
    out = np.empty((batch, length, heads, width), np.float32)
    outs = out.reshape(batch, length, groups, shared, width).transpose(0, 2, 3, 1, 4)  # [B, K, G, L, E]
    strip = max(1, min(ROWS[1], max(ROWS[0], SCORES // stored)) // shared)
    bounded = stored > 4 * width and _bounded(q, k)

    def work(task: tuple[int, int]) -> None:
        row, begin = task
        here = slice(begin, begin + strip)
        seen, bias = slice(None), None
        if mask is not None:
            seen, bias = _bias(mask[row % len(mask), 0, here])
        for group in range(groups):
            found = _strip(q[row, group, :, here], k[row, group, seen], v[row, group, seen], bias, bounded)
            outs[row, group, :, here] = found

    tasks = [(row, begin) for row in range(batch) for begin in range(0, length, strip)]
    in_turns(work, tasks, alone=batch * heads * length * stored <= ALONE)
    return out


def held(keys: int) -> int:
    """Scores that a call holds at once, for strips of queries to so many `keys`: at most."""
    return THREADS * max(ROWS[0] * keys, SCORES)


def _bounded(q: np.ndarray, k: np.ndarray) -> bool:
    """Whether no score is beyond BOUND (Cauchy and Schwarz): exponentials then need no peak taken off first."""
    squares = [np.einsum("...e,...e->...", x, x).max() for x in (q, k)]
    return bool(squares[0] * squares[1] <= BOUND**2)


def _bias(mask: np.ndarray) -> tuple[slice, np.ndarray | None]:
    """Which keys a strip's `mask [l, T]` looks at at all, and 0 or -inf for each of them `[l, t]`; None if it sees them all."""
    columns = np.flatnonzero(mask.any(axis=0))
    seen = slice(columns[0], columns[-1] + 1) if len(columns) else slice(None)
    mask = mask[:, seen]
    return seen, None if mask.all() else np.where(mask, np.float32(0), np.float32(-np.inf))


def _strip(q: np.ndarray, k: np.ndarray, v: np.ndarray, bias: np.ndarray | None, bounded: bool) -> np.ndarray:
    """Queries `[G, l, E]` to keys and values `[t, E]`: `[G, l, E]`."""
    shape = q.shape
    scores = q.reshape(-1, shape[-1]) @ k.T  # [G l, t]
    if bias is not None:
        by_head = scores.reshape(*shape[:2], -1)
        by_head += bias
    if not bounded:
        scores -= scores.max(axis=1, keepdims=True)
    np.exp(scores, out=scores)
    sums = scores.sum(axis=1, keepdims=True)
    out = scores @ v
    out /= sums  # E numbers a row instead of t
    return out.reshape(shape)
