"""The layers of the text stack: norms, attention, the dense MLP, the router, the experts, and a block of them all.

The encoder pass and the canvas pass run the same blocks over the same weights. They differ in what a layer attends to,
which arrives as `read`: a function from the layer's new keys and values to an AttentionRead, that is, one verb of its
cache; and in the scalar that ends a layer.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from dgemma.attention import AttentionRead

from . import kernels
from .config import Layer, TextConfig
from .matrices import ExpertStack

Read = Callable[[mx.array, mx.array], AttentionRead]


def one_ahead(x: mx.array, before: mx.array | None) -> mx.array:
    """Start on the layer that ends in `x`, and wait for the one that ended in `before`.

    A GPU lets go of temporaries when they are computed: of two layers', not of thirty's, while the next is laid out.
    """
    mx.async_eval(x)
    if before is not None:
        mx.eval(before)
    return x


class RMSNorm(nn.Module):
    """`x / rms(x) * weight`, computed in float32 (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = mx.ones((size,))
        self.eps = eps

    def __call__(self, x: mx.array) -> mx.array:
        return kernels.rms_norm(x, self.weight, self.eps)


def unweighted_norm(x: mx.array, eps: float) -> mx.array:
    """`x / rms(x)`, computed in float32."""
    return kernels.rms_norm(x, None, eps)


class GeGLU(nn.Module):
    """`down(gelu(gate(x)) * up(x))` (Shazeer 2020, arXiv:2002.05202): the dense MLP, and self-conditioning's."""

    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        gate, up = kernels.linear(x, self.gate_proj), kernels.linear(x, self.up_proj)
        return kernels.linear(kernels.geglu(gate, up), self.down_proj)


class Attention(nn.Module):
    """Self-attention of one layer: normed queries and keys, rotary positions, scale 1.

    Full layers have no value projection: their values are the keys before norm and rotation.
    """

    def __init__(self, config: TextConfig, layer: Layer):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.num_attention_heads, layer.kv_heads, layer.head_dim
        self.eps = config.rms_norm_eps
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        if layer.kind == "sliding_attention":
            self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def __call__(self, x: mx.array, angles: tuple[mx.array, mx.array], read: Read) -> mx.array:
        """`x [B, L, D]` -> `[B, L, D]`."""
        queries = self._heads(kernels.linear(x, self.q_proj), self.heads)
        keys = self._heads(kernels.linear(x, self.k_proj), self.kv_heads)
        values = self._heads(kernels.linear(x, self.v_proj), self.kv_heads) if "v_proj" in self else keys
        queries, keys, values = kernels.heads(
            queries, keys, values, self.q_norm.weight, self.k_norm.weight, self.eps, angles
        )
        out = read(keys, values).attend(queries, scale=1.0)
        return kernels.linear(out.swapaxes(1, 2).reshape(*x.shape[:2], -1), self.o_proj)  # [B, L, H E]

    def _heads(self, x: mx.array, heads: int) -> mx.array:
        return x.reshape(*x.shape[:2], heads, self.head_dim).swapaxes(1, 2)  # [B, heads, L, E]


class Router(nn.Module):
    """Chooses k experts for each row of the raw residual."""

    def __init__(self, config: TextConfig):
        super().__init__()
        self.top_k, self.eps = config.top_k_experts, config.rms_norm_eps
        self.proj = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.scale = mx.ones((config.hidden_size,))
        self.per_expert_scale = mx.ones((config.num_experts,))

    def __call__(self, rows: mx.array) -> tuple[mx.array, mx.array]:
        """Experts and weights `[T, k]` (weights float32) of `rows [T, D]`."""
        # Two multiplications, never one folded scale: their roundings in bf16 decide close calls as the reference does.
        x = unweighted_norm(rows, self.eps) * self.scale * rows.shape[-1] ** -0.5
        chosen, shares = kernels.route(kernels.linear(x, self.proj), self.top_k)
        return chosen, shares * self.per_expert_scale[chosen]


class Experts(nn.Module):
    """The weights of X small GeGLU MLPs, stacked."""

    def __init__(self, config: TextConfig):
        super().__init__()
        experts, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = ExpertStack(experts, hidden, 2 * inner)  # gate first
        self.down_proj = ExpertStack(experts, inner, hidden)

    def __call__(self, rows: mx.array, chosen: mx.array, weights: mx.array) -> mx.array:
        """The weighted sum `[T, D]` of each row's chosen experts."""
        return kernels.experts(rows, chosen, weights, self.gate_up_proj, self.down_proj)


class Block(nn.Module):
    """One layer of the stack: attention, then the dense MLP and the experts side by side, each between norms."""

    def __init__(self, config: TextConfig, layer: Layer):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.eps = eps
        self.self_attn = Attention(config, layer)
        self.mlp = GeGLU(hidden, config.intermediate_size)
        self.router = Router(config)
        self.experts = Experts(config)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.pre_feedforward_layernorm = RMSNorm(hidden, eps)
        self.post_feedforward_layernorm = RMSNorm(hidden, eps)
        self.post_feedforward_layernorm_1 = RMSNorm(hidden, eps)  # after the dense MLP
        self.pre_feedforward_layernorm_2 = RMSNorm(hidden, eps)  # before the experts
        self.post_feedforward_layernorm_2 = RMSNorm(hidden, eps)  # after the experts
        self.layer_scalar = mx.ones((1,))  # of the canvas pass
        self.encoder_layer_scalar = mx.ones((1,))

    def encode(self, x: mx.array, angles: tuple[mx.array, mx.array], read: Read) -> mx.array:
        """The encoder pass over `x [B, L, D]`."""
        return self._layer(x, angles, read, self.encoder_layer_scalar)

    def decode(self, x: mx.array, angles: tuple[mx.array, mx.array], read: Read) -> mx.array:
        """The canvas pass over `x [B, C, D]`."""
        return self._layer(x, angles, read, self.layer_scalar)

    def _layer(self, x: mx.array, angles: tuple[mx.array, mx.array], read: Read, scalar: mx.array) -> mx.array:
        attended = self.self_attn(self.input_layernorm(x), angles, read)
        x = kernels.add_normed(x, attended, self.post_attention_layernorm.weight, self.eps)
        dense = self.mlp(self.pre_feedforward_layernorm(x))
        norms = (self.post_feedforward_layernorm_1, self.post_feedforward_layernorm_2, self.post_feedforward_layernorm)
        return kernels.merge(x, dense, self._mixture(x), tuple(norm.weight for norm in norms), self.eps, scalar)

    def _mixture(self, x: mx.array) -> mx.array:
        rows = x.reshape(-1, x.shape[-1])  # [B L, D]
        chosen, weights = self.router(rows)
        return self.experts(self.pre_feedforward_layernorm_2(rows), chosen, weights).reshape(x.shape)
