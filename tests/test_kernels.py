"""Fast equals plain: the CPU's formulations compute what mlx's own operations compute."""

import os
import subprocess
import sys

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import dgemma  # noqa: F401
from dgemma import cpu, flash, plain
from dgemma.attention import Rotary
from dgemma.config import Rope
from dgemma.matrices import ExpertStack


def random(*shape, scale=1.0, seed=0):
    return mx.array((np.random.RandomState(seed).randn(*shape) * scale).astype(np.float32))


def same(ours, theirs, tolerance=1e-5):
    theirs = np.array(theirs)
    np.testing.assert_allclose(np.array(ours), theirs, atol=tolerance * max(1.0, np.abs(theirs).max()))


def test_linear():
    layer = nn.Linear(24, 40, bias=False)
    x = random(2, 5, 24)
    want = np.einsum("bld,od->blo", np.array(x, np.float64), np.array(layer.weight, np.float64))
    same(cpu.linear(x, layer), want)
    same(plain.linear(x, layer), want)
    packed = nn.QuantizedLinear.from_linear(nn.Linear(64, 40, bias=False), group_size=32)
    same(cpu.linear(random(3, 64), packed), packed(random(3, 64)))


@pytest.mark.parametrize("shape", [(3, 8), (1, 4, 5, 48), (2, 700, 192)])
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm(shape, weighted):
    x, weight = random(*shape, scale=3.0), random(shape[-1], seed=1) if weighted else None
    same(cpu.rms_norm(x, weight, 1e-6), plain.rms_norm(x, weight, 1e-6))


def test_rms_norm_of_zeros_is_zero():
    assert not np.array(cpu.rms_norm(mx.zeros((2, 8)), None, 1e-6)).any()


@pytest.mark.parametrize("fraction, kind", [(1.0, "default"), (0.25, "proportional")])
@pytest.mark.parametrize("shared", [False, True])
def test_heads(fraction, kind, shared):
    angles = Rotary(Rope(theta=1e4, fraction=fraction, kind=kind), 32).angles(mx.arange(7)[None] + 100)
    as_projected = lambda heads, seed: random(2, 7, heads, 32, seed=seed).swapaxes(1, 2)  # a transposed view
    queries, keys = as_projected(4, 0), as_projected(2, 1)
    values = keys if shared else as_projected(2, 2)
    weights = random(32, seed=3), random(32, seed=4)
    found = [module.heads(queries, keys, values, *weights, 1e-6, angles) for module in (cpu, plain)]
    for ours, theirs in zip(*found):
        same(ours, theirs)


def test_rotate_halves_of_a_head():
    x, angles = random(2, 70, 4, 2, 24), tuple(random(70, 1, 2, 24, seed=seed) for seed in (1, 2))
    same(*(module.rotate(x, angles) for module in (cpu, plain)))


def test_residuals():
    x, dense, sparse = (random(2, 5, 24, seed=seed, scale=2.0) for seed in range(3))
    weights, scalar = tuple(random(24, seed=seed) for seed in range(3, 6)), mx.array([0.8])
    kept = np.array(x)
    same(*(module.add_normed(x, dense, weights[0], 1e-6) for module in (cpu, plain)))
    same(*(module.merge(x, dense, sparse, weights, 1e-6, scalar) for module in (cpu, plain)))
    np.testing.assert_array_equal(np.array(x), kept, err_msg="the input is left alone")


@pytest.mark.parametrize("number, k", [(4, 1), (8, 2), (128, 8), (8, 8)])
def test_route(number, k):
    scores = random(30, number, scale=2.0)
    for chosen, shares in (module.route(scores, k) for module in (cpu, plain)):
        p = np.exp(np.array(scores, np.float64))
        best = np.argsort(-p, axis=-1)[:, :k]
        order = np.argsort(-np.array(shares), axis=-1)
        np.testing.assert_array_equal(np.take_along_axis(np.array(chosen), order, -1), best)
        top = np.take_along_axis(p, best, -1)
        np.testing.assert_allclose(np.sort(np.array(shares))[:, ::-1], top / top.sum(-1, keepdims=True), atol=1e-6)


