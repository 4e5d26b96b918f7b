"""Law 7: every mask equals its drawing, and a brute-force rule at every offset that could go wrong."""

import inspect
import itertools
import re

import numpy as np
import pytest

from dgemma.attention import masks

W = 5
OFFSETS = (0, 1, W - 1, W, W + 1, 2 * W - 1, 2 * W, 3 * W + 2)


def drawings(function):
    """The drawing in a docstring: its numbers by name, and its rows as booleans."""
    lines = inspect.getdoc(function).splitlines()
    first = next(i for i, line in enumerate(lines) if re.search(r":\s+[x.]", line))
    head, _, row = lines[first].partition(":")
    rows = [row] + list(itertools.takewhile(lambda line: line.strip(), lines[first + 1 :]))
    numbers = {name: int(value) for name, value in re.findall(r"(\w+) (\d+)", head.split("blocks")[0])}
    blocks = re.search(r"blocks ([-\d ]+)", head)
    if blocks:
        numbers["blocks"] = [int(b) for b in blocks.group(1).split()]
    return numbers, np.array([[c == "x" for c in r if c in "x."] for r in rows])


def drawn_arguments(numbers):
    blocks = {"blocks": np.array([numbers["blocks"]])} if "blocks" in numbers else {}
    names = {"offset": "offset", "L": "length", "W": "window", "start": "start"}
    padding = {"padding": [numbers["padding"]]} if "padding" in numbers else {}
    return {names[k]: v for k, v in numbers.items() if k in names} | blocks | padding


@pytest.mark.parametrize(
    "function",
    [
        masks.causal_mask,
        masks.window_mask,
        masks.image_mask,
        masks.image_or_window_mask,
        masks.image_and_window_mask,
        masks.block_read_mask,
    ],
)
def test_mask_equals_its_drawing(function):
    numbers, drawn = drawings(function)
    mask = np.array(function(**drawn_arguments(numbers)))
    assert mask.shape == (1, 1, *drawn.shape)
    np.testing.assert_array_equal(mask[0, 0], drawn)


def test_ring_mask_equals_its_drawing():
    mask = np.array(masks.ring_mask(np.array([4, 5, 2, 3]), [3]))
    np.testing.assert_array_equal(mask, [[[[True, True, False, True]]]])


RULES = {
    "causal": lambda q, k, same: k <= q,
    "window": lambda q, k, same: q - W < k <= q,
    "image": lambda q, k, same: k <= q or same,
    "image or window": lambda q, k, same: q - W < k <= q or same,
    "image and window": lambda q, k, same: abs(q - k) < W and (k <= q or same),
    "block": lambda q, k, same: True,
}


def brute(kind, offset, length, start, blocks, padding):
    """The rule of `kind`, one query and key at a time; a padded query sees itself."""
    rows = len(padding)
    mask = np.zeros((rows, 1, length, offset - start + length), dtype=bool)
    for b, i, j in itertools.product(range(rows), range(length), range(mask.shape[-1])):
        q, k = offset + i, start + j
        same = k >= offset and blocks[b][i] >= 0 and blocks[b][i] == blocks[b][k - offset]
        own = k >= offset if kind == "block" else q == k
        mask[b, 0, i, j] = (RULES[kind](q, k, same) and k >= padding[b]) or own
    return mask


def build(kind, offset, length, start, blocks, padding):
    blocks = np.array(blocks)
    return {
        "causal": lambda: masks.causal_mask(offset, length, padding),
        "window": lambda: masks.window_mask(offset, length, W, start, padding),
        "image": lambda: masks.image_mask(offset, length, blocks, padding),
        "image or window": lambda: masks.image_or_window_mask(offset, length, W, start, blocks, padding),
        "image and window": lambda: masks.image_and_window_mask(offset, length, W, start, blocks, padding),
        "block": lambda: masks.block_read_mask(offset, length, start, padding),
    }[kind]()


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("padding", [None, (0, 2), (W, 1), (2 * W + 1, 0)])
@pytest.mark.parametrize("length", [1, 3, 2 * W + 1])
def test_mask_equals_brute_force(kind, padding, length):
    rng = np.random.RandomState(length)
    for offset in OFFSETS:
        start = 0 if kind in ("causal", "image") else max(0, offset - (W - 1))
        if padding and max(padding) > offset + length:
            continue
        rows = padding or (0,)
        blocks = [sorted(rng.randint(-1, 2, size=length)) for _ in rows]
        want = brute(kind, offset, length, start, blocks, rows)
        got = build(kind, offset, length, start, blocks, padding)
        if got is None:
            assert want.all(), (offset, "None although something is hidden")
        else:
            np.testing.assert_array_equal(np.broadcast_to(np.array(got), want.shape), want, err_msg=str(offset))


def test_nothing_is_built_where_none_would_do():
    assert masks.causal_mask(7, 1) is None
    assert masks.window_mask(7, 1, W, 3) is None
    assert masks.block_read_mask(7, 4, 3) is None
    assert masks.block_read_mask(7, 4, 3, padding=[3, 2]) is None  # the padding was evicted
    assert masks.ring_mask(np.array([5, 6, 4]), [4]) is None


def test_memo_builds_once_per_kind_and_keeps_only_the_newest():
    memo, built = masks.MaskMemo(), []

    def build(name):
        built.append(name)
        return name

    assert memo.get("a", (1,), lambda: build("a1")) == "a1"
    assert memo.get("a", (1,), lambda: build("again")) == "a1"
    blocks = np.zeros((1, 1))
    assert memo.get("a", (1,), lambda: build("other blocks"), blocks=blocks) == "other blocks"
    assert memo.get("b", (1,), lambda: build("b1")) == "b1"
    assert memo.get("a", (2,), lambda: build("a2")) == "a2"
    assert memo.get("a", (1,), lambda: build("a1 again")) == "a1 again"
    assert built == ["a1", "other blocks", "b1", "a2", "a1 again"]


def test_padding_of_zeros_is_no_padding():
    assert masks.MaskMemo([0, 0]).padding is None
    assert masks.MaskMemo([0, 3]).padding == (0, 3)
