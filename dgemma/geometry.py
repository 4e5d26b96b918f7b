"""Random weights in real geometries: written as a checkpoint by the package's own writer, or built in memory.

What speed and memory depend on is there (shapes, formats, a tokenizer of the full vocabulary, a chat template); what the
model says is noise. Matrices have the spread that keeps activations near one, so that bf16 errors are as in a real model.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

from .config import FULL, SLIDING, ModelConfig
from .convert import choose
from .formats import Format
from .model import DiffusionGemma
from .plan import Plan
from .weights import shapes
from .writer import Progress, Writer

BRANCH = 0.2  # the weight of a layer's branches beside the residual stream
TEMPLATE = """\
{{ bos_token }}{% for m in messages %}{{ "<|turn>" + ("model" if m.role == "assistant" else m.role) + "\\n" }}\
{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}\
{{ "<|image|>" if p.type == "image" else p.text }}{% endfor %}{% endif %}{{ "<turn|>\\n" }}{% endfor %}\
{% if add_generation_prompt %}{{ "<|turn>model\\n" }}{% endif %}"""
ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
EYES = {
    "model_type": "gemma4_vision", "patch_size": 16, "pooling_kernel_size": 3, "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "attention_dropout": 0.0, "standardize": True,
    "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0}, "use_clipped_linears": False,
}  # fmt: skip
# Name -> text, vision, canvas, and the ids of begin-of-image, image, end-of-image, begin and end of turn.
GEOMETRIES: dict[str, tuple[dict, dict, int, tuple[int, ...]]] = {
    "full": (
        {
            "vocab_size": 262_144, "hidden_size": 2816, "intermediate_size": 2112, "moe_intermediate_size": 704,
            "num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
            "global_head_dim": 512, "num_global_key_value_heads": 2, "num_experts": 128, "top_k_experts": 8,
            "sliding_window": 1024, "max_position_embeddings": 262_144,
        },
        {
            "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
            "num_key_value_heads": 16, "head_dim": 72, "position_embedding_size": 10_240,
        },
        256,
        (255_999, 258_880, 258_882, 105, 106),
    ),
    "mid": (
        {
            "vocab_size": 32_768, "hidden_size": 1024, "intermediate_size": 1024, "moe_intermediate_size": 256,
            "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128,
            "global_head_dim": 256, "num_global_key_value_heads": 2, "num_experts": 32, "top_k_experts": 4,
            "sliding_window": 512, "max_position_embeddings": 131_072,
        },
        {
            "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6,
            "num_key_value_heads": 6, "head_dim": 64, "position_embedding_size": 1024,
        },
        128,
        (7, 8, 9, 5, 6),
    ),
    "small": (  # to try something
        {
            "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 64,
            "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
            "global_head_dim": 128, "num_global_key_value_heads": 1, "num_experts": 8, "top_k_experts": 2,
            "sliding_window": 128, "max_position_embeddings": 131_072,
        },
        {
            "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 2, "head_dim": 64, "position_embedding_size": 1024,
        },
        32,
        (7, 8, 9, 5, 6),
    ),
}  # fmt: skip


def config(geometry: str, layers: int | None = None) -> dict[str, Any]:
    """The config.json of a geometry, in the released spelling; `layers` cuts the text stack short."""
    text, vision, canvas, (begin, image, end, *_) = copy.deepcopy(GEOMETRIES[geometry])
    count = layers or text["num_hidden_layers"]
    kinds = [FULL if i % 6 == 5 else SLIDING for i in range(count)]
    shared = {"rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
    text |= shared | {
        "model_type": "diffusion_gemma_text", "num_hidden_layers": count, "layer_types": kinds, "rope_parameters": ROPE,
        "attention_dropout": 0.0, "use_bidirectional_attention": "vision", "pad_token_id": 0, "eos_token_id": 1,
        "bos_token_id": 2, "tie_word_embeddings": True, "final_logit_softcapping": 30.0,
    }  # fmt: skip
    return {
        "architectures": ["DiffusionGemmaForBlockDiffusion"], "model_type": "diffusion_gemma", "dtype": "bfloat16",
        "canvas_length": canvas, "boi_token_id": begin, "image_token_id": image, "eoi_token_id": end,
        "tie_word_embeddings": True, "text_config": text, "vision_config": EYES | vision,
    }  # fmt: skip


def parameters(read: ModelConfig, dtype: mx.Dtype, seed: int = 0) -> Iterator[tuple[str, mx.array]]:
    """Every parameter under our name, one after the other, in `dtype`."""
    for number, (name, shape) in enumerate(shapes(read).items()):
        key = mx.random.key(seed * 1_000_003 + number)
        if len(shape) < 2:
            yield name, (level(name) * (1 + 0.05 * mx.random.normal(shape, key=key))).astype(dtype)
            continue
        yield name, mx.random.normal(shape, dtype=dtype, scale=spread(name, shape), key=key)


def level(name: str) -> float:
    """What a vector's numbers lie around. Branches speak softly, or rounding errors would grow from layer to layer."""
    branch = name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight"))
    return BRANCH if branch and name.startswith("layers.") else 1.0