@pytest.mark.parametrize("heads, groups", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("length, stored", [(1, 1), (5, 9), (300, 700)])
@pytest.mark.parametrize("masked", [None, "shared", "per row"])
@pytest.mark.parametrize("size", [1.0, 30.0], ids=["bounded", "any size"])
def test_attention(heads, groups, length, stored, masked, size, monkeypatch):
    monkeypatch.setattr(flash, "ALONE", 1 << 12)  # the largest case has several strips, on all cores
    queries = random(2, heads, length, 16, scale=size)
    keys, values = random(2, groups, stored, 16, seed=1), random(2, groups, stored, 16, seed=2)
    mask = None
    if masked:
        seen = np.random.RandomState(3).rand(1 if masked == "shared" else 2, 1, length, stored) < 0.6
        seen[..., 0] = True
        mask = mx.array(seen)
    same(*(module.attention(queries, keys, values, scale=0.5, mask=mask) for module in (cpu, plain)))


@pytest.mark.parametrize("rows", [1, 33, 2000])
def test_geglu(rows):
    gate, up = random(rows, 64, scale=4.0), random(rows, 64, seed=1)
    kept = np.array(gate)
    same(cpu.geglu(gate, up), plain.geglu(gate, up))
    np.testing.assert_array_equal(np.array(gate), kept, err_msg="the input is left alone")


def test_softcap_and_softmax_of_a_transposed_view():
    logits = random(3, 40, 50, scale=40.0).swapaxes(0, 1)
    same(cpu.softcap(logits, 30.0), plain.softcap(logits, 30.0))
    same(cpu.softmax(logits), plain.softmax(logits))


def test_softcap_and_softmax():
    logits = random(2, 5, 400, scale=40.0)
    kept = np.array(logits)
    same(cpu.softcap(logits, 30.0), plain.softcap(logits, 30.0))
    same(cpu.softmax(logits), plain.softmax(logits))
    np.testing.assert_array_equal(np.array(logits), kept, err_msg="the input is left alone")


# -- believe ----------------------------------------------------------------------------------------------------------

BELIEVERS = pytest.mark.parametrize("module", [cpu, plain], ids=["cpu", "plain"])
WIDTHS = pytest.mark.parametrize("rows, width", [(14, 50), (1, 64), (5, 129), (40, 3000)])  # narrower than a run, and more


def believed(scores, cap, t, uniforms):
    """The definitions, in float64."""
    logits = np.tanh(np.array(scores, np.float64) / cap) * cap / t
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    entropy = -(p * np.log(p, where=p > 0, out=np.zeros_like(p))).sum(axis=-1)
    drawn = (p.cumsum(axis=-1) <= np.array(uniforms, np.float64)[:, None]).sum(axis=-1)
    return logits.argmax(axis=-1), entropy, p.max(axis=-1), drawn, p


@BELIEVERS
@WIDTHS
@pytest.mark.parametrize("t", [0.4, 1.0])
def test_believe_against_definitions(module, rows, width, t):
    scores = random(rows, width, scale=6.0)
    uniforms = mx.array(((np.arange(rows) + 0.37) / rows).astype(np.float32))
    kept, want = np.array(scores), believed(scores, 30.0, t, uniforms)
    best, entropy, confidence, drawn, probabilities = (np.array(one) for one in module.believe(scores, 30.0, t, uniforms))
    np.testing.assert_array_equal(best, want[0])
    np.testing.assert_array_equal(drawn, want[3])
    for found, right in ((entropy, want[1]), (confidence, want[2]), (probabilities, want[4])):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, right, atol=5e-6 if module is cpu else 2e-4)  # mlx sums 3,000 logits in a row
    np.testing.assert_array_equal(np.array(scores), kept, err_msg="the input is left alone")


@BELIEVERS
def test_entropy_of_certainty_is_zero_not_negative_nor_nan(module):
    scores = np.full((2, 90), -300.0, np.float32)
    scores[:, 4] = 300.0
    best, entropy, confidence, drawn, _ = (np.array(one) for one in module.believe(mx.array(scores), 30.0, 0.4, mx.array([0.0, 1.0])))
    assert (entropy >= 0).all() and (entropy < 1e-6).all() and (confidence == 1).all()
    assert best.tolist() == [4, 4] and drawn[0] == 4


