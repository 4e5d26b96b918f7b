"""When a block, and when an answer, is finished."""

import numpy as np
import pytest

import dgemma  # noqa: F401
from dgemma.errors import OptionError
from dgemma.stopping import StableAndConfident, StepsOnly, cut

A, B = np.array([[1, 2], [3, 4]]), np.array([[1, 2], [3, 9]])
SURE, UNSURE = np.full((2, 2), 0.001), np.array([[0.001, 0.001], [0.001, 0.01]])


def test_a_row_settles_when_it_is_stable_and_confident():
    rule = StableAndConfident(1, 0.005)
    assert rule.settled([A], SURE).tolist() == [False, False], "nothing to compare with yet"
    assert rule.settled([A, A], SURE).tolist() == [True, True]
    assert rule.settled([A, B], SURE).tolist() == [True, False], "the second row changed"
    assert rule.settled([A, A], UNSURE).tolist() == [True, False], "the second row's mean entropy is 0.0055"


def test_the_bound_itself_is_not_confident():
    assert StableAndConfident(1, 0.001).settled([A, A], SURE).tolist() == [False, False]


def test_more_stability_compares_more_canvases():
    rule = StableAndConfident(2, 0.005)
    assert rule.settled([A, A], SURE).tolist() == [False, False]
    assert rule.settled([B, A, A], SURE).tolist() == [True, False]
    assert StableAndConfident(0, 0.005).settled([B], SURE).tolist() == [True, True], "confidence alone"


def test_steps_only_never_settles():
    assert StepsOnly().settled([A, A], SURE).tolist() == [False, False]


@pytest.mark.parametrize(
    "tokens, room, kept, reason",
    [
        ([5, 6, 1, 7], 10, [5, 6], "stop"),
        ([1, 6, 7], 10, [], "stop"),
        ([5, 6, 7, 8], 10, [5, 6, 7, 8], None),
        ([5, 6, 7, 8], 4, [5, 6, 7, 8], "length"),
        ([5, 6, 7, 1], 3, [5, 6, 7], "length"),
        ([5, 6, 1, 8], 3, [5, 6], "stop"),
    ],
)
def test_cut(tokens, room, kept, reason):
    assert cut(tokens, (1, 106), room) == (kept, reason)


def test_bounds_are_checked():
    with pytest.raises(OptionError, match="stability is -1; a whole number of at least 0 is needed"):
        StableAndConfident(-1)
    with pytest.raises(OptionError, match="confidence is nan; a finite number above 0 is needed"):
        StableAndConfident(1, float("nan"))