def spread(name: str, shape: tuple[int, ...]) -> float:
    """The standard deviation of a matrix's numbers."""
    if name.endswith("position_embedding_table"):
        return 0.5
    return shape[-1] ** -0.5


def in_memory(geometry: str, dtype: mx.Dtype, seed: int = 0) -> DiffusionGemma:
    """A model of random weights, without a file."""
    read = ModelConfig.from_dict(config(geometry))
    model = DiffusionGemma(read)
    for name, array in parameters(read, dtype, seed):
        mx.eval(array)
        model.load_weights([(name, array)], strict=False)
    return model


def write(
    geometry: str, out: str | Path, format: Format | None = None, *, layers: int | None = None,
    dtype: mx.Dtype = mx.bfloat16, seed: int = 0, overwrite: bool = False, progress: Progress | None = None,
) -> Path:  # fmt: skip
    """A checkpoint folder of random weights, packed by the default recipe if there is a `format`; returns the folder."""
    read = ModelConfig.from_dict(config(geometry, layers))
    with Writer(out, plan(geometry, format, layers=layers, dtype=dtype), overwrite, progress) as writer:
        for name, array in parameters(read, dtype, seed):
            writer.put(name, array)
        for name, text in words(geometry).items():
            writer.save(name, text.encode())
    return Path(out)


def plan(
    geometry: str, format: Format | None = None, *, layers: int | None = None, dtype: mx.Dtype = mx.bfloat16
) -> Plan:
    """What `write` will write, down to the byte. OptionError for a format that fits nothing."""
    raw = config(geometry, layers)
    formats, _ = choose(ModelConfig.from_dict(raw), format)
    return Plan.of(raw, formats, dtype)


def words(geometry: str) -> dict[str, str]:
    """The tokenizer of single characters in a vocabulary of the full size, template and small configs, by file name."""
    text, _, _, (begin, image, end, turn, end_turn) = GEOMETRIES[geometry]
    named = {0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 4: "<mask>", begin: "<|image>", image: "<|image|>"}
    named |= {end: "<image|>", turn: "<|turn>", end_turn: "<turn|>"}
    letters = iter([chr(i) for i in range(32, 127)] + ["\n"])
    vocabulary = {}
    for i in range(text["vocab_size"]):
        token = named.get(i) or (next(letters, None) if i > 300 else None) or f"<unused{i}>"
        vocabulary[token] = i
    added = [
        {"id": i, "content": name, "special": True, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
        for i, name in sorted(named.items())
    ]
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": None, "post_processor": None, "decoder": {"type": "Fuse"},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocabulary, "merges": [],
        },
    }  # fmt: skip
    roles = {f"{role}_token": f"<{role}>" for role in ("pad", "eos", "bos", "unk")}
    return {
        "tokenizer.json": json.dumps(tokenizer),
        "tokenizer_config.json": json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | roles),
        "chat_template.jinja": TEMPLATE,
        "processor_config.json": json.dumps({"image_processor": {"max_soft_tokens": 280}}),
        "generation_config.json": json.dumps({"eos_token_id": [1, end_turn], "pad_token_id": 0}),
    }
