"""Tiny random DiffusionGemma checkpoints, rebuilt from numbers wherever they are needed; neither torch nor mlx.

The goldens hold what transformers computed on these weights, not the weights: a tensor is a function of its name
and its shape. Only `RandomState.random_sample` is used, whose stream numpy froze (NEP 19) and which calls no libm,
so every machine gets the same bits.
"""

from __future__ import annotations

import copy
import json
import zlib
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

SLIDING, FULL = "sliding_attention", "full_attention"
PAD, BEGIN_IMAGE, IMAGE, END_IMAGE, FIRST_TEXT = 0, 7, 8, 9, 10  # token ids, as in the demo checkpoint
CANVAS = 8


def _vision(**changes) -> dict:
    """A two-layer tower, 32 wide; `changes` replace keys."""
    return {
        "model_type": "gemma4_vision",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "patch_size": 16,
        "pooling_kernel_size": 3,
        "position_embedding_size": 128,
        "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
        "standardize": True,
        "use_clipped_linears": False,
        "initializer_range": 0.02,
    } | changes


def _config(kinds: str, window: int, hidden: int, vision: dict | None, released: bool = True, **text) -> dict:
    """A whole config.json. `kinds` is one letter a layer (s, f); `released` picks the spelling of the full layers."""
    layers = [SLIDING if kind == "s" else FULL for kind in kinds]
    if released:
        geometry = {"global_head_dim": 32, "num_global_key_value_heads": 1}
    else:
        wide = {"head_dim": 32, "num_key_value_heads": 1}
        geometry = {"per_layer_config": {str(i): dict(wide) for i, kind in enumerate(layers) if kind == FULL}}
    return {
        "architectures": ["DiffusionGemmaForBlockDiffusion"],
        "model_type": "diffusion_gemma",
        "dtype": "float32",
        "canvas_length": CANVAS,
        "boi_token_id": BEGIN_IMAGE,
        "image_token_id": IMAGE,
        "eoi_token_id": END_IMAGE,
        "tie_word_embeddings": True,
        "vision_config": vision,
        "text_config": {
            "model_type": "diffusion_gemma_text",
            "vocab_size": 96,
            "hidden_size": hidden,
            "intermediate_size": 64,
            "moe_intermediate_size": 24,
            "num_hidden_layers": len(layers),
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 4,
            "top_k_experts": 2,
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": window,
            "layer_types": layers,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_bidirectional_attention": "vision",
            "pad_token_id": PAD,
            "eos_token_id": 1,
            "bos_token_id": 2,
            "tie_word_embeddings": True,
            "rope_parameters": {
                SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
                FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
            },
        }
        | geometry
        | text,
    }


CONFIGS = {
    # a window that every prompt with an image overflows; the released spelling
    "ring": _config("ssfssf", window=12, hidden=48, vision=_vision()),
    # a window that one prompt fits and another does not; the spelling that transformers saves
    "wide": _config("ssf", window=64, hidden=32, vision=_vision(), released=False),
    # no image blocks at all: an image is as causal as text; more experts, another soft-cap
    "causal": _config(
        "sfsf", window=12, hidden=48, vision=_vision(), released=False,
        use_bidirectional_attention=None, num_experts=6, top_k_experts=3, final_logit_softcapping=20.0,
    ),
    # the tower's other switches: clipped linears, no standardising, two query heads on one key head
    "clipped": _config(
        "ssf", window=12, hidden=48,
        vision=_vision(use_clipped_linears=True, standardize=False, num_key_value_heads=1),
    ),
    # no tower
    "text": _config("sfsf", window=12, hidden=48, vision=None),
    # every width a multiple of 128, so that every quantised format fits (oracle/formats.py)
    "packable": _config(
        "ssf", window=12, hidden=128, intermediate_size=128, moe_intermediate_size=128, head_dim=32,
        vision=_vision(
            hidden_size=128, intermediate_size=128, num_hidden_layers=1,
            num_attention_heads=4, num_key_value_heads=4, head_dim=32,
        ),
    ),
}  # fmt: skip

# How strongly a layer speaks against the residual stream, and how far apart the embeddings lie. Together they decide
# how sure a random model is: here some blocks settle and others run into the step cap.
BRANCH, EMBED = 0.35, 0.55


def config(name: str, tower: bool = False) -> dict:
    """A copy of one configuration; `tower` adds a vision tower where there is none (transformers cannot do without)."""
    found = copy.deepcopy(CONFIGS[name])
    if tower and found["vision_config"] is None:
        found["vision_config"] = _vision()
    return found


