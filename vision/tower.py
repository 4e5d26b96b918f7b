"""The vision tower (Gemma 4's): patches of one or several pictures of one grid -> soft tokens.

Modules carry the names of the checkpoint under `model.encoder.vision_tower.`. Letters: B pictures, N patches of each,
P numbers of a patch, D hidden, H heads, K key/value heads, E head width. Pictures are never padded, so nothing is masked.
The mathematics is transformers' `Gemma4VisionModel`; the axial rotary positions are those of arXiv 2403.13298, section 3.
"""

import mlx.core as mx
import numpy as np
from mlx import nn

from dgemma import kernels
from dgemma.attention import AttentionRead
from dgemma.config import VisionConfig
from dgemma.errors import ImageError


class RMSNorm(nn.Module):
    """x / rms(x) over the last axis, times a weight if there is one; computed in float32, returned in x's dtype."""

    def __init__(self, size: int, eps: float, weighted: bool = True):
        super().__init__()
        self.eps = eps
        if weighted:
            self.weight = mx.ones((size,))

    def __call__(self, x: mx.array) -> mx.array:
        return kernels.rms_norm(x, self.get("weight"), self.eps)

    def added_to(self, x: mx.array, branch: mx.array) -> mx.array:
        """The residual `x` plus the normed `branch`."""
        return kernels.add_normed(x, branch, self.weight, self.eps)


class ClippableLinear(nn.Module):
    """A projection without bias; `use_clipped_linears` checkpoints bound what goes in and what comes out."""

    def __init__(self, config: VisionConfig, inputs: int, outputs: int):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)
        self._clipped = config.use_clipped_linears
        if self._clipped:
            self.input_min = self.output_min = mx.array(-float("inf"))
            self.input_max = self.output_max = mx.array(float("inf"))

    def __call__(self, x: mx.array) -> mx.array:
        if not self._clipped:
            return kernels.linear(x, self.linear)
        # The bounds may be stored in another dtype than the activations, and must not raise them to it.
        x = mx.clip(x, self.input_min.astype(x.dtype), self.input_max.astype(x.dtype))
        x = kernels.linear(x, self.linear)
        return mx.clip(x, self.output_min.astype(x.dtype), self.output_max.astype(x.dtype))


