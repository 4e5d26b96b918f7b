"""The laws of attention/README.md, against a brute-force attention over the whole history in float64."""

import mlx.core as mx
import numpy as np
import pytest

from dgemma.attention import KVCache, MaskMemo, Packing, RotatingKVCache
from dgemma.attention.packing import arrays, unpacked
from dgemma.errors import OptionError

W, B, K, H, E = 7, 2, 2, 4, 8
NO_BLOCK = -1


class History:
    """Everything that was ever written, as plain arrays, and attention over it by definition."""

    def __init__(self, window=None, padding=(0,) * B, images="encoder-window"):
        self.window, self.padding, self.images = window, padding, images
        self.keys = np.zeros((B, K, 0, E))
        self.values = np.zeros((B, K, 0, E))
        self.blocks = np.zeros((B, 0), dtype=int)

    def write(self, keys, values, blocks=None):
        first = self.keys.shape[2]
        self.keys = np.concatenate([self.keys, keys], axis=2)
        self.values = np.concatenate([self.values, values], axis=2)
        new = np.full((B, keys.shape[2]), NO_BLOCK) if blocks is None else np.where(blocks >= 0, blocks + 100 * first, -1)
        self.blocks = np.concatenate([self.blocks, new], axis=1)
        return first

    def may_look(self, b, q, k):
        if k < self.padding[b]:
            return q == k
        same = self.blocks[b, q] >= 0 and self.blocks[b, q] == self.blocks[b, k]
        if self.window is None:
            return k <= q or (same and self.images == "encoder-window")
        near = abs(q - k) < self.window
        if self.images == "encoder-window":
            return (k <= q and near) or same
        return near and (k <= q or same)

    def attend(self, queries, first):
        """Softmax attention of the queries written from position `first` on."""
        out = np.zeros_like(queries)
        for b in range(B):
            for i in range(queries.shape[2]):
                seen = [k for k in range(self.keys.shape[2]) if self.may_look(b, first + i, k)]
                out[b, :, i] = softmax_mean(queries[b, :, i], self.keys[b][:, seen], self.values[b][:, seen])
        return out

    def attend_block(self, queries, keys, values):
        """A canvas over the newest window - 1 positions (all, without a window) and itself."""
        length = self.keys.shape[2]
        first = 0 if self.window is None else max(0, length - (self.window - 1))
        out = np.zeros_like(queries)
        for b in range(B):
            seen = [k for k in range(first, length) if k >= self.padding[b]]
            all_keys = np.concatenate([self.keys[b][:, seen], keys[b]], axis=1)
            all_values = np.concatenate([self.values[b][:, seen], values[b]], axis=1)
            for i in range(queries.shape[2]):
                out[b, :, i] = softmax_mean(queries[b, :, i], all_keys, all_values)
        return out