def weights(config: dict) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint under its Hugging Face name, float32."""
    shapes = _text_shapes(config["text_config"])
    if config["vision_config"]:
        shapes |= _vision_shapes(config["vision_config"], config["text_config"]["hidden_size"])
    return {name: _tensor(name, shape) for name, shape in shapes.items()}


def write_checkpoint(folder: str | Path, name: str, tower: bool = False) -> Path:
    """config.json and model.safetensors of one configuration, in a new or existing folder; returns the folder."""
    folder, found = Path(folder), config(name, tower)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(found, indent=2))
    save_file(weights(found), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _text_shapes(text: dict) -> dict[str, tuple[int, ...]]:
    hidden, wide, experts = text["hidden_size"], text["intermediate_size"], text["num_experts"]
    decoder = "model.decoder"
    shapes = {
        f"{decoder}.embed_tokens.weight": (text["vocab_size"], hidden),
        f"{decoder}.norm.weight": (hidden,),
        f"{decoder}.self_conditioning.pre_norm.weight": (hidden,),
    } | _mlp_shapes(f"{decoder}.self_conditioning", hidden, wide)
    for index, kind in enumerate(text["layer_types"]):
        layer, expert = f"{decoder}.layers.{index}", text["moe_intermediate_size"]
        shapes |= _attention_shapes(f"{layer}.self_attn", text, kind) | _mlp_shapes(f"{layer}.mlp", hidden, wide)
        shapes |= {
            f"{layer}.layer_scalar": (1,),
            f"model.encoder.language_model.layers.{index}.layer_scalar": (1,),  # the one weight the passes do not share
            f"{layer}.router.proj.weight": (experts, hidden),
            f"{layer}.router.scale": (hidden,),
            f"{layer}.router.per_expert_scale": (experts,),
            f"{layer}.experts.gate_up_proj": (experts, 2 * expert, hidden),
            f"{layer}.experts.down_proj": (experts, hidden, expert),
        }
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            shapes[f"{layer}.{norm}_layernorm.weight"] = (hidden,)
        for norm in ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2"):
            shapes[f"{layer}.{norm}.weight"] = (hidden,)
    return shapes


def _attention_shapes(prefix: str, text: dict, kind: str) -> dict[str, tuple[int, ...]]:
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    width, shared = (text["head_dim"], text["num_key_value_heads"]) if kind == SLIDING else (32, 1)
    shapes = {
        f"{prefix}.q_proj.weight": (heads * width, hidden),
        f"{prefix}.k_proj.weight": (shared * width, hidden),
        f"{prefix}.o_proj.weight": (hidden, heads * width),
        f"{prefix}.q_norm.weight": (width,),
        f"{prefix}.k_norm.weight": (width,),
    }
    if kind == SLIDING:  # full layers take their values from the keys
        shapes[f"{prefix}.v_proj.weight"] = (shared * width, hidden)
    return shapes


def _mlp_shapes(prefix: str, hidden: int, wide: int, linear: str = "") -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj{linear}.weight": (wide, hidden),
        f"{prefix}.up_proj{linear}.weight": (wide, hidden),
        f"{prefix}.down_proj{linear}.weight": (hidden, wide),
    }


def _vision_shapes(vision: dict, text_hidden: int) -> dict[str, tuple[int, ...]]:
    hidden, width, tower = vision["hidden_size"], vision["head_dim"], "model.encoder.vision_tower"
    queries, shared = vision["num_attention_heads"] * width, vision["num_key_value_heads"] * width
    shapes = {
        "model.encoder.embed_vision.embedding_projection.weight": (text_hidden, hidden),
        f"{tower}.patch_embedder.input_proj.weight": (hidden, 3 * vision["patch_size"] ** 2),
        f"{tower}.patch_embedder.position_embedding_table": (2, vision["position_embedding_size"], hidden),
    }
    if vision["standardize"]:
        shapes |= {f"{tower}.std_bias": (hidden,), f"{tower}.std_scale": (hidden,)}
    for index in range(vision["num_hidden_layers"]):
        layer = f"{tower}.encoder.layers.{index}"
        linears = _mlp_shapes(f"{layer}.mlp", hidden, vision["intermediate_size"], ".linear") | {
            f"{layer}.self_attn.q_proj.linear.weight": (queries, hidden),
            f"{layer}.self_attn.k_proj.linear.weight": (shared, hidden),
            f"{layer}.self_attn.v_proj.linear.weight": (shared, hidden),
            f"{layer}.self_attn.o_proj.linear.weight": (hidden, queries),
        }
        if vision["use_clipped_linears"]:
            limits = ("input_min", "input_max", "output_min", "output_max")
            shapes |= {name.replace("linear.weight", limit): () for name in linears for limit in limits}
        shapes |= linears | {f"{layer}.self_attn.{norm}.weight": (width,) for norm in ("q_norm", "k_norm")}
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            shapes[f"{layer}.{norm}_layernorm.weight"] = (hidden,)
    return shapes


def _tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """One tensor, float32: uniform numbers around the value and with the spread that its kind calls for."""
    stream = np.random.RandomState(zlib.crc32(f"{name}{shape}".encode()))
    uniform = 2.0 * stream.random_sample(shape) - 1.0  # [-1, 1), standard deviation 1/sqrt(3)
    centre, spread = _law(name, shape)
    return np.asarray(centre + spread * uniform, dtype=np.float32)


def _law(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """(centre, half-width) of a tensor's numbers. No tensor has the value that makes forgetting it harmless."""
    root3 = 3.0**0.5
    kind, kind_of_norm = name.rsplit(".", 1)[-1], name.split(".")[-2]
    if kind == "layer_scalar":
        return 1.0, 0.2
    if kind in ("input_min", "output_min", "input_max", "output_max"):  # tight enough to bite in every layer
        side = -1.0 if kind.endswith("min") else 1.0
        return side * (1.4 if kind.startswith("input") else 0.9), 0.2
    if "q_norm" in name:
        return 1.5 * shape[0] ** -0.5, 0.4 * shape[0] ** -0.5
    if "vision_tower" not in name and kind_of_norm in ("post_attention_layernorm", "post_feedforward_layernorm"):
        return BRANCH, 0.4 * BRANCH
    if "norm" in kind_of_norm:
        return 1.0, 0.4
    if kind in ("scale", "per_expert_scale"):
        return 1.0, 0.4
    if kind == "std_scale":
        return 0.3, 0.2
    if kind in ("std_bias", "position_embedding_table"):
        return 0.0, 1.0
    if "embed_tokens" in name:
        return 0.0, EMBED * root3
    gain = 2.0 * shape[-1] ** 0.5 if "router.proj" in name else 1.0  # the router's input is already scaled by 1/sqrt
    return 0.0, gain * root3 * shape[-1] ** -0.5
