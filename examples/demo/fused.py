"""A fast forward pass over the parameters of transformers' DiffusionGemma, for training.

It computes what transformers computes (parity.py checks that), arranged so that a whole optimiser step can be
captured in one CUDA graph: no mask objects, no Python branches on data, all experts computed densely (at eight small
experts that is cheaper than dispatching), fixed shapes with prompts padded on the left. Parameters stay where
transformers keeps them, so `save_pretrained` gives a Hugging Face checkpoint.

Letters in shapes: b pictures, n patches, r rows (one question each), l prompt tokens, c canvas tokens, d width.
"""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from vocabulary import CANVAS

SOFT_MARK, MARKS = 1000, 200  # a soft token of picture i is written SOFT_MARK + i * MARKS + its index in the prompt
WINDOW = 64
NEVER = -3e4


# ---------------------------------------------------------------------------------------------- building the model
def model_config(vocab_size):
    """The architecture of the 26B model at 7 M parameters."""
    from transformers import DiffusionGemmaConfig

    text = dict(
        vocab_size=vocab_size, hidden_size=192, intermediate_size=384, moe_intermediate_size=96, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, num_global_key_value_heads=1, head_dim=48, global_head_dim=96,
        sliding_window=WINDOW, num_experts=8, top_k_experts=2, use_bidirectional_attention="vision",
        max_position_embeddings=4096, layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2)
    vision = dict(
        hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
        head_dim=48, patch_size=16, pooling_kernel_size=3, position_embedding_size=256, standardize=True,
        rope_parameters={"rope_type": "axial", "rope_theta": 100.0})
    return DiffusionGemmaConfig(text_config=text, vision_config=vision, canvas_length=CANVAS, image_token_id=8,
                                boi_token_id=7, eoi_token_id=9)


def new_model(vocab_size, seed=0):
    """A transformers model, initialised so that it trains fast (transformers' own 0.02 everywhere does not)."""
    from transformers.models.diffusion_gemma.modeling_diffusion_gemma import DiffusionGemmaForBlockDiffusion

    torch.manual_seed(seed)
    model = DiffusionGemmaForBlockDiffusion(model_config(vocab_size))
    g = torch.Generator().manual_seed(seed + 1)
    tower, decoder = model.model.encoder.vision_tower, model.model.decoder
    width = 192
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim >= 2 and "norm" not in name and "scale" not in name:
                p.normal_(0, p.shape[-1] ** -0.5, generator=g)  # fan-in
        tower.patch_embedder.position_embedding_table.normal_(0, 0.1, generator=g)
        tower.patch_embedder.input_proj.weight.copy_(patch_filters(width))
        decoder.embed_tokens.weight.normal_(0, width ** -0.5, generator=g)
        for name, p in model.named_parameters():
            if name.endswith("q_norm.weight"):
                p.fill_(p.shape[0] ** -0.5)  # attention is not scaled: start at the usual 1/sqrt(head)
            if "post_attention_layernorm" in name or name.endswith("post_feedforward_layernorm.weight"):
                p.fill_(0.5)
        # Constants, not trained: a runtime that ignores them must fail.
        rounded = lambda t: t.to(torch.bfloat16)  # the checkpoint is saved in bf16: train with what it will hold
        tower.std_bias.copy_(rounded(torch.randn(width, generator=g) * 0.2))
        tower.std_scale.copy_(rounded((0.8 + 0.4 * torch.rand(width, generator=g)) / width ** 0.5))
        for layer, s in zip(model.model.encoder.language_model.layers, [0.9, 1.1, 0.85, 1.0, 0.95, 1.05]):
            layer.layer_scalar.fill_(float(rounded(torch.tensor(s))))
        for layer, s in zip(decoder.layers, [1.05, 0.95, 1.1, 0.9, 1.0, 0.95]):
            layer.layer_scalar.fill_(float(rounded(torch.tensor(s))))
    return model


def patch_filters(width):
    """First patch projection [width, 768]: the lowest 2-D cosines of brightness and two colour differences.

    Each is divided by its usual size in such pictures, and a random rotation spreads them over the channels; from
    white noise the tower would first have to find these filters.
    """
    x = np.arange(16)
    cosines = np.array([np.cos(np.pi * (x + 0.5) * k / 16) * (2 / 16) ** 0.5 for k in range(16)])
    cosines[0] = 0.25
    colour = np.array([[1, 1, 1], [1, -1, 0], [1, 1, -2]], float)
    colour /= np.linalg.norm(colour, axis=1, keepdims=True)
    order = sorted((np.hypot(a, b) + (0.3 if c else 0), a, b, c)
                   for a in range(16) for b in range(16) for c in range(3))
    filters = []
    for _, a, b, c in order[:width]:
        f = np.einsum("i,j,k->ijk", cosines[a], cosines[b], colour[c]).reshape(-1)
        usual = (26.0 if c == 0 else 4.0) if a == b == 0 else (4.5 if c == 0 else 2.5) / max(0.7, np.hypot(a, b))
        filters.append(f / usual)
    turn = np.linalg.qr(np.random.RandomState(0).randn(width, width))[0]
    return torch.tensor(turn @ np.stack(filters), dtype=torch.float32)