def axial_angles(positions: np.ndarray, head_dim: int, theta: float) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and signed sine, float32 [N, 1, 2, E/2], of int positions [N, 2]: x turns a head's first half, y the second.

    Within a half, value i pairs with value i + E/4. The sine's first quarter is negated, as in dgemma.attention.rope.
    """
    half = head_dim // 2
    frequencies = 1 / np.float32(theta) ** (np.arange(0, half, 2, dtype=np.float32) / half)  # [E/4]
    turns = positions[:, None, :, None].astype(np.float32) * frequencies  # [N, 1, 2, E/4]
    cos, sin = np.cos(turns), np.sin(turns)
    return np.concatenate([cos, cos], axis=-1), np.concatenate([-sin, sin], axis=-1)


def rotate(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """Turn heads [B, N, H, E] by the angles of their patches [N, 1, 2, E/2]."""
    halves = x.reshape(*x.shape[:-1], 2, -1)  # [B, N, H, 2, E/2]
    return kernels.rotate(halves, (cos, sin)).reshape(x.shape)  # [B, N, H, E]


class Attention(nn.Module):
    """Every patch sees every patch of its picture; scale 1, because queries and keys are normed."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        width, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self._head_dim = config.head_dim
        self.q_proj = ClippableLinear(config, width, heads * config.head_dim)
        self.k_proj = ClippableLinear(config, width, kv_heads * config.head_dim)
        self.v_proj = ClippableLinear(config, width, kv_heads * config.head_dim)
        self.o_proj = ClippableLinear(config, heads * config.head_dim, width)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.v_norm = RMSNorm(config.head_dim, config.rms_norm_eps, weighted=False)

    def __call__(self, x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
        queries = rotate(self.q_norm(self._heads(self.q_proj(x))), cos, sin).swapaxes(1, 2)  # [B, H, N, E]
        keys = rotate(self.k_norm(self._heads(self.k_proj(x))), cos, sin).swapaxes(1, 2)  # [B, K, N, E]
        values = self.v_norm(self._heads(self.v_proj(x))).swapaxes(1, 2)
        out = AttentionRead(keys, values, mask=None).attend(queries, scale=1.0).swapaxes(1, 2)
        return self.o_proj(out.reshape(*x.shape[:-1], -1))  # [B, N, H * E]

    def _heads(self, x: mx.array) -> mx.array:
        return x.reshape(*x.shape[:-1], -1, self._head_dim)  # [B, N, H or K, E]


class MLP(nn.Module):
    """GeGLU: down(gelu(gate(x)) * up(x)), the tanh approximation of gelu."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.gate_proj = ClippableLinear(config, config.hidden_size, config.intermediate_size)
        self.up_proj = ClippableLinear(config, config.hidden_size, config.intermediate_size)
        self.down_proj = ClippableLinear(config, config.intermediate_size, config.hidden_size)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(kernels.geglu(self.gate_proj(x), self.up_proj(x)))


class EncoderLayer(nn.Module):
    """Attention, then GeGLU, each between two norms and added to its input."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def __call__(self, x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
        x = self.post_attention_layernorm.added_to(x, self.self_attn(self.input_layernorm(x), cos, sin))
        return self.post_feedforward_layernorm.added_to(x, self.mlp(self.pre_feedforward_layernorm(x)))


class Encoder(nn.Module):
    """The stack of layers."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.layers = [EncoderLayer(config) for _ in range(config.num_hidden_layers)]

    def __call__(self, x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


class PatchEmbedder(nn.Module):
    """Pixels 0..1 -> hidden [B, N, D]: a projection plus a learned row for x and one for y."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.input_proj = nn.Linear(3 * config.patch_size**2, config.hidden_size, bias=False)
        self.position_embedding_table = mx.zeros((2, config.position_embedding_size, config.hidden_size))

    def __call__(self, pixels: mx.array, positions: np.ndarray) -> mx.array:
        # The activation dtype is the table's. The projection's own weight may be packed into uint32 by quantisation,
        # and pixels cast to that are all 0 or 1.
        table = self.position_embedding_table
        scaled = (2 * (pixels.astype(mx.float32) - 0.5)).astype(table.dtype)
        x, y = mx.array(positions[:, 0]), mx.array(positions[:, 1])
        return kernels.linear(scaled, self.input_proj) + (table[0][x] + table[1][y])


class VisionTower(nn.Module):
    """Patches of pictures of one grid -> one soft token for every 3x3 (pooling) of them."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self._config = config
        self.patch_embedder = PatchEmbedder(config)
        self.encoder = Encoder(config)
        if config.standardize:
            self.std_bias = mx.zeros((config.hidden_size,))
            self.std_scale = mx.ones((config.hidden_size,))

    def __call__(self, pixels: mx.array, positions) -> mx.array:
        """pixels float [B, N, P] or [N, P] in 0..1, positions int [N, 2] (numpy or mlx) in reading order.

        Returns [B, N / pooling², D] (or without B) in the activation dtype. ImageError if the grid is larger than the
        checkpoint's table of positions.
        """
        if pixels.ndim == 2:
            return self(pixels[None], positions)[0]
        positions = np.array(positions)
        columns, rows = _grid(positions, self._config)
        hidden = self.patch_embedder(pixels, positions)
        cos, sin = axial_angles(positions, self._config.head_dim, self._config.rope_theta)
        cos, sin = mx.array(cos).astype(hidden.dtype), mx.array(sin).astype(hidden.dtype)
        pooled = self._pool(self.encoder(hidden, cos, sin), columns, rows)
        if self._config.standardize:
            pooled = (pooled - self.std_bias.astype(mx.float32)) * self.std_scale.astype(mx.float32)
        return pooled.astype(hidden.dtype)

    def _pool(self, hidden: mx.array, columns: int, rows: int) -> mx.array:
        """Means of pooling x pooling neighbours times sqrt(D): float32 [B, N / pooling², D]."""
        side, (batch, _, width) = self._config.pooling_kernel_size, hidden.shape
        # In float32 until standardised: times sqrt(D) the largest activations pass float16's 65,504.
        tiles = hidden.astype(mx.float32).reshape(
            batch, rows // side, side, columns // side, side, width
        )  # [B, rows / side, side, columns / side, side, D]
        return tiles.mean(axis=(2, 4)).reshape(batch, -1, width) * width**0.5  # [B, N / side², D]


def _grid(positions: np.ndarray, config: VisionConfig) -> tuple[int, int]:
    """(columns, rows) of positions [N, 2] in reading order."""
    columns, rows = (int(n) + 1 for n in positions[-1])
    side, table = config.pooling_kernel_size, config.position_embedding_size
    if columns * rows != len(positions) or columns % side or rows % side:
        raise ValueError(f"{len(positions)} positions are not a grid of {columns}x{rows} whole {side}x{side} tiles")
    if max(columns, rows) > table:  # mlx reads past the end of a table without complaint
        raise ImageError(
            f"an image of {columns}x{rows} patches; this checkpoint has positions for {table} a side: "
            f"crop the image to a less elongated shape or choose a smaller image budget"
        )
    return columns, rows
