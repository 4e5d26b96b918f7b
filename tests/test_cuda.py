"""The kernels of dgemma/cu against plain formulations in float32, on NVIDIA GPUs; where there is none, what does not need one.

    pytest tests/test_cuda.py
"""

import mlx.core as mx
import numpy as np
import pytest

import dgemma  # noqa: F401
from dgemma import convert, cuda, geometry, kernels, plain, weights
from dgemma.config import ModelConfig
from dgemma.formats import Format
from dgemma.matrices import ExpertStack, Packed, PackedEmbedding, PackedExpertStack, PackedLinear
from dgemma.model import DiffusionGemma

on_gpu = pytest.mark.skipif(not mx.cuda.is_available(), reason="these kernels run on NVIDIA GPUs")
WORST = 8e-3  # of the largest number: bfloat16 keeps 8 bits, and a few of them are rounded one after the other


def random(*shape, scale=1.0, seed=0, dtype=mx.bfloat16):
    return (mx.random.normal(shape, key=mx.random.key(seed)) * scale).astype(dtype)


def same(ours, theirs, tolerance=WORST):
    assert ours.shape == theirs.shape and ours.dtype == mx.bfloat16
    ours, theirs = (np.array(one.astype(mx.float32)) for one in (ours, theirs))
    np.testing.assert_allclose(ours, theirs, atol=tolerance * np.abs(theirs).max())


def wide(*arrays):
    return tuple(array.astype(mx.float32) for array in arrays)


def packed(kind, matrix, bits):
    """A module of `kind` that holds a matrix packed, and what it unpacks to."""
    made, format = kind(matrix.shape, Format.of(bits=bits)), Format.of(bits=bits)
    for name, part in format.pack(matrix).items():
        made[name] = part
    return made, made.unpacked(slice(None), mx.bfloat16)


def stack(matrices, bits):
    if bits is not None:
        return packed(PackedExpertStack, matrices, bits)
    made = ExpertStack(*matrices.shape)
    made.weight = matrices
    return made, matrices


def weighted_sum(rows, chosen, weights, gate_up, down):
    """Every expert on every row, in float32."""
    found = mx.zeros(rows.shape)
    for expert in range(len(gate_up)):
        gate, up = mx.split(rows @ gate_up[expert].T, 2, axis=-1)
        share = mx.where(chosen == expert, weights, 0).sum(axis=1, keepdims=True)
        found = found + share * ((plain.gelu(gate) * up) @ down[expert].T)
    return found


@on_gpu
@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("count", [1, 5, 40, 300, 1500])
@pytest.mark.parametrize("favourites", [False, True])
def test_experts(bits, count, favourites):
    hidden, inner, number, k = 512, 128, 8, 2
    gate_up, its = stack(random(number, 2 * inner, hidden, scale=hidden**-0.5), bits)
    down, other = stack(random(number, hidden, inner, scale=inner**-0.5, seed=1), bits)
    scores = random(count, number, seed=2, dtype=mx.float32) + (mx.arange(number) * favourites * 4)
    rows, (chosen, weights) = random(count, hidden, seed=3), plain.route(scores, k)
    same(cuda.experts(rows, chosen, weights, gate_up, down), weighted_sum(*wide(rows), chosen, weights, *wide(its, other)))