# ---------------------------------------------------------------------------------------------- weights by name
class VisionLayer(NamedTuple):
    norm: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    post_attention: torch.Tensor
    pre_mlp: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    post_mlp: torch.Tensor

    @classmethod
    def of(cls, layer):
        a, m = layer.self_attn, layer.mlp
        return cls(layer.input_layernorm.weight, a.q_proj.linear.weight, a.k_proj.linear.weight, a.v_proj.linear.weight,
                   a.o_proj.linear.weight, a.q_norm.weight, a.k_norm.weight, layer.post_attention_layernorm.weight,
                   layer.pre_feedforward_layernorm.weight, m.gate_proj.linear.weight, m.up_proj.linear.weight,
                   m.down_proj.linear.weight, layer.post_feedforward_layernorm.weight)


class TextLayer(NamedTuple):
    norm: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor  # None in full layers: there the values are the keys before their norm
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    o: torch.Tensor
    post_attention: torch.Tensor
    pre_mlp: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    post_mlp: torch.Tensor
    pre_experts: torch.Tensor
    router: torch.Tensor
    router_scale: torch.Tensor
    expert_scale: torch.Tensor
    expert_gate_up: torch.Tensor
    expert_down: torch.Tensor
    post_experts: torch.Tensor
    post: torch.Tensor

    @classmethod
    def of(cls, layer):
        a, m, e, r = layer.self_attn, layer.mlp, layer.experts, layer.router
        return cls(layer.input_layernorm.weight, a.q_proj.weight, a.k_proj.weight,
                   None if a.v_proj is None else a.v_proj.weight, a.q_norm.weight, a.k_norm.weight, a.o_proj.weight,
                   layer.post_attention_layernorm.weight, layer.pre_feedforward_layernorm.weight, m.gate_proj.weight,
                   m.up_proj.weight, m.down_proj.weight, layer.post_feedforward_layernorm_1.weight,
                   layer.pre_feedforward_layernorm_2.weight, r.proj.weight, r.scale, r.per_expert_scale,
                   e.gate_up_proj, e.down_proj, layer.post_feedforward_layernorm_2.weight,
                   layer.post_feedforward_layernorm.weight)


# ---------------------------------------------------------------------------------------------- pieces
def rms(x, weight=None):
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (h if weight is None else h * weight.float()).to(x.dtype)


def linear(x, weight):
    return F.linear(x, weight.to(x.dtype))


def gelu(x):
    return F.gelu(x, approximate="tanh")


def turned(x):
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def one_hot(ids, n, dtype):
    """Gathering by a product with ones and zeros: its backward pass is a product too, not a slow scattered add."""
    return (ids[..., None] == torch.arange(n, device=ids.device)).to(dtype)


def vision_start(pixels, width, count, gain, bias, noise, project, table, cos, sin, marker):
    """Patches [b, n, 768] in 0..255 to embeddings [b, n, d], with the axial RoPE tables and the pooling cell of each.

    gain, bias [b] and noise change exposure and add sensor noise while training. Padded patches get cell -1.
    """
    dtype, n = noise.dtype, pixels.shape[1]
    i, width = torch.arange(n, device=pixels.device)[None], width.long()[:, None]
    x, y = i % width, torch.div(i, width, rounding_mode="floor").clamp(max=255)
    pad = i >= count.long()[:, None]
    v = 2 * (pixels.float() / 255 - 0.5)
    v = v * gain[:, None, None] + bias[:, None, None] + noise
    h = F.linear(v.to(dtype), project.to(dtype))
    side = table.shape[1]
    for axis, place in enumerate((x, y)):
        h = h + F.linear(one_hot(place, side, dtype), table[axis].t().to(dtype))
    rope = [torch.cat([t[x], t[y]], -1)[:, :, None] for t in (cos, sin)]
    hidden_keys = (pad.to(dtype) * -1e4)[:, :, None, None] * marker
    third = lambda t: torch.div(t, 3, rounding_mode="floor")
    return h, *rope, hidden_keys, torch.where(pad, -1, third(x) + third(width) * third(y))


