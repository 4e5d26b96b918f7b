"""`dgemma info`: what a checkpoint is, from its JSON files and the headers of its safetensors; no weight is read."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from . import backend, weights
from .config import SLIDING, GenerationConfig, ModelConfig, TextConfig, VisionConfig, read_json
from .hub import find
from .render import size

# The first pattern that a tensor's name meets says which part it counts for.
PARTS = (
    ("embedding and head", r"embed_tokens"),
    ("experts", r"\.experts\."),
    ("router", r"\.router\."),
    ("vision tower", r"vision_tower"),
    ("image embedding", r"embed_vision"),
    ("self-conditioning", r"self_conditioning"),
    ("attention", r"self_attn"),
    ("dense MLP", r"\.mlp\."),
    ("norms and scalars", r""),
)


def read(model: str | Path | None = None, revision: str | None = None) -> dict[str, Any]:
    """All there is to say, ready for JSON. Raises CheckpointError."""
    found = find(model, revision)
    folder = found.folder
    generation = GenerationConfig.read(folder)
    opened = weights.Checkpoint.open(folder, found.headers())
    config, files = opened.config, {tensor.file for tensor in opened.tensors.values()}
    parameters = count(opened.shapes)
    total = sum(parameters.values())
    compute = backend.activation_dtype(opened.dtype)
    return {
        "model": str(model or "demo"),
        "folder": str(folder),
        "text": text_geometry(config.text),
        "vision": None if config.vision is None else vision_geometry(config.vision),
        "canvas_length": config.canvas_length,
        "parameters": parameters | {"total": total, "active": active(parameters, config.text)},
        "bytes": {
            "on_disk": sum(found.nbytes(path) for path in files),
            "to_download": sum(found.absent.values()),
            "files": len(files),
            "in_memory": opened.nbytes_as(compute, opened.unpacks(compute)),
            "compute_dtype": str(compute).rpartition(".")[2],
            "stored_dtype": sorted({opened.tensors[name].dtype for made in opened.recipes.values() for name in made.names}),
        },
        "quantization": quantization(opened),
        "tokens": tokens(folder, config, generation),
        "generation": policy(generation),
        "ignored_config_keys": list(config.ignored),
    }


def quantization(opened: weights.Checkpoint) -> dict[str, list[str]]:
    """The formats of each part's packed matrices; empty when nothing is quantised."""
    found: dict[str, set[str]] = {}
    for path, fmt in opened.formats.items():
        found.setdefault(part_of(f"{path}.weight"), set()).add(str(fmt))
    for name, shape in opened.shapes.items():
        part = part_of(name)
        if part in found and len(shape) > 1 and name.rpartition(".")[0] not in opened.formats:
            found[part].add("the rest unquantised")
    return {part: sorted(formats) for part, formats in found.items()}


def part_of(tensor: str) -> str:
    """The part that a tensor counts for."""
    return next(name for name, pattern in PARTS if re.search(pattern, tensor))


