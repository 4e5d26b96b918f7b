"""What a strip of the head's scores says, in numpy: the inside of dgemma.cpu.believe.

A strip `[r, V]` stays in a core's cache from its scores to its probabilities.
"""

from __future__ import annotations

import numpy as np

RUN = 64  # tokens of a vocabulary that are added up together, for a draw


def believe(
    cap: float,
    t: float,
    raw: np.ndarray,
    uniforms: np.ndarray,
    best: np.ndarray,
    entropy: np.ndarray,
    confidence: np.ndarray,
    drawn: np.ndarray,
    out: np.ndarray,
) -> None:
    """One strip of rows: reads `raw [r, V]` and `uniforms [r]`, writes the others; letters and meanings as plain.believe's."""
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