@BELIEVERS
@pytest.mark.parametrize("before", [0, 62, 200], ids=["in the first run", "across two runs", "in the last run"])
def test_a_draw_is_the_inverse_of_the_distribution_function(module, before):
    shares = np.zeros(before + 5)
    shares[before : before + 4] = [0.25, 0.0, 0.5, 0.25]
    scores = np.log(np.maximum(shares, 1e-30)).astype(np.float32)
    for u, token in [(0.001, 0), (0.2, 0), (0.2501, 2), (0.5, 2), (0.7499, 2), (0.7501, 3), (0.9999999, 3)]:
        drawn = module.believe(mx.array(scores)[None], 1e4, 1.0, mx.array([u]))[3]
        assert drawn.item() == before + token, u


@BELIEVERS
def test_draws_follow_the_probabilities(module):
    scores = mx.broadcast_to(mx.log(mx.array([0.1, 0.2, 0.3, 0.4])), (20000, 4))
    drawn = np.array(module.believe(scores, 1e4, 1.0, mx.random.uniform(shape=(20000,), key=mx.random.key(0)))[3])
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / 20000, [0.1, 0.2, 0.3, 0.4], atol=0.015)


@BELIEVERS
def test_beliefs_in_bfloat16_are_told_in_float32(module):
    scores, uniforms = random(3, 70, scale=4.0).astype(mx.bfloat16), mx.array([0.1, 0.5, 0.9])
    *seen, probabilities = module.believe(scores, 30.0, 0.6, uniforms)
    want = believed(np.array(scores.astype(mx.float32)), 30.0, 0.6, uniforms)
    assert probabilities.dtype == mx.bfloat16 and seen[1].dtype == seen[2].dtype == mx.float32
    for found, right in zip(seen, want):
        np.testing.assert_allclose(np.array(found), right, atol=5e-5)


def stack(matrices):
    made = ExpertStack(*matrices.shape)
    made.weight = matrices
    return made


@pytest.mark.parametrize("count, k", [(1, 1), (1, 2), (40, 2), (40, 6)])
@pytest.mark.parametrize("favourites", [False, True])
def test_experts(count, k, favourites):
    rng, number = np.random.RandomState(count + k), 6
    rows, gate_up, down = random(count, 16), random(number, 24, 16, seed=1), random(number, 16, 12, seed=2)
    odds = np.array([8, 8, 8, 8, 8, 8.0]) if not favourites else np.array([90, 90, 90, 90, 1, 1.0])
    draw = lambda: rng.choice(number, size=k, replace=False, p=odds / odds.sum())
    chosen, weights = mx.array(np.stack([draw() for _ in range(count)])), mx.array(rng.rand(count, k).astype(np.float32))
    want = np.zeros((count, 16))
    for t in range(count):
        for expert, weight in zip(np.array(chosen)[t], np.array(weights)[t]):
            gate, up = np.split(np.array(gate_up)[expert] @ np.array(rows)[t], 2)
            inner = 0.5 * gate * (1 + np.tanh(0.7978845608 * (gate + 0.044715 * gate**3))) * up
            want[t] += weight * (np.array(down)[expert] @ inner)
    stacks = stack(gate_up), stack(down)
    same(plain.experts(rows, chosen, weights, *stacks), want)
    same(cpu.experts(rows, chosen, weights, *stacks), want)


def test_other_dtypes_get_the_plain_formulation():
    x = random(3, 8).astype(mx.bfloat16)
    out = cpu.rms_norm(x, None, 1e-6)
    assert out.dtype == mx.bfloat16 and mx.array_equal(out, plain.rms_norm(x, None, 1e-6))


def test_the_choice_can_be_overridden():
    def chosen(value):
        code = "import dgemma; from dgemma import kernels; print(kernels.name)"
        return subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"DGEMMA_KERNELS": value}, capture_output=True, text=True
        )

    assert chosen("plain").stdout == "plain\n"
    assert "DGEMMA_KERNELS=fast: allowed are plain, cpu" in chosen("fast").stderr
