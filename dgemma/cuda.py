"""The same operations for mlx's CUDA backend in bfloat16, by kernels of our own (dgemma/cu); everything else gets the plain ones.

mlx 0.32.4 has no fast way there for the experts of a canvas (`gather_mm` of single rows: 4.7 ms a layer of the released
geometry for 256 tokens on an H200, `gather_qmm` 5.6; reading the weights once takes 0.35), and launches a kernel for each
arithmetic step of norms, rotations and samplers, which at thirty layers is most of the rest. So rows are laid out in tiles
of one expert and multiplied by a grouped product, packed or not, and what stands between two products is one launch.

Sizes must be whole tiles (`K % 64`, rows of 256 numbers); what is not goes the plain way.

mlx compiles each source at its first use, in every process again (CustomKernel::eval_gpu keeps none on disk). That takes more than
a second, mostly for headers of mlx, whatever the kernel does. So what differs within a model (shapes of matrices, widths of
heads, a mask or none) is an argument wherever no loop over registers depends on it; tests/test_cuda.py counts the sources.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib import resources

import mlx.core as mx
import mlx.nn as nn

from . import plain
from .matrices import ExpertStack, Packed
from .plain import *  # noqa: F403: whatever has no other formulation here
from .plain import Angles

PACKED_BITS = (4, 8)  # affine, groups of 64: mlx's defaults
ROW = 256  # numbers of a warp's turn over a row
MOST = 8192  # numbers of a row that a block holds
INPUTS = 4096  # of a packed matrix that shares a kernel; those with more, up to twice, three times as many, have their own


@dataclass(frozen=True)
class Tile:
    """A block of the grouped product: warps along rows and columns, tiles of 16 rows and 8 columns for each, buffers."""

    down: int
    across: int
    rows: int
    columns: int
    stages: int

    @property
    def height(self) -> int:
        """Rows of a block."""
        return 16 * self.down * self.rows

    @property
    def width(self) -> int:
        """Weight rows of a block."""
        return 8 * self.across * self.columns

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.down * self.across

    def shared(self, bits: int, inputs: int) -> int:
        """Bytes of shared memory."""
        scales = 0 if bits == 16 else 4 * self.width * (inputs // 64)
        return self.stages * (128 * self.height + 8 * bits * self.width) + scales


# Of 16, 32 and 64 rows. Tiles of 128 were slower for packed weights and no faster for plain ones, on an H200.
TILES = (Tile(1, 4, 1, 4, 4), Tile(1, 4, 2, 4, 4), Tile(1, 4, 4, 4, 4))


@functools.cache
def _kernel(file: str, body: str, inputs: str, outputs: str, shared: int = 0, views: bool = False):
    """A kernel of dgemma/cu/`file`: `body` is what it does with its space-separated `inputs` and `outputs`.

    `views`: inputs come as they lie, and the body asks for their strides.
    """
    folder = resources.files(__package__) / "cu"
    parts = "".join((folder / name).read_text() for name in ("common.cu", file))
    return mx.fast.cuda_kernel(
        name=file.removesuffix(".cu"),
        input_names=inputs.split(),
        output_names=outputs.split(),
        header=f"namespace dgemma {{\n{parts}}}\n",
        source=body,
        ensure_row_contiguous=not views,
        shared_memory=shared,
    )


def _run(kernel, inputs: list, blocks: tuple[int, int], threads: int, *outputs: tuple[tuple[int, ...], mx.Dtype]) -> list[mx.array]:
    """The outputs (shape, dtype) of a kernel over so many blocks."""
    shapes, dtypes = zip(*outputs)
    return kernel(
        inputs=inputs, output_shapes=shapes, output_dtypes=dtypes,
        grid=(blocks[0] * threads, blocks[1], 1), threadgroup=(threads, 1, 1),
    )  # fmt: skip


def _of_bfloat16(function):
    """`function` for bfloat16 rows of whole warps, the plain formulation of the same name for anything else."""
    other = getattr(plain, function.__name__)

    @functools.wraps(function)
    def chosen(x: mx.array, *arguments, **named) -> mx.array:
        fits = x.dtype == mx.bfloat16 and x.shape[-1] % ROW == 0 and x.shape[-1] <= MOST
        return (function if fits else other)(x, *arguments, **named)

    return chosen


# -- products ---------------------------------------------------------------------------------------------------------


def linear(x: mx.array, layer: nn.Module) -> mx.array:
    """As plain.linear."""
    return _by_packed(x, layer) if _is_packed(layer, x) else layer(x)


def scores(x: mx.array, table: nn.Module) -> mx.array:
    """As plain.scores."""
    return _by_packed(x, table) if _is_packed(table, x) else table.scores(x)


def mix(shares: mx.array, table: nn.Module) -> mx.array:
    """As plain.mix; a packed table is unpacked first: mlx's product with one by columns takes four times as long."""
    return shares @ table.unpacked(slice(None), shares.dtype) if _is_packed(table, shares) else table.mix(shares)