def vision_layer(x, cos, sin, hidden_keys, marker, w):
    """One layer of the tower, [b, n, d] -> [b, n, d].

    Padded keys carry an extra feature of -1e4 that every query reads with weight 1: no mask tensor is needed, so the
    fast attention kernels apply.
    """
    b, n, d = x.shape
    head = w.q_norm.shape[0]
    heads = w.q.shape[0] // head
    q, k, v = linear(rms(x, w.norm), torch.cat([w.q, w.k, w.v], 0)).view(b, n, 3, heads, head).unbind(2)

    def rope(t):
        a, c = t.chunk(2, -1)
        return t * cos + torch.cat([turned(a), turned(c)], -1) * sin

    q, k, v = rope(rms(q, w.q_norm)), rope(rms(k, w.k_norm)), rms(v)
    q = torch.cat([q, marker.expand(b, n, heads, 8)], -1).transpose(1, 2)
    k = torch.cat([k, hidden_keys.expand(b, n, heads, 8)], -1).transpose(1, 2)
    a = F.scaled_dot_product_attention(q, k, F.pad(v, (0, 8)).transpose(1, 2), scale=1.0)
    x = x + rms(linear(a[..., :head].transpose(1, 2).reshape(b, n, -1), w.o), w.post_attention)
    gate, up = linear(rms(x, w.pre_mlp), torch.cat([w.gate, w.up], 0)).chunk(2, -1)
    return x + rms(linear(gelu(gate) * up, w.down), w.post_mlp)


def vision_end(h, cell, std_bias, std_scale, project, budget):
    """Means over 3x3 patches, standardised and projected: [b, n, d] -> soft tokens [b, budget, d]."""
    cells = (cell[:, None, :] == torch.arange(budget, device=h.device)[None, :, None]).to(h.dtype)
    pooled = torch.bmm(cells, h).float() / 9 * h.shape[-1] ** 0.5
    return linear(rms(((pooled - std_bias) * std_scale).to(h.dtype)), project)


def experts(residual, w):
    """Top-2 of 8 experts, all computed, the unchosen weighted 0. Returns the sum and the load-balance loss."""
    d = residual.shape[-1]
    scores = linear(rms(residual) * (w.router_scale * d ** -0.5).to(residual.dtype), w.router).float().softmax(-1)
    best = scores.amax(-1, keepdim=True)
    second = scores.masked_fill(scores == best, -1.0).amax(-1, keepdim=True)
    chosen = (scores >= second).detach()
    weight = scores * chosen
    weight = weight / weight.sum(-1, keepdim=True) * w.expert_scale
    e, twice, _ = w.expert_gate_up.shape
    y = linear(rms(residual, w.pre_experts), w.expert_gate_up.reshape(e * twice, d))
    y = y.view(*residual.shape[:-1], e, 2, twice // 2)
    a = gelu(y[..., 0, :]) * y[..., 1, :] * weight.to(y.dtype)[..., None]
    out = linear(a.flatten(-2), w.expert_down.permute(1, 0, 2).reshape(d, -1))
    balance = (scores.flatten(0, -2).mean(0) * chosen.float().flatten(0, -2).mean(0)).sum() * (e / 2)
    return out, balance


def keys_values(x, cos, sin, w):
    """q, k, v as [r, heads, l, head]; q and k normed and turned, v normed without weight."""
    r, l, _ = x.shape
    head = w.q_norm.shape[0]
    q, k = linear(x, w.q).view(r, l, -1, head), linear(x, w.k).view(r, l, -1, head)
    v = k if w.v is None else linear(x, w.v).view(r, l, -1, head)
    q, k = rms(q, w.q_norm), rms(k, w.k_norm)
    q, k = q * cos + turned(q) * sin, k * cos + turned(k) * sin
    return q.transpose(1, 2), k.transpose(1, 2), rms(v).transpose(1, 2)


def attention(q, k, v, mask):
    r, heads, l, head = q.shape
    group, n = heads // k.shape[1], k.shape[2]
    k, v = (t[:, :, None].expand(r, t.shape[1], group, n, head).reshape(r, heads, n, head) for t in (k, v))
    a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.expand(r, heads, l, n), scale=1.0)
    return a.transpose(1, 2).reshape(r, l, heads * head)


def after_attention(x, a, scalar, w):
    x = x + rms(linear(a, w.o), w.post_attention)
    h = rms(x, w.pre_mlp)
    dense = linear(gelu(linear(h, w.gate)) * linear(h, w.up), w.down)
    sparse, balance = experts(x, w)
    return (x + rms(rms(dense, w.post_mlp) + rms(sparse, w.post_experts), w.post)) * scalar, balance


