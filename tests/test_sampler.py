"""The sampler's rules against their definitions in float64."""

import mlx.core as mx
import numpy as np
import pytest

import dgemma  # noqa: F401
from dgemma import sampler
from dgemma.errors import OptionError


def test_temperature_falls_on_a_line():
    assert sampler.temperature(48, 48, 0.4, 0.8) == pytest.approx(0.8)
    assert sampler.temperature(24, 48, 0.4, 0.8) == pytest.approx(0.6)
    assert sampler.temperature(1, 48, 0.4, 0.8) == pytest.approx(0.4 + 0.4 / 48)


def entropies(values):
    zeros = mx.zeros((1, len(values)))
    return sampler.Statistics(zeros, mx.array([values]), zeros)


def test_entropy_bound_accepts_while_the_others_stay_within_it():
    # sorted: 0.01 0.04 0.06 0.3; sums of those before: 0, 0.01, 0.05, 0.11
    accepted = np.array(sampler.EntropyBound(0.1).accept(entropies([0.3, 0.01, 0.06, 0.04])))
    np.testing.assert_array_equal(accepted, [[False, True, True, True]])
    assert np.array(sampler.EntropyBound(0.001).accept(entropies([2.0, 3.0, 1.0]))).tolist() == [[False, False, True]]


def test_entropy_bound_against_brute_force():
    entropy = np.abs(np.random.RandomState(1).randn(5, 12)).astype(np.float32) * 0.05
    seen = sampler.Statistics(None, mx.array(entropy), None)
    accepted = np.array(sampler.EntropyBound(0.1).accept(seen))
    for row, got in zip(entropy, accepted):
        order = np.argsort(row)
        want = np.zeros(len(row), bool)
        for rank, i in enumerate(order):
            want[i] = row[order[:rank]].sum() <= 0.1
        np.testing.assert_array_equal(got, want)


def confidences(values):
    return sampler.Statistics(None, None, mx.array(values))


def accepted_by(threshold, values):
    return np.array(sampler.ConfidenceThreshold(threshold).accept(confidences(values)))


def test_confidence_threshold_accepts_the_surest_below_it_too():
    some_above, none_above = [0.2, 0.95, 0.9, 0.1], [0.2, 0.3, 0.1, 0.25]
    np.testing.assert_array_equal(
        accepted_by(0.9, [some_above, none_above]), [[True, True, True, False], [False, True, False, False]]
    )


def test_confidence_threshold_moves_a_canvas_that_has_settled_in_part():
    # The surest of all has settled already: accepting it again, and nothing else, leaves the others noise for ever.
    assert accepted_by(0.9, [[0.999, 0.3, 0.5, 0.2]]).tolist() == [[True, False, True, False]]


@pytest.mark.parametrize("threshold", [0.05, 0.5, 0.9, 1.0])
def test_confidence_threshold_accepts_all_above_and_one_below(threshold):
    confidence = np.random.RandomState(2).rand(40, 12).astype(np.float32)
    confidence[0], confidence[1, 5] = 1.0, 1.0
    for row, got in zip(confidence, accepted_by(threshold, confidence)):
        above = row >= np.float32(threshold)
        assert got[above].all()
        assert (got & ~above).sum() == (not above.all())
        if not above.all():
            assert row[got & ~above] == row[~above].max()


def test_confidence_threshold_takes_the_first_of_equals():
    assert accepted_by(0.9, [[0.4, 0.5, 0.5, 0.5]]).tolist() == [[False, True, False, False]]
    assert accepted_by(0.9, [[1.0, 0.0, 0.0, 0.9]]).tolist() == [[True, True, False, True]]
    assert accepted_by(0.9, [[0.9, 0.9, 1.0]]).tolist() == [[True, True, True]]


@pytest.mark.parametrize("rule", [sampler.EntropyBound(0.1), sampler.ConfidenceThreshold(0.9)])
def test_rows_are_accepted_independently(rule):
    sure = np.random.RandomState(3).rand(6, 12).astype(np.float32) ** 0.1
    entropy = (1 - sure) * 0.3
    together = np.array(rule.accept(sampler.Statistics(None, mx.array(entropy), mx.array(sure))))
    alone = [rule.accept(sampler.Statistics(None, mx.array(e[None]), mx.array(c[None]))) for e, c in zip(entropy, sure)]
    np.testing.assert_array_equal(together, np.concatenate([np.array(one) for one in alone]))
    assert 0 < together.sum() < together.size


def test_noise_covers_the_vocabulary_and_nothing_else():
    tokens = np.array(sampler.noise(mx.array([[0.0, 0.5, 0.99999994, 1.0]]), 10))
    np.testing.assert_array_equal(tokens, [[0, 5, 9, 9]])


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_bounds_are_checked(bad):
    with pytest.raises(OptionError, match=f"the entropy bound is {bad}; a finite number above 0 is needed"):
        sampler.EntropyBound(bad)
    with pytest.raises(OptionError, match=f"the confidence threshold is {bad}; a number in"):
        sampler.ConfidenceThreshold(bad)
