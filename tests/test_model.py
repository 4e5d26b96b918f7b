"""The model's state laws: chunked = whole, cached = whole, rows independent, reads that write nothing."""

import mlx.core as mx
import numpy as np
import pytest

import dgemma  # noqa: F401
from dgemma import weights
from dgemma.errors import OptionError, PromptError
from dgemma.model import DiffusionGemma, chunks
from dgemma.vision import preprocess
from oracle import tiny

IMAGE = tiny.IMAGE


@pytest.fixture(scope="module")
def model(checkpoint):
    return weights.load(checkpoint, dtype=mx.float32)


def prompt(images, text=4, seed=0):
    """A prompt with an image of each size in front, and its patches."""
    rng = np.random.RandomState(seed)
    patches = [preprocess(rng.randint(0, 255, (h, w, 3)).astype(np.uint8), budget=70) for w, h in images]
    ids = [2]
    for image in patches:
        ids += [tiny.BEGIN_IMAGE] + [IMAGE] * image.soft_tokens + [tiny.END_IMAGE]
    return np.array([ids + list(rng.randint(tiny.FIRST_TEXT, 90, text))]), patches


def logits(model, caches, seed=0, rows=1):
    canvas = np.random.RandomState(seed).randint(0, 90, (rows, tiny.CANVAS))
    return np.array(model.canvas_logits(mx.array(canvas), caches))


@pytest.mark.parametrize("images", [[], [(96, 48)], [(48, 48), (300, 60)]])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_chunked_prefill_equals_whole(model, images, chunk):
    ids, patches = prompt(images, text=30)
    features, found = model.encode_images(patches), []
    for size in (None, chunk):
        caches = model.make_caches()
        model.prefill(ids, features, caches, size)
        assert caches[0].offset == ids.shape[1]
        found.append(logits(model, caches))
    np.testing.assert_allclose(found[1], found[0], atol=2e-4)


def test_canvas_pass_writes_nothing(model):
    ids, _ = prompt([], text=40)
    caches = model.make_caches()
    model.prefill(ids, [], caches)
    before = [(cache.offset, np.array(cache.keys)) for cache in caches]
    first = logits(model, caches)
    assert np.array_equal(first, logits(model, caches))
    for cache, (offset, keys) in zip(caches, before):
        assert cache.offset == offset and np.array_equal(np.array(cache.keys), keys)


def test_extending_equals_a_longer_prompt(model):
    ids, _ = prompt([], text=30)
    whole, grown = model.make_caches(), model.make_caches()
    model.prefill(ids, [], whole)
    model.prefill(ids[:, : -2 * tiny.CANVAS], [], grown)
    for begin in (-2 * tiny.CANVAS, -tiny.CANVAS):
        model.extend(mx.array(ids[:, begin : begin + tiny.CANVAS or None]), grown)
    np.testing.assert_allclose(logits(model, grown), logits(model, whole), atol=2e-4)


def test_a_row_of_a_padded_batch_equals_the_row_alone(model):
    (long, patches), (short, _) = prompt([(96, 48)], text=20), prompt([], text=9, seed=1)
    gap = long.shape[1] - short.shape[1]
    batch = np.concatenate([long, np.pad(short, ((0, 0), (gap, 0)))])
    features = model.encode_images(patches)
    together = model.make_caches([0, gap])
    model.prefill(batch, features, together)
    both = logits(model, together, rows=2)
    canvas = np.random.RandomState(0).randint(0, 90, (2, tiny.CANVAS))
    for row, (ids, seen) in enumerate([(long, features), (short, [])]):
        alone = model.make_caches()
        model.prefill(ids, seen, alone)
        single = np.array(model.canvas_logits(mx.array(canvas[row : row + 1]), alone))
        np.testing.assert_allclose(both[row : row + 1], single, atol=2e-4)


def test_images_of_one_grid_share_a_pass_and_keep_their_order(model):
    _, patches = prompt([(96, 48), (48, 48), (96, 48)])
    together, apart = model.encode_images(patches), [model.encode_images([one])[0] for one in patches]
    for ours, theirs in zip(together, apart):
        np.testing.assert_allclose(np.array(ours), np.array(theirs), atol=1e-5)


def test_image_attention_modes_differ_where_images_exceed_the_window(tmp_path, model):
    ids, patches = prompt([(300, 300)])
    folder, found = tiny.write_checkpoint(tmp_path, "ring", tower=True), []
    for mode in ("encoder-window", "bidirectional"):
        one = weights.load(folder, mode, dtype=mx.float32)
        caches = one.make_caches()
        one.prefill(ids, one.encode_images(patches), caches)
        found.append(logits(one, caches))
    assert np.abs(found[0] - found[1]).max() > 1e-3
    with pytest.raises(OptionError, match="image_attention is 'all'; allowed: encoder-window, bidirectional"):
        DiffusionGemma(model.config, "all")


def test_self_conditioning_changes_the_logits(model):
    ids, _ = prompt([])
    caches = model.make_caches()
    model.prefill(ids, [], caches)
    canvas = mx.array(np.random.RandomState(0).randint(0, 90, (1, tiny.CANVAS)))
    plain = model.canvas_logits(canvas, caches)
    again = model.canvas_logits(canvas, caches, mx.softmax(plain, axis=-1))
    assert np.abs(np.array(plain - again)).max() > 1e-3


def test_text_only_checkpoints_say_so(text_checkpoint):
    model = weights.load(text_checkpoint)
    _, patches = prompt([(48, 48)])
    with pytest.raises(PromptError, match="1 image\\(s\\) given, but this checkpoint has no vision tower"):
        model.encode_images(patches)


@pytest.mark.parametrize(
    "row, size, want",
    [
        ("ttttt", 2, [(0, 2), (2, 4), (4, 5)]),
        ("ttttt", 9, [(0, 5)]),
        ("tiiit", 3, [(0, 1), (1, 4), (4, 5)]),  # back to before the image
        ("iiiit", 2, [(0, 4), (4, 5)]),  # longer than a chunk: whole
        ("titit", 2, [(0, 2), (2, 4), (4, 5)]),  # single soft tokens can be cut between
        ("tttii", 4, [(0, 3), (3, 5)]),
    ],
)
def test_chunks_never_end_inside_an_image(row, size, want):
    assert chunks(np.array([[9 if c == "i" else 1 for c in row]]), 9, size) == want


def test_chunks_of_a_batch_respect_every_row():
    ids = np.array([[1, 9, 9, 1, 1, 1], [1, 1, 1, 9, 9, 1]])
    assert chunks(ids, 9, 2) == [(0, 1), (1, 3), (3, 5), (5, 6)]
    with pytest.raises(OptionError, match="the prefill chunk is 0; at least 1 is needed"):
        chunks(ids, 9, 0)