def softmax_mean(queries, keys, values):
    """queries [H, E] over keys and values [K, T, E], each K shared by H / K query heads."""
    keys, values = np.repeat(keys, H // K, axis=0), np.repeat(values, H // K, axis=0)
    scores = np.einsum("he,hte->ht", queries, keys) * 0.3
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("ht,hte->he", weights / weights.sum(axis=-1, keepdims=True), values)


class Pair:
    """A cache and the history it should agree with, written side by side."""

    def __init__(self, kind, seed=0, padding=(0,) * B, images="encoder-window"):
        memo, self.packing = MaskMemo(padding), packing_of(kind)
        self.cache = RotatingKVCache(W, memo, self.packing) if kind.startswith("rotating") else KVCache(memo, self.packing)
        self.history = History(W if kind.startswith("rotating") else None, padding, images)
        self.rng = np.random.RandomState(seed)

    def stored(self, rows):
        """Rows as a cache keeps them: what is packed is rounded, once and for all."""
        return np.array(rows if self.packing is None else self.packing.pack(rows).unpacked(), np.float64)

    def random(self, heads, length):
        return self.rng.randn(B, heads, length, E)

    def write(self, length, verb="append_window", blocks=None):
        q, k, v = self.random(H, length), self.random(K, length), self.random(K, length)
        arguments = [mx.array(k.astype(np.float32)), mx.array(v.astype(np.float32))]
        read = getattr(self.cache, verb)(*arguments, *([] if blocks is None else [blocks]))
        first = self.history.write(*(self.stored(rows) for rows in arguments), blocks)
        self.agree(read.attend(mx.array(q.astype(np.float32)), scale=0.3), self.history.attend(q, first), first)

    def read_block(self, length):
        q, k, v = self.random(H, length), self.random(K, length), self.random(K, length)
        read = self.cache.read_block(mx.array(k.astype(np.float32)), mx.array(v.astype(np.float32)))
        self.agree(read.attend(mx.array(q.astype(np.float32)), scale=0.3), self.history.attend_block(q, k, v), "block")

    def agree(self, got, want, what):
        np.testing.assert_allclose(np.array(got), want, atol=2e-5, err_msg=f"{what} at {self.cache.offset}")

    def check_view(self):
        """Law 3: the temporal view is the tail of a plain list."""
        keys, values = self.cache.temporal_view()
        total = self.history.keys.shape[2]
        count = total if self.history.window is None else min(total, W)
        assert self.cache.offset == total
        if count == 0:
            assert keys is None and values is None
            return
        keys, values = unpacked(keys), unpacked(values)
        np.testing.assert_array_equal(np.array(keys), self.history.keys[:, :, total - count :].astype(np.float32))
        np.testing.assert_array_equal(np.array(values), self.history.values[:, :, total - count :].astype(np.float32))


KINDS = ["full", "rotating", "full 8 bit", "rotating 8 bit", "rotating 4 bit"]


def packing_of(kind):
    return Packing(int(kind.split()[1]), 32) if "bit" in kind else None


SPLITS = [[1] * 18, [18], [3, 15], [W - 1, 1, W, 4], [W, W, 4], [W + 1, 10], [2 * W, 4], [2 * W - 1, 5]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padding", [(0, 0), (0, 3), (W + 2, 1)])
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_chunked_equals_whole(kind, split, padding):
    """Law 1, and law 6 by way of the rows' own paddings."""
    pair = Pair(kind, padding=padding)
    for length in split:
        pair.write(length)
        pair.check_view()
    pair.read_block(4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("images", ["encoder-window", "bidirectional"])
@pytest.mark.parametrize("cuts", [[19], [3, 16], [3, 11, 5], [3, 9, 2, 5]], ids=str)
def test_image_blocks_in_any_chunks_that_leave_them_whole(kind, images, cuts):
    row = np.array([-1] * 3 + [0] * 9 + [-1] * 2 + [1] * 4 + [-1])
    blocks = np.stack([row, np.where(row == 1, -1, row)])
    pair, begin = Pair(kind, images=images), 0
    verb = "append_encoder_window" if images == "encoder-window" else "append_bidirectional"
    for length in cuts:
        part = blocks[:, begin : begin + length]
        pair.write(length, verb, part)
        begin += length
        pair.check_view()
    pair.read_block(3)
    pair.write(2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("before", [0, 1, W - 1, W, W + 1, 2 * W, 2 * W + 3])
@pytest.mark.parametrize("singly", [False, True])
def test_a_block_read_changes_nothing(kind, before, singly):
    """Law 2."""
    pair = Pair(kind)
    for length in [1] * before if singly else [before] * bool(before):
        pair.write(length, "append_decode" if singly else "append_window")
    kept = [np.array(a) for a in pair.cache.arrays]
    for _ in range(3):
        pair.read_block(5)
    assert pair.cache.offset == before
    assert len(kept) == len(pair.cache.arrays) and all(np.array_equal(np.array(a), b) for a, b in zip(pair.cache.arrays, kept))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(12))
def test_any_sequence_of_writes(kind, seed):
    """Laws 1 to 5 at random: every read equals brute force, captures and trims in between."""
    pair = Pair(kind, seed, padding=(0, seed % 5))
    rng = np.random.RandomState(100 + seed)
    for _ in range(14):
        verb = rng.choice(["append_window", "append_decode", "append_committed", "read", "restore", "trim"])
        if verb == "read":
            pair.read_block(int(rng.randint(1, 6)))
        elif verb == "restore":
            rows = pair.cache.capture_rows()
            extra = [W] if kind.startswith("rotating") else []
            pair.cache = type(pair.cache).restore(rows, *extra)
        elif verb == "trim":
            trim_and_write_again(pair, int(rng.randint(1, 5)))
        else:
            pair.write(1 if verb == "append_decode" else int(rng.randint(1, 2 * W)), verb)
        pair.check_view()


def trim_and_write_again(pair, count):
    """Law 5: append junk, trim it, go on as if it had never been there."""
    junk = mx.array(pair.random(K, count).astype(np.float32))
    pair.cache.append_window(junk, junk)
    pair.cache.trim(count)
    pair.write(2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("before", [1, W, 2 * W + 2])
@pytest.mark.parametrize("singly", [False, True])
def test_restored_continues_bit_for_bit(kind, before, singly):
    """Law 4."""
    pair = Pair(kind)
    for length in [1] * before if singly else [before]:
        pair.write(length, "append_decode" if singly else "append_window")
    rows = pair.cache.capture_rows()
    assert rows.packing == pair.packing
    twin = RotatingKVCache.restore(rows, W) if kind.startswith("rotating") else KVCache.restore(rows)
    for verb, length in [("append_decode", 1), ("append_decode", 1), ("append_window", 3), ("append_decode", 1)]:
        q, k, v = (mx.array(pair.random(heads, length).astype(np.float32)) for heads in (H, K, K))
        ours, theirs = (getattr(cache, verb)(k, v).attend(q, scale=0.3) for cache in (pair.cache, twin))
        assert np.array_equal(np.array(ours), np.array(theirs))
    kept = [np.array(a) for a in arrays(rows.keys)]
    twin.append_decode(k[:, :, :1], v[:, :, :1])
    assert all(np.array_equal(np.array(a), b) for a, b in zip(arrays(rows.keys), kept)), "the capture is self-contained"


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_independent(kind):
    """Law 6: a row of a padded batch equals the row alone."""
    rng, padding = np.random.RandomState(3), (4, 0)
    packing = packing_of(kind)
    batch = RotatingKVCache(W, MaskMemo(padding), packing) if kind.startswith("rotating") else KVCache(MaskMemo(padding), packing)
    alone = RotatingKVCache(W, None, packing) if kind.startswith("rotating") else KVCache(None, packing)
    for length in (12, 1, 5):
        q, k, v = (rng.randn(B, heads, length, E).astype(np.float32) for heads in (H, K, K))
        whole = np.array(batch.append_window(mx.array(k), mx.array(v)).attend(mx.array(q), scale=0.3))
        cut = padding[0] if alone.offset == 0 else 0
        row = [mx.array(a[:1, :, cut:]) for a in (q, k, v)]
        single = np.array(alone.append_window(row[1], row[2]).attend(row[0], scale=0.3))
        np.testing.assert_allclose(whole[:1, :, cut:], single, atol=1e-6)
    picked = batch.select([0], MaskMemo([padding[0]]))
    q, k, v = (mx.array(rng.randn(1, heads, 3, E).astype(np.float32)) for heads in (H, K, K))
    ours, theirs = (cache.read_block(k, v).attend(q, scale=0.3) for cache in (picked, alone))
    np.testing.assert_allclose(np.array(ours), np.array(theirs), atol=1e-6)


def test_trim_says_when_it_cannot():
    pair = Pair("rotating")
    pair.write(W)
    assert pair.cache.is_trimmable
    for _ in range(2):
        pair.write(1, "append_decode")
    assert not pair.cache.is_trimmable
    with pytest.raises(ValueError, match="cannot trim 1 positions of a ring of 7 at position 9: 0 can be taken back"):
        pair.cache.trim(1)
    pair.write(4)
    with pytest.raises(ValueError, match="4 can be taken back"):
        pair.cache.trim(5)
    full = Pair("full")
    full.write(3)
    with pytest.raises(ValueError, match="cannot trim 4 positions: 3 are stored"):
        full.cache.trim(4)
    assert not KVCache().is_trimmable


@pytest.mark.parametrize("kind", KINDS)
def test_trim_of_everything(kind):
    pair = Pair(kind)
    pair.write(5)
    pair.cache.trim(5)
    assert pair.cache.offset == 0 and pair.cache.temporal_view() == (None, None)
    pair.history = History(pair.history.window)
    pair.write(6)
    pair.check_view()


def test_bytes_are_those_held():
    full, ring = Pair("full"), Pair("rotating")
    assert full.cache.nbytes == 0 and full.cache.bytes_per_token == 0
    full.write(3)
    per_token = 2 * B * K * E * 4
    assert full.cache.bytes_per_token == per_token
    assert full.cache.nbytes == 256 * per_token, "one step of the buffer"
    ring.write(3)
    assert ring.cache.nbytes == 3 * per_token
    for _ in range(3 * W):
        ring.write(1, "append_decode")
    assert ring.cache.nbytes == W * per_token, "a ring never outgrows its window"


def test_decode_takes_one_position():
    two = mx.zeros((1, 1, 2, 4))
    for cache in (KVCache(), RotatingKVCache(4)):
        with pytest.raises(ValueError, match="append_decode writes one position, got 2"):
            cache.append_decode(two, two)


def test_layers_of_a_kind_share_one_mask():
    memo = MaskMemo()
    caches = [RotatingKVCache(W, memo) for _ in range(3)]
    rows = mx.zeros((1, 1, 2 * W, 4))
    masks = [cache.append_window(rows, rows).mask for cache in caches]
    assert masks[0] is masks[1] is masks[2]


# -- packed rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full", "rotating"])
@pytest.mark.parametrize("before", [0, 3, W, 2 * W + 3])
@pytest.mark.parametrize("singly", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_filled_cache_is_packed_as_it_lies(kind, before, singly, bits):
    pair = Pair(kind)
    for length in [1] * before if singly else [before] * bool(before):
        pair.write(length, "append_decode" if singly else "append_window")
    plain, pair.packing = pair.cache, Packing(bits, 32)
    pair.cache = plain.to_quantized(bits, 32)
    assert pair.cache.is_packed and not plain.is_packed and pair.cache.offset == before
    pair.history.keys, pair.history.values = (
        pair.stored(mx.array(rows.astype(np.float32))) if before else rows for rows in (pair.history.keys, pair.history.values)
    )
    pair.check_view()
    pair.read_block(4)
    for verb, length in (("append_decode", 1), ("append_window", 3), ("append_committed", 2), ("append_decode", 1)):
        pair.write(length, verb)
        pair.check_view()
    with pytest.raises(ValueError, match=f"packed already, in {bits} bits"):
        pair.cache.to_quantized(8)


@pytest.mark.parametrize("kind", ["full", "rotating"])
def test_a_cache_is_packed_once_it_holds_so_much(kind):
    pair, packing = Pair(kind), Packing(8, 32, start=5)
    pair.cache.packing = packing
    for length in (2, 2):
        pair.write(length)
        assert not pair.cache.is_packed
    pair.write(3)
    assert pair.cache.is_packed
    pair.packing = packing
    pair.history.keys, pair.history.values = (
        pair.stored(mx.array(rows.astype(np.float32))) for rows in (pair.history.keys, pair.history.values)
    )
    pair.check_view()
    pair.write(4)
    pair.read_block(3)


@pytest.mark.parametrize("width, padded", [(8, 32), (32, 32), (48, 64), (96, 96), (256, 256)])
@pytest.mark.parametrize("bits", [4, 8])
def test_bytes_of_packed_rows(width, padded, bits):
    packing = Packing(bits, 32)
    cache, rows = RotatingKVCache(9, None, packing), mx.random.normal((1, 2, 9, width), key=mx.random.key(0))
    cache.append_window(rows, rows)
    assert cache.bytes_per_token == 2 * 2 * packing.nbytes(width, 4) == 2 * 2 * (padded * bits // 8 + padded // 32 * 8)
    steps = (mx.max(rows) - mx.min(rows)).item() / (2**bits - 1)
    assert mx.abs(unpacked(cache.temporal_view()[0]) - rows).max().item() <= 0.75 * steps


@pytest.mark.parametrize(
    "given, message",
    [
        ({"bits": 3}, "kv_bits is 3; allowed: 4, 8"),
        ({"group_size": 48}, "kv_group_size is 48; allowed: 32, 64, 128"),
        ({"start": -1}, "kv_start is -1; a whole number of at least 0"),
        ({"start": True}, "kv_start is True"),
    ],
)
def test_what_mlx_packs_not_is_refused(given, message):
    with pytest.raises(OptionError, match=message):
        Packing(**given)
