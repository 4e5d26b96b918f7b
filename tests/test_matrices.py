"""A packed matrix is its unpacked self, whole or in pieces, whatever multiplies it."""

from __future__ import annotations

import dgemma  # noqa: F401: before mlx: it loads the BLAS that mlx then uses

import mlx.core as mx
import pytest

from dgemma import cpu, matrices
from dgemma.formats import Format
from dgemma.matrices import PackedEmbedding, PackedLinear

ROWS, WIDTH = 50, 64
FORMATS = [Format(bits=4, group_size=32), Format(bits=8), Format.of("mxfp4"), Format.of("nvfp4")]


def packed(kind, fmt):
    """A packed module of random numbers, and its matrix unpacked."""
    mx.random.seed(0)
    parts, made = fmt.pack(mx.random.normal((ROWS, WIDTH))), kind((ROWS, WIDTH), fmt)
    made.load_weights(list(parts.items()))
    return made, fmt.unpack(parts, mx.float32)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("piece", [1, 7 * WIDTH, ROWS * WIDTH, 1 << 20])
def test_pieces_are_the_matrix(fmt, piece, monkeypatch):
    monkeypatch.setattr(matrices, "PIECE", piece)
    made, matrix = packed(PackedEmbedding, fmt)
    found = list(made.pieces(mx.float32))
    assert max(rows.size for _, rows in found) <= max(piece, WIDTH)
    assert mx.array_equal(mx.concatenate([rows for _, rows in found]), matrix).item()
    assert [i for where, _ in found for i in range(ROWS)[where]] == list(range(ROWS))


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_products_in_pieces_are_those_of_the_matrix(fmt, monkeypatch):
    monkeypatch.setattr(matrices, "PIECE", 7 * WIDTH)
    table, matrix = packed(PackedEmbedding, fmt)
    layer, _ = packed(PackedLinear, fmt)
    x, shares = mx.random.normal((2, 3, WIDTH)), mx.random.normal((2, 3, ROWS))
    for found, wanted in (
        (cpu.scores(x, table), x @ matrix.T),
        (cpu.linear(x, layer), x @ matrix.T),
        (cpu.mix(shares, table), shares @ matrix),
    ):
        assert found.shape == wanted.shape and mx.allclose(found, wanted, rtol=1e-4, atol=1e-4).item()


def test_info_says_what_of_a_part_stays_unquantised(tmp_path):
    from dgemma import info
    from dgemma.convert import convert

    convert("demo", tmp_path / "packed", Format(bits=4, group_size=64))  # the experts' down_proj are 96 wide
    assert info.read(tmp_path / "packed")["quantization"]["experts"] == ["4 bit, groups of 64", "the rest unquantised"]
