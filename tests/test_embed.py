"""Image rows: their norm and projection, their blocks, their places."""

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from test_tower import CONFIG

from dgemma.errors import PromptError
from dgemma.vision import ImageEmbedder, image_blocks, place

IMAGE = 8
IDS = np.array(
    [
        [0, 0, 2, 7, 8, 8, 9, 5, 7, 8, 9, 5],
        [2, 8, 8, 8, 9, 7, 8, 8, 5, 5, 5, 8],
        [2, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3],
    ]
)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_embedder_norms_then_projects(dtype):
    embedder = ImageEmbedder(CONFIG, 40, 1e-6)
    assert [name for name, _ in tree_flatten(embedder.parameters())] == ["embedding_projection.weight"]
    embedder.set_dtype(dtype)
    soft = (mx.random.normal((2, 5, 64), key=mx.random.key(0)) * 30).astype(dtype)
    x, weight = (np.array(a.astype(mx.float32)).astype(float) for a in (soft, embedder.embedding_projection.weight))
    want = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) @ weight.T
    got = embedder(soft)
    assert got.dtype == dtype and got.shape == (2, 5, 40)
    scale = np.abs(want).max()
    assert np.abs(np.array(got.astype(mx.float32)) - want).max() <= (1e-6 if dtype == mx.float32 else 2e-2) * scale


def test_blocks_are_runs_counted_in_each_row():
    blocks = image_blocks(IDS, IMAGE)
    assert blocks.dtype == np.int32
    assert blocks.tolist() == [
        [-1, -1, -1, -1, 0, 0, -1, -1, -1, 1, -1, -1],
        [-1, 0, 0, 0, -1, -1, 1, 1, -1, -1, -1, 2],
        [-1] * 12,
    ]
    assert image_blocks(np.array([[IMAGE, IMAGE]]), IMAGE).tolist() == [[0, 0]]
    assert image_blocks(np.zeros((2, 0), int), IMAGE).shape == (2, 0)


def test_rows_are_placed_in_reading_order():
    rows = mx.zeros((3, 12, 4))
    sizes = [2, 1, 3, 2, 1]
    features = [mx.full((n, 4), 10 * i) + mx.arange(n)[:, None] for i, n in enumerate(sizes, start=1)]
    got = np.array(place(rows, IDS, IMAGE, features))
    want = np.zeros((3, 12))
    want[IDS == IMAGE] = [10, 11, 20, 30, 31, 32, 40, 41, 50]
    assert np.array_equal(got, np.repeat(want[..., None], 4, axis=2))


def test_placing_keeps_the_dtype_and_the_text():
    rows = mx.random.normal((1, 3, 4), key=mx.random.key(1)).astype(mx.bfloat16)
    got = place(rows, np.array([[5, IMAGE, 5]]), IMAGE, [mx.ones((1, 4))])
    assert got.dtype == mx.bfloat16
    assert mx.array_equal(got[:, ::2], rows[:, ::2]) and mx.array_equal(got[0, 1], mx.ones((4,), mx.bfloat16))


def test_nothing_to_place():
    rows = mx.ones((1, 3, 4))
    assert place(rows, np.array([[5, 5, 5]]), IMAGE, []) is rows


@pytest.mark.parametrize("features, seen", [([], "0 images fill 0"), ([4], "1 images fill 4"), ([9, 1], "2 images fill 10")])
def test_places_and_rows_must_agree(features, seen):
    with pytest.raises(PromptError) as caught:
        place(mx.zeros((3, 12, 4)), IDS, IMAGE, [mx.zeros((n, 4)) for n in features])
    assert str(caught.value) == f"the prompt has 9 image soft tokens, but its {seen}"