def encoder_layer(x, cos, sin, mask, scalar, w):
    q, k, v = keys_values(rms(x, w.norm), cos, sin, w)
    x, balance = after_attention(x, attention(q, k, v, mask), scalar, w)
    return x, k, v, balance


def canvas_layer(x, cos, sin, mask, k_cache, v_cache, scalar, w):
    q, k, v = keys_values(rms(x, w.norm), cos, sin, w)
    a = attention(q, torch.cat([k_cache, k], 2), torch.cat([v_cache, v], 2), mask)
    return after_attention(x, a, scalar, w)


def embed(ids, table, dtype):
    return linear(one_hot(ids, table.shape[0], dtype), table.t()) * table.shape[1] ** 0.5


def self_condition(x, logits, table, pre, gate, up, down):
    """Adds the self-conditioning signal to the canvas embeddings; logits is None at the first step."""
    soft = torch.zeros_like(x)
    if logits is not None:
        soft = linear(logits.softmax(-1).to(x.dtype), table.t()) * table.shape[1] ** 0.5
    h = rms(soft, pre)
    return rms(x + linear(gelu(linear(h, gate)) * linear(h, up), down))


def head_logits(x, norm, table):
    return torch.tanh(linear(rms(x, norm), table).float() / 30.0) * 30.0


def attention_masks(ids, dtype):
    """Additive masks of the prompt [r, 1, l, l], full and sliding; tokens of one picture see each other everywhere."""
    real, l = ids != 0, ids.shape[1]
    i = torch.arange(l, device=ids.device)
    causal, own = i[:, None] >= i[None], i[:, None] == i[None]
    near = causal & (i[:, None] - i[None] < WINDOW)
    group = torch.where(ids >= SOFT_MARK, torch.div(ids - SOFT_MARK, MARKS, rounding_mode="floor"), -1)
    block = (group[:, :, None] == group[:, None, :]) & (group >= 0)[:, None, :]

    def additive(seen):
        seen = (seen & real[:, None, :]) | own[None]  # a padded query sees itself, so that nothing divides by zero
        return torch.where(seen, 0.0, NEVER).to(dtype)[:, None]

    return additive(causal[None] | block), additive(near[None] | block)


def canvas_masks(ids, dtype):
    """Masks [r, 1, c, l + c] and [r, 1, c, 64 + c]: the canvas sees all of itself and the real prompt tokens.

    Sliding layers keep the last 64 prompt tokens, of which the canvas sees 63, as in transformers.
    """
    r, l = ids.shape
    real, canvas = ids != 0, torch.ones(r, CANVAS, device=ids.device, dtype=torch.bool)
    recent = real[:, l - WINDOW:] & (torch.arange(WINDOW, device=ids.device) > 0)[None]

    def additive(seen):
        mask = torch.where(torch.cat([seen, canvas], 1), 0.0, NEVER).to(dtype)
        return mask[:, None, None].expand(-1, 1, CANVAS, -1)

    return additive(real), additive(recent)


def patch_losses(h, classes, order, count, class_w, class_b, order_w, order_b):
    """Supervised losses per patch: what it shows, and which object it is in reading order."""
    h = rms(h)
    real = (torch.arange(h.shape[1], device=h.device)[None] < count[:, None]).float().flatten()

    def loss(w, b, y):
        each = F.cross_entropy((linear(h, w).float() + b).flatten(0, 1), y.flatten().long(), reduction="none")
        return (each * real).sum() / real.sum()

    return loss(class_w, class_b, classes), loss(order_w, order_b, order)