def count(shapes: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """Parameters of each part."""
    found = dict.fromkeys((name for name, _ in PARTS), 0)
    for tensor, shape in shapes.items():
        found[part_of(tensor)] += math.prod(shape)
    return {name: number for name, number in found.items() if number}


def active(parameters: dict[str, int], text: TextConfig) -> int:
    """Parameters that one canvas position meets: its experts only, no eyes."""
    idle = parameters.get("experts", 0) * (text.num_experts - text.top_k_experts) // text.num_experts
    eyes = parameters.get("vision tower", 0) + parameters.get("image embedding", 0)
    return sum(parameters.values()) - idle - eyes


def text_geometry(text: TextConfig) -> dict[str, Any]:
    """The text stack."""
    layers: dict[str, Any] = {}
    for kind in dict.fromkeys(layer.kind for layer in text.layers):
        of_kind = [layer for layer in text.layers if layer.kind == kind]
        layers[kind] = {
            "count": len(of_kind),
            "head_dim": sorted({layer.head_dim for layer in of_kind}),
            "kv_heads": sorted({layer.kv_heads for layer in of_kind}),
        }
    return {
        "layers": layers,
        "pattern": "".join("s" if layer.kind == SLIDING else "F" for layer in text.layers),
        "hidden_size": text.hidden_size,
        "query_heads": text.num_attention_heads,
        "sliding_window": text.sliding_window,
        "mlp_width": text.intermediate_size,
        "experts": text.num_experts,
        "experts_per_token": text.top_k_experts,
        "expert_width": text.moe_intermediate_size,
        "vocabulary": text.vocab_size,
        "context": text.max_position_embeddings,
    }


def vision_geometry(vision: VisionConfig) -> dict[str, Any]:
    """The vision tower."""
    return {
        "layers": vision.num_hidden_layers,
        "hidden_size": vision.hidden_size,
        "heads": vision.num_attention_heads,
        "head_dim": vision.head_dim,
        "mlp_width": vision.intermediate_size,
        "patch_size": vision.patch_size,
        "pooling": vision.pooling_kernel_size,
    }


def tokens(folder: Path, config: ModelConfig, generation: GenerationConfig) -> dict[str, Any]:
    """The ids that mean something, with their names where tokenizer.json gives them."""
    names = {}
    if (folder / "tokenizer.json").exists():
        added = read_json(folder / "tokenizer.json").get("added_tokens")
        entries = added if isinstance(added, list) else []
        names = {t["id"]: t.get("content") for t in entries if isinstance(t, dict) and isinstance(t.get("id"), int)}
    ids = {
        "pad": config.text.pad_token_id,
        "image": config.image_token_id,
        "begin of image": config.boi_token_id,
        "end of image": config.eoi_token_id,
    }
    found = {role: {"id": i, "name": names.get(i)} for role, i in ids.items()}
    return found | {"end": [{"id": i, "name": names.get(i)} for i in generation.end_token_ids]}


def policy(generation: GenerationConfig) -> dict[str, Any]:
    """The generation defaults."""
    return {
        "max_new_tokens": generation.max_new_tokens,
        "steps": generation.max_denoising_steps,
        "t_max": generation.t_max,
        "t_min": generation.t_min,
        "entropy_bound": generation.entropy_bound,
        "stability": generation.stability_threshold,
        "confidence": generation.confidence_threshold,
    }


def text(found: dict[str, Any]) -> str:
    """What `read` found, for a person."""
    stack, eyes, held = found["text"], found["vision"], found["bytes"]
    lines = [("model", f"{found['model']} ({found['folder']})")]
    for kind, layer in stack["layers"].items():
        heads = "/".join(map(str, layer["kv_heads"])), "/".join(map(str, layer["head_dim"]))
        window = f", window {stack['sliding_window']}" if kind == SLIDING else ""
        name = kind.partition("_")[0]
        lines.append((f"{name} layers", f"{layer['count']}: {heads[0]} key/value heads of {heads[1]}{window}"))
    lines += [
        ("pattern", f"{stack['pattern']} (s sliding, F full)"),
        ("width", f"{stack['hidden_size']}; {stack['query_heads']} query heads, dense MLP {stack['mlp_width']}"),
        ("experts", f"{stack['experts']} of width {stack['expert_width']}, {stack['experts_per_token']} a token"),
        ("canvas", f"{found['canvas_length']} tokens"),
        ("context", f"{stack['context']:,} tokens, vocabulary {stack['vocabulary']:,}"),
        ("vision", "none: reads text only" if eyes is None else _eyes(eyes)),
        *_parameters(found["parameters"]),
        ("on disk", _files(held)),
        ("in memory", f"{size(held['in_memory'])} as {held['compute_dtype']}"),
        *_quantization(found["quantization"]),
        *_tokens(found["tokens"]),
        ("generation", ", ".join(f"{name} {value}" for name, value in found["generation"].items())),
        ("ignored keys", ", ".join(found["ignored_config_keys"]) or "none"),
    ]
    return "".join(f"{name:<20} {value}\n" for name, value in lines)


def _files(held: dict[str, Any]) -> str:
    absent = f"; {size(held['to_download'])} still to be downloaded" if held["to_download"] else ""
    return f"{size(held['on_disk'])} in {held['files']} file(s), {', '.join(held['stored_dtype'])}{absent}"


def _eyes(eyes: dict[str, int]) -> str:
    return (
        f"{eyes['layers']} layers, width {eyes['hidden_size']}, {eyes['heads']} heads of {eyes['head_dim']}, "
        f"patch {eyes['patch_size']}, pooling {eyes['pooling']}x{eyes['pooling']}"
    )


def _parameters(parameters: dict[str, int]) -> list[tuple[str, str]]:
    lines = [("parameters", f"{parameters['total']:,}, of which {parameters['active']:,} work on a canvas token")]
    parts = {name: number for name, number in parameters.items() if name not in ("total", "active")}
    return lines + [(f"  {name}", f"{number:,}") for name, number in parts.items()]


def _quantization(found: dict[str, list[str]]) -> list[tuple[str, str]]:
    if not found:
        return [("quantised", "nothing")]
    return [("quantised", "")] + [(f"  {part}", "; ".join(formats)) for part, formats in found.items()]


def _tokens(tokens: dict[str, Any]) -> list[tuple[str, str]]:
    ends = tokens["end"]
    named = [(role, tokens[role]) for role in tokens if role != "end"] + [("end", end) for end in ends]
    return [("tokens", ", ".join(f"{role} {t['id']}" + (f" {t['name']}" if t["name"] else "") for role, t in named))]
