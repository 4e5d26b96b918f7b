"""What a conversation remembers: warm equals cold to the last bit, nothing is encoded twice that can be kept, the budget holds."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

import dgemma  # noqa: F401
from dgemma import weights
from dgemma.attention import Packing, RotatingKVCache
from dgemma.errors import OptionError
from dgemma.kept import Kept
from dgemma.memory import Memory, runs, shared, spell
from dgemma.vision import preprocess
from oracle import tiny

IMAGE, CANVAS = tiny.IMAGE, tiny.CANVAS


@pytest.fixture(scope="module", params=["ring", "wide"])
def model(request, tmp_path_factory):
    """A window of 12, and one of 64."""
    return weights.load(tiny.write_checkpoint(tmp_path_factory.mktemp("tiny"), request.param), dtype=mx.float32)


def text(length, seed):
    return list(np.random.RandomState(seed).randint(tiny.FIRST_TEXT, 90, length))


def image(seed, size=(96, 48)):
    return preprocess(np.random.RandomState(seed).randint(0, 255, (*size, 3)).astype(np.uint8), budget=70)


def ids_of(parts):
    """A prompt `[1, L]` and its images from lists of tokens and patches."""
    ids, images = [2], []
    for part in parts:
        if isinstance(part, list):
            ids += part
        else:
            ids += [tiny.BEGIN_IMAGE] + [IMAGE] * part.soft_tokens + [tiny.END_IMAGE]
            images.append(part)
    return np.array([ids], dtype=np.int32), images


def take_in(memory, parts, chunk=None):
    """Read a prompt; (positions that were there, positions in all)."""
    ids, images = ids_of(parts)
    return memory.read(ids, memory.features(ids, images), chunk), ids.shape[1]


def held(memory):
    """What a canvas sees after the memory, to the last bit."""
    canvas = np.random.RandomState(5).randint(0, 90, (1, CANVAS))
    return np.array(memory.model.canvas_hidden(mx.array(canvas), memory.caches))


def assert_as_cold(memory, parts):
    """The same prompt, encoded anew in the same passes, leaves the same."""
    warm, cuts = held(memory), list(memory.cuts)
    memory.forget()
    assert take_in(memory, parts)[0] == 0
    assert memory.cuts == cuts
    assert np.array_equal(held(memory), warm)


def window(model):
    return model.config.text.sliding_window


def test_only_what_is_new_is_encoded(model):
    memory, first = Memory(model), [text(30, 1)]
    assert take_in(memory, first) == (0, 31)
    block = text(CANVAS, 2)
    memory.write(np.array([block]))
    assert memory.length == 31 + CANVAS
    assert take_in(memory, [first[0] + block + text(9, 3)]) == (31 + CANVAS, 31 + CANVAS + 9)
    assert_as_cold(memory, [first[0] + block + text(9, 3)])


def test_a_block_that_is_told_otherwise_is_encoded_again(model):
    memory, first = Memory(model), text(30, 1)
    take_in(memory, [first])
    block = text(CANVAS, 2)
    memory.write(np.array([block]))
    told = first + block[:-1] + [block[-1] ^ 1] + text(3, 4)
    assert take_in(memory, [told]) == (31, 31 + CANVAS + 3)  # back to the end of the prompt: the block was one pass
    assert_as_cold(memory, [told])


@pytest.mark.parametrize("budget", [0, 1 << 30])
def test_cut_back_after_the_ring_has_wrapped(model, budget):
    memory = Memory(model, budget=budget)
    parts, ends = [], []
    for turn in range(5):
        parts = [*parts, text(window(model), turn)]
        _, end = take_in(memory, parts)
        ends.append(end)
    again = [*parts[:2], text(6, 77)]
    cached, _ = take_in(memory, again)
    assert cached == (ends[1] if budget else 0)  # without copies of the rows there is no way back
    assert_as_cold(memory, again)


def test_before_the_ring_wraps_no_copy_is_needed(model):
    memory, parts = Memory(model, budget=0), [text(4, 0)]
    take_in(memory, parts)
    take_in(memory, [*parts, text(5, 1)])
    assert memory.length < window(model) and not list(memory.kept)
    assert take_in(memory, [*parts, text(3, 2)]) == (5, 8)
    assert_as_cold(memory, [*parts, text(3, 2)])


def test_copies_stand_at_ends_of_prompts_and_every_so_many_tokens(model):
    memory = Memory(model, every=16)
    take_in(memory, [text(69, 0)], chunk=8)
    assert [key for key in memory.kept] == [16, 32, 48, 64, 70]
    for number in range(3):
        memory.write(np.array([text(CANVAS, number)]))
    assert [key for key in memory.kept if key > 70] == [86]


def test_the_budget_is_kept_and_the_least_recently_used_goes_first(model):
    take_in(probe := Memory(model), [text(window(model) * 2, 0)])
    one = probe.kept.nbytes
    memory, parts, ends = Memory(model, budget=3 * one), [], []
    for turn in range(6):
        parts = [*parts, text(window(model) * 2, turn)]
        ends.append(take_in(memory, parts)[1])
        assert memory.kept.nbytes <= memory.kept.budget
    assert list(memory.kept) == ends[-3:]
    assert take_in(memory, [*parts[:3], text(1, 9)])[0] == 0  # that copy is gone, and so is all after it
    assert memory.kept.nbytes <= memory.kept.budget


def test_a_copy_that_does_not_fit_is_not_made(model, monkeypatch):
    take_in(probe := Memory(model), [text(window(model) * 2, 0)])
    made, capture = [], RotatingKVCache.capture_rows
    monkeypatch.setattr(RotatingKVCache, "capture_rows", lambda cache: made.append(kept()) or capture(cache))
    for budget in (0, probe.kept.nbytes - 1, probe.kept.nbytes):
        memory = Memory(model, budget=budget)
        kept = lambda: memory.kept.nbytes
        for turn in range(1, 4):
            take_in(memory, [text(window(model) * 2, 0)] * turn)
        assert memory.kept.nbytes == (budget if budget == probe.kept.nbytes else 0)
    rings = sum(isinstance(cache, RotatingKVCache) for cache in memory.caches)
    assert made == [0] * 3 * rings  # of the last budget only, and the copy before was let go first


def test_prompts_are_read_as_they_were_announced(model):
    memory, (ids, images) = Memory(model), ids_of([text(20, 0)])
    with pytest.raises(ValueError, match="just before"):
        memory.read(ids, [])
    memory.read(ids, memory.features(ids, images))
    with pytest.raises(ValueError, match="just before"):
        memory.read(ids, [])


def test_copies_of_what_was_cut_away_do_not_come_back(model):
    memory, length = Memory(model), window(model) * 2
    take_in(memory, [text(length, 0)])
    other = [text(length, 1)]  # as long, so that its copy has the same place
    take_in(memory, other)
    take_in(memory, [*other, text(length, 2)])
    assert take_in(memory, [*other, text(3, 3)])[0] == length + 1
    assert_as_cold(memory, [*other, text(3, 3)])


@pytest.mark.parametrize("change", ["other", "gone", "budget"])
def test_a_picture_is_part_of_the_key(model, change):
    memory, seen = Memory(model), image(1)
    parts = [text(5, 0), seen, text(6, 1)]
    take_in(memory, parts)
    other = {
        "other": image(2),
        "gone": text(seen.soft_tokens + 2, 3),
        "budget": preprocess(np.random.RandomState(1).randint(0, 255, (96, 48, 3)).astype(np.uint8), budget=140),
    }[change]
    asked = [parts[0], other, parts[2], text(4, 4)]
    assert take_in(memory, asked)[0] == 0
    assert_as_cold(memory, asked)
    assert take_in(memory, [*asked, text(2, 5)])[0] > 0


def test_a_picture_goes_through_the_tower_once(model, monkeypatch):
    seen, looked = image(1), []
    whole = type(model).encode_images
    monkeypatch.setattr(type(model), "encode_images", lambda self, images: looked.extend(images) or whole(self, images))
    memory = Memory(model)
    take_in(memory, [text(3, 0), seen, text(4, 1)])
    take_in(memory, [text(3, 9), image(1), text(4, 1)])  # equal pixels, another object; all before it has changed
    assert len(looked) == 1
    memory.forget()
    take_in(memory, [text(3, 9), seen, text(4, 1)])
    assert len(looked) == 2


def test_two_pictures_of_one_shape_are_encoded_as_if_each_were_alone(model):
    parts = [image(1), text(4, 1), image(2), text(4, 2)]
    together, apart = Memory(model), Memory(model)
    take_in(apart, parts[:2])
    take_in(apart, parts)
    take_in(together, parts)
    together.cuts, together.spelled = list(apart.cuts), list(apart.spelled)
    together.forget()
    take_in(together, parts)
    assert np.array_equal(held(together), held(apart))


@pytest.mark.parametrize("start", [0, 20, 1000])
def test_packed_rows_warm_as_cold(model, start):
    memory, parts, ends = Memory(model, Packing(8, 32, start)), [], []
    for turn in range(4):
        parts = [*parts, text(10, turn)]
        ends.append(take_in(memory, parts)[1])
    again = [*parts[:1], text(5, 9)]
    cached, _ = take_in(memory, again)
    assert cached == (0 if start == 20 else ends[0])  # rows packed already would not have been at that position
    assert_as_cold(memory, again)


def test_another_packing_forgets(model):
    memory, parts = Memory(model), [text(20, 0)]
    take_in(memory, parts)
    memory.repack(None)
    assert memory.length == 21
    memory.repack(Packing(8, 32))
    assert memory.length == 0 and take_in(memory, parts)[0] == 0 and memory.caches[0].is_packed


def test_a_pass_broken_off_forgets_and_goes_on(model, monkeypatch):
    memory, parts = Memory(model), [text(20, 0)]
    take_in(memory, parts)
    encode = type(model.layers[-1]).encode
    last = model.layers[-1]

    def breaks(self, *args):
        if self is last:
            raise KeyboardInterrupt
        return encode(self, *args)

    monkeypatch.setattr(type(last), "encode", breaks)
    with pytest.raises(KeyboardInterrupt):
        take_in(memory, [*parts, text(4, 1)])
    assert len({cache.offset for cache in memory.caches}) == 2  # torn: this is what must not be used
    monkeypatch.undo()
    assert take_in(memory, [*parts, text(4, 1)]) == (0, 25)
    assert_as_cold(memory, [*parts, text(4, 1)])


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_prompts_blocks_and_losses(model, seed):
    """Whatever came before, a prompt leaves what it leaves when it is encoded anew in the same passes."""
    rng = np.random.RandomState(seed)
    pictures, blocks = [image(1), image(2, (48, 48))], 0
    memory = Memory(model, every=int(rng.choice([8, 64])), budget=int(rng.choice([0, 200_000, 1 << 30])))
    parts = []
    for _ in range(10):
        kept = int(rng.randint(0, len(parts) + 1)) if rng.rand() < 0.4 else len(parts)
        parts = [*parts[:kept], text(int(rng.randint(1, 30)), int(rng.randint(4)))]
        if rng.rand() < 0.3:
            parts.append(pictures[rng.randint(2)])
        chunk = None if rng.rand() < 0.5 else int(rng.randint(1, 20))
        take_in(memory, parts, chunk)
        assert memory.kept.nbytes <= memory.kept.budget
        if rng.rand() < 0.5:
            for _ in range(int(rng.randint(1, 4))):
                blocks += 1
                block = text(CANVAS, 1000 + blocks)
                memory.write(np.array([block]))
                parts = [*parts, block]
        if rng.rand() < 0.2:
            memory.forget()
        else:
            take_in(memory, parts)
        if rng.rand() < 0.5:
            take_in(memory, parts)
            assert_as_cold(memory, parts)


def test_the_pieces():
    kept = Kept(10)
    kept.put("a", 1, 4)
    kept.put("b", 2, 4)
    assert kept.get("a") == 1
    kept.put("c", 3, 4)
    assert list(kept) == ["a", "c"] and kept.nbytes == 8 and kept.get("b") is None
    kept.put("c", 4, 11)  # too large to come in; the old one is gone
    assert list(kept) == ["a"] and kept.nbytes == 4
    assert shared([], [1]) == 0 and shared([1, "x", 3], [1, "x", 4]) == 2 and shared([1, 2], [1, 2]) == 2
    assert [runs(np.array(line, dtype=bool)) for line in ([], [1, 1, 0, 1], [0, 0], [0, 1])] == [0, 2, 0, 1]
    one = replace(image(1), soft_tokens=2)
    assert spell([5, 8, 8, 6], [one], 8) == ([5, one.digest, one.digest, 6], [1])


@pytest.mark.parametrize("settings", [{"every": 0}, {"every": 1.5}, {"budget": -1}, {"budget": True}])
def test_bad_settings(model, settings):
    with pytest.raises(OptionError, match="snapshot_(every|bytes) is"):
        Memory(model, **settings)