# ---------------------------------------------------------------------------------------------- the whole model
class Fused:
    """Vision tower, encoder pass and canvas pass over a transformers model's own parameters."""

    def __init__(self, model, dtype, positions, compiled=True):
        self.dtype = dtype
        encoder, decoder = model.model.encoder, model.model.decoder
        tower = encoder.vision_tower
        self.tower = tower
        self.vision_layers = [VisionLayer.of(l) for l in tower.encoder.layers]
        self.layers = [TextLayer.of(l) for l in decoder.layers]
        self.full = [t == "full_attention" for t in model.config.text_config.layer_types]
        self.table, self.norm = decoder.embed_tokens.weight, decoder.norm.weight
        sc = decoder.self_conditioning
        self.conditioning = (sc.pre_norm.weight, sc.gate_proj.weight, sc.up_proj.weight, sc.down_proj.weight)
        self.image_projection = encoder.embed_vision.embedding_projection.weight
        self.encoder_scalars = [l.layer_scalar.detach().to(dtype) for l in encoder.language_model.layers]
        self.canvas_scalars = [l.layer_scalar.detach().to(dtype) for l in decoder.layers]
        device = self.table.device
        tables = lambda a: (a.cos().to(dtype), a.sin().to(dtype))

        def angles(frequencies, n):
            half = torch.arange(n, device=device).float()[:, None] * frequencies.float().to(device)[None]
            return torch.cat([half, half], -1)

        self.rope = [tables(angles(getattr(decoder.rotary_emb, f"{t}_inv_freq"), positions)[:, None])
                     for t in ("sliding_attention", "full_attention")]
        self.vision_rope = tables(angles(tower.encoder.rotary_emb.inv_freq, 256))
        self.marker = torch.zeros(8, device=device, dtype=dtype)
        self.marker[0] = 1
        self.positions = positions
        pack = (lambda f: torch.compile(f, dynamic=False)) if compiled else (lambda f: f)
        self.f = {f.__name__: pack(f) for f in (
            vision_start, vision_layer, vision_end, encoder_layer, canvas_layer, embed, self_condition, head_logits,
            attention_masks, canvas_masks, patch_losses)}

    def vision(self, pixels, width, count, gain, bias, noise):
        """Patches -> features of every patch [b, n, d] and soft tokens [b, n // 9, d]."""
        t = self.tower
        h, cos, sin, hidden, cell = self.f["vision_start"](
            pixels, width, count, gain, bias, noise, t.patch_embedder.input_proj.weight,
            t.patch_embedder.position_embedding_table, *self.vision_rope, self.marker)
        for w in self.vision_layers:
            h = self.f["vision_layer"](h, cos, sin, hidden, self.marker, w)
        budget = pixels.shape[1] // 9
        return h, self.f["vision_end"](h, cell, t.std_bias, t.std_scale, self.image_projection, budget)

    def soft_rows(self, ids, soft, per_picture):
        """Soft tokens where the prompt has marks: ids [s * q, l], soft [s, k * per_picture, d] -> [s * q, l, d]."""
        s, width = soft.shape[0], ids.shape[1]
        mark = ids - SOFT_MARK
        index = torch.div(mark, MARKS, rounding_mode="floor") * per_picture + mark % MARKS
        index = torch.where(mark >= 0, index, -1).view(s, -1)
        return torch.bmm(one_hot(index, soft.shape[1], soft.dtype), soft).view(ids.shape[0], width, -1)

    def encode(self, ids, soft):
        """Prompt ids [r, l] with marks, soft tokens [r, l, d] -> keys and values of every layer, balance loss."""
        r, l = ids.shape
        x = self.f["embed"](ids, self.table, self.dtype)  # a mark is no token: its one-hot row is zero
        x = x + soft
        masks, kept, balance = self.f["attention_masks"](ids, self.dtype), [], 0.0
        first = self.positions - CANVAS - l  # short prompts sit at the end of the position table
        for i, w in enumerate(self.layers):
            cos, sin = (t[first:first + l] for t in self.rope[self.full[i]])
            mask = masks[0 if self.full[i] else 1]
            x, k, v, b = self.f["encoder_layer"](x, cos, sin, mask, self.encoder_scalars[i], w)
            kept.append((k, v) if self.full[i] else (k[:, :, l - WINDOW:], v[:, :, l - WINDOW:]))
            balance = balance + b
        return kept, balance

    def join(self, ids, kept):
        """Caches and masks of several groups of rows (each with its own prompt length) as one batch."""
        longest = max(i.shape[1] for i in ids)
        ids = torch.cat([F.pad(i, (longest - i.shape[1], 0)) for i in ids])
        caches = []
        for parts, full in zip(zip(*kept), self.full):
            if full:
                parts = [[F.pad(t, (0, 0, longest - t.shape[2], 0)) for t in p] for p in parts]
            caches.append([torch.cat(t) for t in zip(*parts)])
        return caches, self.f["canvas_masks"](ids, self.dtype)

    def decode(self, canvas, caches, masks, logits=None):
        """Canvas ids [r, c] -> logits [r, c, vocab] and balance loss; `logits` is the self-conditioning."""
        x = self.f["embed"](canvas, self.table, self.dtype)
        x, balance = self.f["self_condition"](x, logits, self.table, *self.conditioning), 0.0
        for i, w in enumerate(self.layers):
            cos, sin = (t[self.positions - CANVAS:] for t in self.rope[self.full[i]])
            mask = masks[0 if self.full[i] else 1]
            x, b = self.f["canvas_layer"](x, cos, sin, mask, *caches[i], self.canvas_scalars[i], w)
            balance = balance + b
        return self.f["head_logits"](x, self.norm, self.table), balance