@on_gpu
@pytest.mark.parametrize("count, k, number, size", [(1, 1, 1, 16), (7, 3, 5, 32), (40, 2, 6, 16), (64, 8, 128, 16), (5000, 8, 128, 64)])
def test_tiles_hold_every_pair_once_and_one_expert_each(count, k, number, size):
    chosen = np.stack([np.random.RandomState(i).choice(number, size=k, replace=False) for i in range(count)]).astype(np.int32)
    source, owner, place = (np.array(one) for one in cuda._lay_out(mx.array(chosen), number, size))
    assert len(set(place.flatten().tolist())) == count * k and len(source) == len(owner) * size
    np.testing.assert_array_equal(source[place], np.repeat(np.arange(count), k).reshape(count, k))
    np.testing.assert_array_equal(owner[place // size], chosen)
    used = -(-np.bincount(chosen.flatten(), minlength=number) // size)
    np.testing.assert_array_equal(owner, np.repeat(np.arange(number + 1), [*used, len(owner) - used.sum()]))


@on_gpu
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows, inputs, outputs", [(1, 64, 8), (7, 2816, 2112), (300, 8192, 264), (1000, 128, 4096)])
def test_packed_projections(bits, rows, inputs, outputs):
    layer, matrix = packed(PackedLinear, random(outputs, inputs, scale=inputs**-0.5), bits)
    x = random(rows, inputs, seed=1)
    assert cuda._is_packed(layer, x)
    same(cuda.linear(x[None], layer)[0], wide(x)[0] @ wide(matrix)[0].T)


@on_gpu
def test_packed_tables():
    table, matrix = packed(PackedEmbedding, random(1000, 256), 4)
    x, shares = random(30, 256, seed=1), mx.softmax(random(30, 1000, seed=2, dtype=mx.float32), axis=-1).astype(mx.bfloat16)
    same(cuda.scores(x, table), wide(x)[0] @ wide(matrix)[0].T)
    same(cuda.mix(shares, table), wide(shares)[0] @ wide(matrix)[0])


@on_gpu
@pytest.mark.parametrize("experts, k", [(128, 8), (32, 4), (5, 5), (1, 1)])
def test_route(experts, k):
    scores = random(77, experts)
    ours, theirs = cuda.route(scores, k), plain.route(scores, k)
    np.testing.assert_array_equal(np.sort(np.array(ours[0]), axis=1), np.sort(np.array(theirs[0]), axis=1))
    np.testing.assert_allclose(np.sort(np.array(ours[1]), axis=1), np.sort(np.array(theirs[1]), axis=1), atol=1e-6)


@on_gpu
@pytest.mark.parametrize("width", [256, 2816])
def test_rows(width):
    x, dense, sparse = (random(2, 33, width, seed=i) for i in range(3))
    weights, scalar = [random(width, seed=3 + i) for i in range(3)], random(1, seed=7)
    same(cuda.add_normed(x, dense, weights[0], 1e-6), plain.add_normed(*wide(x, dense, weights[0]), 1e-6))
    want = plain.merge(*wide(x, dense, sparse), wide(*weights), 1e-6, *wide(scalar))
    same(cuda.merge(x, dense, sparse, tuple(weights), 1e-6, scalar), want)
    same(cuda.geglu(x, dense), plain.geglu(*wide(x, dense)))


@on_gpu
@pytest.mark.parametrize("width, keys", [(256, 8), (512, 2)])
@pytest.mark.parametrize("batch, shared", [(1, False), (2, False), (2, True)])
def test_heads(width, keys, batch, shared):
    as_projected = lambda heads, seed: random(batch, 37, heads, width, seed=seed).swapaxes(1, 2)
    queries, its = as_projected(16, 0), as_projected(keys, 1)
    values = its if shared else as_projected(keys, 2)
    turns = random(batch, 1, 37, width, seed=3, dtype=mx.float32)
    angles, weights = (mx.cos(turns), mx.sin(turns)), (random(width, seed=4), random(width, seed=5))
    found = cuda.heads(queries, its, values, *weights, 1e-6, angles)
    for ours, theirs in zip(found, plain.heads(*wide(queries, its, values, *weights), 1e-6, angles)):
        same(ours, theirs)


@on_gpu
@pytest.mark.parametrize("batch, length, stored, keys", [(1, 256, 1279, 8), (2, 256, 64, 2), (1, 37, 70, 8), (1, 1, 1, 16), (3, 65, 129, 4)])
@pytest.mark.parametrize("mask", [None, "random", "window", "one for all"])
def test_attention(batch, length, stored, keys, mask):
    queries = random(batch, length, 16, 256, scale=0.3).swapaxes(1, 2)
    its = random(batch, keys, stored + 37, 256, seed=1)[:, :, :stored]  # as a cache holds it
    values = random(batch, keys, stored, 256, seed=2)
    at = mx.arange(length)[:, None] + max(0, stored - length) - mx.arange(stored)[None]
    seen = {
        None: None,
        "random": mx.random.uniform(shape=(batch, 1, length, stored), key=mx.random.key(3)) > 0.5,
        "window": mx.broadcast_to((at >= 0) & (at < 100), (batch, 1, length, stored)),
        "one for all": (mx.abs(at) < 60)[None, None],
    }[mask]
    if seen is not None:
        seen = mx.concatenate([mx.ones_like(seen[..., :1]), seen[..., 1:]], axis=-1)  # nobody sees nothing
    found = cuda.attention(queries, its, values, scale=0.7, mask=seen)
    same(found, mx.fast.scaled_dot_product_attention(*wide(queries, its, values), scale=0.7, mask=seen))


@on_gpu
@pytest.mark.parametrize("vocabulary, spread", [(1000, 3.0), (32_768, 30.0), (262_144, 5.0)])
def test_believe(vocabulary, spread):
    scores, uniforms = random(40, vocabulary, scale=spread), mx.random.uniform(shape=(40,), key=mx.random.key(1))
    uniforms = mx.concatenate([mx.array([0.0, 1.0]), uniforms[2:]])
    ours, theirs = cuda.believe(scores, 30.0, 0.6, uniforms), plain.believe(scores, 30.0, 0.6, uniforms)
    np.testing.assert_array_equal(np.array(ours[0]), np.array(theirs[0]))
    np.testing.assert_allclose(np.array(ours[1]), np.array(theirs[1]), atol=1e-4)
    np.testing.assert_allclose(np.array(ours[2]), np.array(theirs[2]), atol=1e-5)
    assert (np.array(ours[3])[2:] == np.array(theirs[3])[2:]).mean() > 0.9  # the sums' last bits decide the others
    same(ours[4], theirs[4])


# -- without a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows, height", [(1, 16), (13, 16), (16, 32), (26, 32), (30, 64), (64, 64), (5000, 64)])
def test_the_tile_that_is_chosen(rows, height):
    assert cuda._tile(rows).height == height


@pytest.mark.parametrize("inputs", [2816, 8192])
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_tiles_fit_into_shared_memory(inputs, bits):
    assert all(tile.shared(bits, inputs) <= 227 * 1024 for tile in cuda.TILES)  # of compute capability 9.0


def test_what_our_kernels_do_not_read_goes_the_plain_way():
    x = random(3, 64)
    for format in (Format.of(bits=3), Format.of(bits=4, group_size=32), Format.of(mode="mxfp4")):
        assert not cuda._is_packed(PackedLinear((64, 64), format), x)
    layer, _ = packed(PackedLinear, random(64, 64), 4)
    assert isinstance(layer, Packed) and cuda._is_packed(layer, x) and not cuda._is_packed(layer, wide(x)[0])
    rows, branch, weight = (random(*shape, dtype=mx.float32) for shape in ((2, 256), (2, 256), (256,)))
    assert mx.array_equal(cuda.add_normed(rows, branch, weight, 1e-6), plain.add_normed(rows, branch, weight, 1e-6))


@pytest.fixture
def launches(monkeypatch):
    """What each kernel, that is each source to compile, asks of shared memory, launch by launch; nothing is computed."""
    found: dict[tuple, list[int]] = {}

    def cuda_kernel(*, source, header, input_names, output_names, shared_memory, **_):
        def launch(*, inputs, output_shapes, output_dtypes, **_):
            kinds = tuple((array.dtype, array.ndim > 0) for array in inputs)  # the types of its arguments
            found.setdefault((header, source, *input_names, *kinds, *output_dtypes), []).append(shared_memory)
            return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes)]

        return launch

    cached = (cuda._kernel, cuda._product, cuda._allow)
    for function in cached:
        function.cache_clear()
    monkeypatch.setattr(mx.fast, "cuda_kernel", cuda_kernel, raising=False)
    monkeypatch.setattr(mx, "eval", lambda *_: None)
    monkeypatch.setattr(mx, "async_eval", lambda *_: None)
    for name in [name for name, function in vars(kernels).items() if callable(function) and hasattr(cuda, name)]:
        monkeypatch.setattr(kernels, name, getattr(cuda, name))
    yield found
    for function in cached:
        function.cache_clear()


def converse(bits, prompts):
    """Lay out a turn after each prompt by a model of the released shapes, two steps each; five layers are sliding, one is full."""
    config = ModelConfig.from_dict(geometry.config("full", layers=6))
    model = DiffusionGemma(config)
    weights.pack(model, convert.choose(config, bits and Format.of(bits=bits))[0])
    model.apply(lambda array: weights.cast(array, mx.bfloat16))
    for prompt in prompts:
        caches, canvas, belief = model.make_caches(), mx.zeros((1, 256), mx.int32), None
        model.prefill(np.full((1, prompt), 7), [], caches)
        for _ in range(2):
            scores = model.scores(model.canvas_hidden(canvas, caches, belief)[0])
            belief = model.soft_embed(kernels.believe(scores, 30.0, 0.6, mx.zeros((256,)))[-1])[None]
        model.extend(np.full((1, 256), 7), caches)


@pytest.mark.parametrize("bits, one_prompt, two", [(None, 11, 12), (4, 13, 16), (8, 12, 14)])
def test_a_model_has_few_kernels(launches, bits, one_prompt, two):
    """Each takes mlx a second and a half to compile, in every process."""
    converse(bits, [1024])
    assert len(launches) == one_prompt
    converse(bits, [20])  # whose experts have tiles of 16 rows
    assert len(launches) == two


@pytest.mark.parametrize("bits", [4, 8])
def test_a_kernel_is_first_launched_with_the_most_memory_it_may_take(launches, bits):
    converse(bits, [1024, 20])
    grouped = [asked for asked in launches.values() if len(set(asked)) > 1]
    assert grouped and all(asked[0] >= max(asked) for asked in grouped)