def _is_packed(layer: nn.Module, x: mx.array) -> bool:
    """Whether a packed matrix is one that our kernels read."""
    return (
        isinstance(layer, Packed)
        and (layer.format.mode, layer.format.group_size) == ("affine", 64)
        and layer.format.bits in PACKED_BITS
        and layer.dtype == x.dtype == mx.bfloat16
        and layer.shape[-2] % 8 == 0
    )


def _by_packed(x: mx.array, layer: Packed) -> mx.array:
    """`x [..., I]` times one packed matrix `[O, I]`: every tile of rows is of the same "expert"."""
    rows = x.reshape(-1, x.shape[-1])
    tile = _tile(len(rows))
    count = -(-len(rows) // tile.height)
    out = _grouped(rows, layer, tile, _zeros(count), None, len(rows))
    return out.reshape(*x.shape[:-1], -1)


@functools.lru_cache(maxsize=64)
def _zeros(count: int) -> mx.array:
    return mx.zeros((count,), mx.int32)


def _tile(rows: float) -> Tile:
    """The tile for so many rows of one matrix."""
    return next((tile for tile in TILES if 1.2 * rows <= tile.height), TILES[-1])


def _grouped(x: mx.array, stack: nn.Module, tile: Tile, owner: mx.array, source: mx.array | None, rows: int) -> mx.array:
    """Rows of tiles `[rows, O]`; with a `source`, gelu(gate) * up of its rows, `[rows, O / 2]`: see cu/grouped.cu."""
    (*_, outputs, inputs), bits = stack.shape, stack.format.bits if isinstance(stack, Packed) else 16
    most = -(-inputs // INPUTS) * INPUTS
    if bits < 16:
        _allow(tile, bits, most)
    packed = (stack.scales, stack.biases) if bits < 16 else ()
    given = [x, stack.weight, *packed, owner if source is None else source, owner]
    columns, width = (outputs, tile.width) if source is None else (outputs // 2, tile.width // 2)
    blocks = -(-columns // width), owner.size
    kernel = _product(tile, bits, most, tile.shared(bits, inputs))
    return _run(kernel, given, blocks, tile.threads, ((rows, columns), mx.bfloat16))[0]


@functools.cache
def _product(tile: Tile, bits: int, most: int, shared: int):
    """The kernel of a tile and a number of bits: one for all shapes of matrices of at most so many inputs."""
    sizes = f"{tile.down}, {tile.across}, {tile.rows}, {tile.columns}, {tile.stages}, {bits}"
    body = PRODUCT.replace("SIZES", sizes).replace("HEIGHT", str(tile.height))
    if bits == 16:
        return _kernel("grouped.cu", body.replace("PACKED", "nullptr, nullptr"), "x w source owner", "out", shared)
    body = f"// at most {most} inputs{body.replace('PACKED', 'scales, biases')}"
    return _kernel("grouped.cu", body, "x w scales biases source owner", "out", shared)


# A stack of experts has three dimensions. Where there is no source the owners stand in its place, one a tile, not one a row.
PRODUCT = """
  const bool first = source_shape[0] > owner_shape[0];
  dgemma::grouped<SIZES>(x, w, PACKED, source, owner, out, first, w_ndim == 3 ? w_shape[0] : 1,
                         first ? owner_shape[0] * HEIGHT : x_shape[0], x_shape[1], w_shape[w_ndim - 2]);
"""


@functools.cache
def _allow(tile: Tile, bits: int, most: int) -> None:
    """Let the kernel of packed matrices take the shared memory of its widest.

    mlx 0.32.4 allows a kernel what its first launch asks for (CustomKernel::eval_gpu), and a later launch that asks for more
    fails. So the first is this one: the widest, of one tile that belongs to no expert, which ends at once.
    """
    kernel = _product(tile, bits, most, tile.shared(bits, most))
    row, scales, nobody = mx.zeros((1, 64), mx.bfloat16), mx.zeros((8, 1), mx.bfloat16), mx.ones((1,), mx.int32)
    given = [row, mx.zeros((8, 2 * bits), mx.uint32), scales, scales, nobody, nobody]
    mx.eval(_run(kernel, given, (1, 1), tile.threads, ((1, 8), mx.bfloat16)))


# -- attention --------------------------------------------------------------------------------------------------------


def attention(queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: mx.array | None) -> mx.array:
    """As plain.attention, for heads of 256 without scores in memory: see cu/attention.cu."""
    batch, heads, length, width = queries.shape
    if queries.dtype != mx.bfloat16 or width != 256 or (mask is not None and mask.dtype != mx.bool_):
        return plain.attention(queries, keys, values, scale=scale, mask=mask)
    body = ATTENTION.replace("SCALE", f"{float(scale)!r}f")
    kernel = _kernel("attention.cu", body, "queries keys values mask", "out", 5 * 64 * 2 * width, views=True)
    given = [queries, keys, values, _no_mask() if mask is None else mask]
    blocks = batch * heads, -(-length // 64)
    # Written as the next projection reads it: [B, L, H, E].
    return _run(kernel, given, blocks, 256, ((batch, length, heads, width), queries.dtype))[0].swapaxes(1, 2)


@functools.cache
def _no_mask() -> mx.array:
    """Stands where a mask would, with fewer dimensions, so that a kernel with one and a kernel without are the same."""
    return mx.array([True])


ATTENTION = """
  const int H = queries_shape[1], L = queries_shape[2], b = blockIdx.x / H, h = blockIdx.x % H, k = h / (H / keys_shape[1]);
  using bytes = const unsigned char*;
  dgemma::attend((bytes)(queries + b * queries_strides[0] + h * queries_strides[1]),
                 (bytes)(keys + b * keys_strides[0] + k * keys_strides[1]),
                 (bytes)(values + b * values_strides[0] + k * values_strides[1]), 2 * queries_strides[2],
                 2 * keys_strides[2], 2 * values_strides[2],
                 mask_ndim == 4 ? mask + (mask_shape[0] == 1 ? 0 : b * mask_strides[0]) : nullptr, mask_strides[2],
                 mask_strides[3], L, keys_shape[2], SCALE, out + ((size_t)b * L * H + h) * 256, (size_t)H * 512);
"""


# -- experts ----------------------------------------------------------------------------------------------------------


def route(scores: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """As plain.route, the best expert first."""
    rows, experts = scores.shape
    if scores.dtype != mx.bfloat16 or k > 32:
        return plain.route(scores, k)
    body = f"dgemma::route<{experts}, {k}>(scores, chosen, shares, scores_shape[0]);"
    kernel = _kernel("routing.cu", body, "scores", "chosen shares")
    return tuple(_run(kernel, [scores], (-(-rows // 8), 1), 256, ((rows, k), mx.int32), ((rows, k), mx.float32)))


def experts(rows: mx.array, chosen: mx.array, weights: mx.array, gate_up: nn.Module, down: nn.Module) -> mx.array:
    """As plain.experts, rows of one expert together in tiles; nothing is read back to lay them out."""
    (count, k), (number, inner, hidden) = chosen.shape, gate_up.shape
    whole = hidden % ROW == 0 and hidden <= MOST and inner % 128 == 0 and rows.dtype == mx.bfloat16
    if not whole or not all(isinstance(stack, ExpertStack) or _is_packed(stack, rows) for stack in (gate_up, down)):
        return plain.experts(rows, chosen, weights, gate_up, down)
    tile = _tile(count * k / number)
    source, owner, place = _lay_out(chosen.astype(mx.int32), number, tile.height)
    slots = owner.size * tile.height
    inside = _grouped(rows, gate_up, tile, owner, source, slots)
    out = _grouped(inside, down, tile, owner, None, slots)
    kernel = _kernel("routing.cu", f"dgemma::combine<{hidden}, {k}>(y, place, weights, out);", "y place weights", "out")
    return _run(kernel, [out, place, weights.astype(mx.float32)], (count, 1), hidden // 8, ((count, hidden), rows.dtype))[0]


def _lay_out(chosen: mx.array, experts: int, size: int) -> tuple[mx.array, mx.array, mx.array]:
    """The pairs of a row and an expert, `chosen [T, k]`, in tiles of `size` rows, each of one expert.

        chosen 2 0 2 | experts 3, size 2:   tiles  [row 1, -]  [row 0, row 2]  unused...   owner 0 2 3 ...

    Returns the row that fills each place `[tiles size]`, each tile's expert `[tiles]`, and the place of each pair `[T, k]`.
    There are as many tiles as the worst choice could need, so that their number is known beforehand.
    """
    pairs = chosen.size
    tiles = pairs // size + min(experts, pairs)
    body = (
        "const int pairs = chosen_shape[0] * chosen_shape[1], size = tile_shape[0];"
        f"dgemma::lay_out<{experts}, {chosen.shape[1]}>(chosen, source, owner, place, size, pairs, pairs / size + min({experts}, pairs));"
    )
    kernel = _kernel("routing.cu", body, "chosen tile", "source owner place")
    outputs = ((tiles * size,), mx.int32), ((tiles,), mx.int32), (chosen.shape, mx.int32)
    return tuple(_run(kernel, [chosen, _zeros(size)], (experts, 1), 256, *outputs))  # a shape tells the size sooner than memory


# -- rows -------------------------------------------------------------------------------------------------------------


@_of_bfloat16
def add_normed(x: mx.array, branch: mx.array, weight: mx.array, eps: float) -> mx.array:
    """As plain.add_normed, rounded once."""
    body = f"dgemma::add_normed<{x.shape[-1]}>(x, branch, weight, {eps!r}f, out);"
    kernel = _kernel("rows.cu", body, "x branch weight", "out")
    return _run(kernel, [x, branch, weight], (x.size // x.shape[-1], 1), x.shape[-1] // 8, (x.shape, x.dtype))[0]


@_of_bfloat16
def merge(
    x: mx.array,
    dense: mx.array,
    sparse: mx.array,
    weights: tuple[mx.array, mx.array, mx.array],
    eps: float,
    scalar: mx.array,
) -> mx.array:
    """As plain.merge, rounded once."""
    body = f"dgemma::merge<{x.shape[-1]}>(x, dense, sparse, first, second, third, scalar, {eps!r}f, out);"
    kernel = _kernel("rows.cu", body, "x dense sparse first second third scalar", "out")
    given = [x, dense, sparse, *weights, scalar]
    return _run(kernel, given, (x.size // x.shape[-1], 1), x.shape[-1] // 8, (x.shape, x.dtype))[0]


def geglu(gate: mx.array, up: mx.array) -> mx.array:
    """As plain.geglu, rounded once."""
    if gate.dtype != mx.bfloat16 or gate.size % 8:
        return plain.geglu(gate, up)
    kernel = _kernel("rows.cu", "dgemma::geglu(gate, up, out, size[0]);", "gate up size", "out")
    return _run(kernel, [gate, up, _size(gate.size)], (-(-gate.size // 2048), 1), 256, (gate.shape, gate.dtype))[0]


@functools.lru_cache(maxsize=64)
def _size(count: int) -> mx.array:
    return mx.array([count], mx.int32)


def heads(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    query_weight: mx.array,
    key_weight: mx.array,
    eps: float,
    angles: Angles,
) -> tuple[mx.array, mx.array, mx.array]:
    """As plain.heads, in one launch and rounded once."""
    width = queries.shape[-1]
    if queries.dtype != mx.bfloat16 or width not in (256, 512):
        return plain.heads(queries, keys, values, query_weight, key_weight, eps, angles)
    kernel = _kernel("rows.cu", HEADS.replace("EPS", f"{eps!r}f"), *HEADS_NAMES, views=True)
    positions = queries.shape[0] * queries.shape[2] * (queries.shape[1] + 2 * keys.shape[1])
    given = [queries, keys, values, query_weight, key_weight, *angles]
    outputs = [(x.shape, x.dtype) for x in (queries, keys, values)]
    return tuple(_run(kernel, given, (-(-positions // 8), 1), 256, *outputs))


HEADS_NAMES = "queries keys values query_weight key_weight cos sin", "new_queries new_keys new_values"
HEADS = """
  const int H = queries_shape[1], KV = keys_shape[1], L = queries_shape[2], E = queries_shape[3], all = H + 2 * KV;
  const int row = blockIdx.x * 8 + (threadIdx.x >> 5), l = row % L, b = row / L / all, h = row / L % all, k = (h - H) % KV;
  if (b >= queries_shape[0]) return;
  const bool query = h < H, key = !query && h < H + KV;
  const size_t turn = (cos_shape[0] == 1 ? 0 : (size_t)b * L * E) + (size_t)l * E;
  const auto x = query ? queries + b * queries_strides[0] + h * queries_strides[1] + l * queries_strides[2]
                 : key ? keys + b * keys_strides[0] + k * keys_strides[1] + l * keys_strides[2]
                       : values + b * values_strides[0] + k * values_strides[1] + l * values_strides[2];
  const auto out = (query ? new_queries : key ? new_keys : new_values) + ((size_t)(query ? b * H + h : b * KV + k) * L + l) * E;
  const auto weight = query ? query_weight : key ? key_weight : nullptr;
  const float* turned = query || key ? cos + turn : nullptr;
  if (E == 256) dgemma::head<256>(x, weight, turned, sin + turn, EPS, out);
  if (E == 512) dgemma::head<512>(x, weight, turned, sin + turn, EPS, out);
"""


# -- the vocabulary ---------------------------------------------------------------------------------------------------


def believe(
    scores: mx.array, cap: float, t: float, uniforms: mx.array
) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array]:
    """As plain.believe, in one launch: see cu/vocabulary.cu."""
    rows, vocabulary = scores.shape
    if scores.dtype != mx.bfloat16 or vocabulary % 8:
        return plain.believe(scores, cap, t, uniforms)
    body = f"dgemma::believe<{vocabulary}>(scores, bounds, uniforms, best, entropy, confidence, drawn, probabilities);"
    names = "scores bounds uniforms", "best entropy confidence drawn probabilities"
    kernel = _kernel("vocabulary.cu", body, *names)
    each, whole = ((rows,), mx.float32), ((rows,), mx.int32)
    outputs = whole, each, each, whole, ((rows, vocabulary), scores.dtype)
    return tuple(_run(kernel, [scores, mx.array([cap, t]), uniforms], (rows, 1), 1024, *outputs))
