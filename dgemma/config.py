"""A checkpoint's geometry and policy, read from config.json and generation_config.json.

Geometry (sizes, layer kinds, token ids of the architecture) has no defaults: a config that lacks a size is refused.
Policy (sampler, temperatures, lengths) defaults to the model card of google/diffusiongemma-26B-A4B-it.

The geometry of full layers comes in two spellings, and both load: the released file names `global_head_dim` and
`num_global_key_value_heads`; files saved by transformers >= 5.2 list `per_layer_config: {"5": {"head_dim": ...}}`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import CheckpointError

SLIDING, FULL = "sliding_attention", "full_attention"
SOFTCAP = 30.0  # transformers' class default; older files do not write it
MOST = 2**24  # of any size: a damaged config shall end in a message, not in an allocation

# Keys of Gemma's family that change the mathematics in ways nothing here computes, and the values under which they do not.
# Any other key that nothing reads is listed by name in `ModelConfig.ignored`.
NEUTRAL = {
    "use_bidirectional_attention": (None, "vision"),
    "hidden_activation": (None, "gelu_pytorch_tanh"),
    "attention_bias": (None, False),
    "hidden_size_per_layer_input": (None, 0),
    "num_kv_shared_layers": (None, 0),
    "use_double_wide_mlp": (None, False),
}


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions of one layer kind: base `theta`, the rotated `fraction` of the head, and the rule of `kind`."""

    theta: float
    fraction: float
    kind: str  # "default" or "proportional"


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One text layer: its attention kind, head width E and number of key/value heads K."""

    kind: str
    head_dim: int
    kv_heads: int


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """Geometry of the text stack, shared by the encoder and the canvas pass."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_attention_heads: int
    num_experts: int
    top_k_experts: int
    sliding_window: int
    rms_norm_eps: float
    max_position_embeddings: int
    final_logit_softcapping: float
    use_bidirectional_attention: str | None  # "vision": the tokens of an image see each other; None: causal
    pad_token_id: int
    layers: tuple[Layer, ...]
    rope: dict[str, Rope]


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Geometry of the vision tower (Gemma 4's)."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    patch_size: int
    pooling_kernel_size: int
    position_embedding_size: int
    rms_norm_eps: float
    rope_theta: float
    standardize: bool
    use_clipped_linears: bool


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A whole checkpoint: text, vision (None for a text-only one), canvas length C and the image tokens."""

    text: TextConfig
    vision: VisionConfig | None
    canvas_length: int
    image_token_id: int
    boi_token_id: int
    eoi_token_id: int
    quantization: dict[str, Any] | None
    ignored: tuple[str, ...]  # names of keys that the file has and nothing here reads

    @classmethod
    def read(cls, folder: str | Path) -> ModelConfig:
        """The config of a checkpoint folder; CheckpointError names the file and the key at fault."""
        path = Path(folder) / "config.json"
        return cls.from_dict(read_json(path), source=str(path))

    @classmethod
    def from_dict(cls, raw: dict[str, Any], source: str = "config.json") -> ModelConfig:
        """The config in either spelling; `source` names it in messages."""
        top = _Section(raw, source)
        if top.get("model_type") != "diffusion_gemma":
            raise CheckpointError(
                f"{source}: model_type is {raw.get('model_type')!r}; dgemma runs 'diffusion_gemma' checkpoints only"
            )
        if top.get("tie_word_embeddings") is False:
            raise CheckpointError(f"{source}: tie_word_embeddings is False; encoder, decoder and head must share weights")
        text = _read_text(top.section("text_config"))
        vision = _read_vision(top.section("vision_config")) if top.get("vision_config") else None
        quantization, same = top.get("quantization"), top.get("quantization_config")  # mlx's key, and Hugging Face's
        begin, end = top.token("boi_token_id", default=255_999), top.token("eoi_token_id", default=258_882)
        if vision is not None and max(begin, end) >= text.vocab_size:  # mlx reads past the end of a table in silence
            raise CheckpointError(
                f"{source}: boi_token_id is {begin} and eoi_token_id {end}; the vocabulary ends at {text.vocab_size - 1}"
            )
        canvas, context = top.size("canvas_length", default=256), text.max_position_embeddings
        if canvas > context:
            raise CheckpointError(f"{source}: canvas_length is {canvas}, more than max_position_embeddings ({context})")
        return cls(
            text=text,
            vision=vision,
            canvas_length=canvas,
            image_token_id=top.token("image_token_id", default=258_880),
            boi_token_id=begin,
            eoi_token_id=end,
            quantization=quantization or same,
            ignored=top.finish(),
        )


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How a checkpoint wants to be sampled; the defaults are the model card's."""

    max_new_tokens: int = 256
    max_denoising_steps: int = 48
    t_min: float = 0.4
    t_max: float = 0.8
    entropy_bound: float = 0.1
    stability_threshold: int = 1
    confidence_threshold: float = 0.005
    end_token_ids: tuple[int, ...] = (1, 106, 50)
    pad_token_id: int = 0

    @classmethod
    def read(cls, folder: str | Path) -> GenerationConfig:
        """The policy of a checkpoint folder; a folder without generation_config.json gets the card's defaults."""
        path = Path(folder) / "generation_config.json"
        try:
            if not path.exists():
                return cls()
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
        return cls.from_dict(read_json(path), source=str(path))

    @classmethod
    def from_dict(cls, raw: dict[str, Any], source: str = "generation_config.json") -> GenerationConfig:
        """The policy; unknown samplers and values out of range raise CheckpointError."""
        found: dict[str, Any] = {}
        for key in ("max_new_tokens", "max_denoising_steps", "stability_threshold", "pad_token_id"):
            if raw.get(key) is not None:
                found[key] = _whole(raw[key], f"{source}: {key}", least=0 if key[0] in "sp" else 1)
        for key in ("t_min", "t_max", "confidence_threshold"):
            if raw.get(key) is not None:
                found[key] = _real(raw[key], f"{source}: {key}")
        sampler = raw.get("sampler_config")
        if sampler is not None:
            if not isinstance(sampler, dict) or sampler.get("_cls_name", "EntropyBoundSamplerConfig") != (
                "EntropyBoundSamplerConfig"
            ):
                raise CheckpointError(f"{source}: sampler_config is {sampler!r}; only EntropyBoundSamplerConfig is known")
            found["entropy_bound"] = _real(sampler.get("entropy_bound"), f"{source}: sampler_config.entropy_bound")
        ends = raw.get("eos_token_id")
        if ends is not None:
            ends = ends if isinstance(ends, list) else [ends]
            found["end_token_ids"] = tuple(_whole(e, f"{source}: eos_token_id", least=0) for e in ends)
        policy = cls(**found)
        if policy.t_min > policy.t_max:
            raise CheckpointError(f"{source}: t_min is {policy.t_min}, more than t_max ({policy.t_max})")
        return policy


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; CheckpointError when it is absent, unreadable, malformed or no object."""
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for, for ever
            raise CheckpointError(f"{path}: is no file; a checkpoint folder holds config.json and safetensors")
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; a checkpoint folder holds config.json and safetensors") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None
    except (ValueError, RecursionError) as error:  # a number of more than 4,300 digits is a ValueError
        raise CheckpointError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: a JSON object is expected, found {type(raw).__name__}")
    return raw


def _whole(value: Any, name: str, least: int = 1, most: int = MOST) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise CheckpointError(f"{name} is {value!r}; a whole number from {least} to {most} is needed")
    return value


def _real(value: Any, name: str, most: float = 1e9) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= most:
        raise CheckpointError(f"{name} is {value!r}; a number above 0 and up to {most:g} is needed")
    return float(value)


class _Section:
    """One JSON object being read: hands out checked values and, when read, notes the keys that nobody asked for."""

    def __init__(self, raw: Any, name: str, path: str = "", ignored: list[str] | None = None):
        if not isinstance(raw, dict):
            raise CheckpointError(f"{name}: a JSON object is expected, found {type(raw).__name__}")
        self.raw, self.name, self.path, self.seen = raw, name, path, set()
        self.ignored = [] if ignored is None else ignored  # shared by all sections of a file

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, unchecked."""
        self.seen.add(key)
        return self.raw.get(key, default)

    def size(self, key: str, default: int | None = None, most: int = MOST) -> int:
        """A whole number from 1 to `most`; CheckpointError."""
        return _whole(self.get(key, default), f"{self.name}: {key}", most=most)

    def token(self, key: str, default: int) -> int:
        """A token id; CheckpointError."""
        value = self.get(key)  # null is a legal way to leave one out
        return _whole(default if value is None else value, f"{self.name}: {key}", least=0)

    def real(self, key: str, default: float | None = None, most: float = 1e9) -> float:
        return _real(self.get(key, default), f"{self.name}: {key}", most)

    def section(self, key: str) -> _Section:
        return _Section(self.get(key), f"{self.name}: {key}", f"{self.path}{key}.", self.ignored)

    def neutral(self) -> None:
        """Refuse values that would change the mathematics in a way nothing here computes."""
        for key, values in NEUTRAL.items():
            value = self.get(key)
            if value not in values:
                raise CheckpointError(f"{self.name}: {key} is {value!r}; supported: {', '.join(map(str, values))}")

    def finish(self) -> tuple[str, ...]:
        """Every ignored key so far, those of this section now among them."""
        self.ignored += [self.path + key for key in sorted(set(self.raw) - self.seen)]
        return tuple(self.ignored)


def _read_text(section: _Section) -> TextConfig:
    kinds = _layer_kinds(section)
    layers = _layers(section, kinds)
    section.neutral()
    config = TextConfig(
        vocab_size=section.size("vocab_size"),
        hidden_size=section.size("hidden_size"),
        intermediate_size=section.size("intermediate_size"),
        moe_intermediate_size=section.size("moe_intermediate_size"),
        num_attention_heads=section.size("num_attention_heads", most=4096),
        num_experts=section.size("num_experts"),
        top_k_experts=section.size("top_k_experts"),
        sliding_window=section.size("sliding_window"),
        rms_norm_eps=section.real("rms_norm_eps", 1e-6),
        max_position_embeddings=section.size("max_position_embeddings", most=2**31 - 1),
        final_logit_softcapping=section.real("final_logit_softcapping", SOFTCAP),
        use_bidirectional_attention=section.get("use_bidirectional_attention"),
        pad_token_id=section.token("pad_token_id", 0),
        layers=layers,
        rope=_rope(section, set(kinds)),
    )
    section.finish()
    if config.pad_token_id >= config.vocab_size:
        raise CheckpointError(
            f"{section.name}: pad_token_id is {config.pad_token_id}; the vocabulary ends at {config.vocab_size - 1}"
        )
    if config.top_k_experts > config.num_experts:
        raise CheckpointError(
            f"{section.name}: top_k_experts is {config.top_k_experts}, more than num_experts ({config.num_experts})"
        )
    for layer in layers:
        if config.num_attention_heads % layer.kv_heads:
            raise CheckpointError(
                f"{section.name}: {config.num_attention_heads} query heads cannot share {layer.kv_heads} key/value heads"
            )
    return config


def _layer_kinds(section: _Section) -> list[str]:
    count = section.size("num_hidden_layers", most=1024)
    kinds = section.get("layer_types")
    if kinds is None:  # the released pattern: five sliding layers, then a full one
        kinds = [FULL if (i + 1) % 6 == 0 else SLIDING for i in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in (SLIDING, FULL) for kind in kinds):
        raise CheckpointError(
            f"{section.name}: layer_types must list {count} entries of {SLIDING!r} or {FULL!r}, found {kinds!r}"
        )
    return kinds


def _layers(section: _Section, kinds: list[str]) -> tuple[Layer, ...]:
    """Head width and key/value heads of every layer, from either spelling."""
    head, heads = section.size("head_dim"), section.size("num_key_value_heads")
    per_layer = section.get("per_layer_config")
    global_head, global_heads = section.get("global_head_dim"), section.get("num_global_key_value_heads")
    layers = []
    for index, kind in enumerate(kinds):
        override: dict[str, Any] = {}
        if per_layer is not None:
            outer = _Section(per_layer, f"{section.name}: per_layer_config")
            override = dict(_Section(outer.get(str(index)) or {}, f"{outer.name}: {index}").raw)
        elif kind == FULL:
            override = {"head_dim": global_head or 512, "num_key_value_heads": global_heads}
        name = f"{section.name}: layer {index}"
        layers.append(
            Layer(
                kind=kind,
                head_dim=_whole(override.pop("head_dim", None) or head, f"{name}: head_dim", most=4096),
                kv_heads=_whole(override.pop("num_key_value_heads", None) or heads, f"{name}: num_key_value_heads"),
            )
        )
        if override:
            raise CheckpointError(f"{name}: unknown key {sorted(override)[0]!r} in per_layer_config")
    return tuple(layers)


def _rope(section: _Section, kinds: set[str]) -> dict[str, Rope]:
    raw = section.get("rope_parameters")
    if raw is None:
        return {
            SLIDING: Rope(theta=1e4, fraction=1.0, kind="default"),
            FULL: Rope(theta=1e6, fraction=0.25, kind="proportional"),
        }
    rope = {}
    outer = _Section(raw, f"{section.name}: rope_parameters")
    for kind in sorted(kinds):
        inner = outer.section(kind)
        name = inner.get("rope_type", "default")
        if name not in ("default", "proportional"):
            raise CheckpointError(f"{inner.name}: rope_type is {name!r}; supported: default, proportional")
        rope[kind] = Rope(
            theta=inner.real("rope_theta"), fraction=inner.real("partial_rotary_factor", 1.0, most=1), kind=name
        )
        inner.finish()
    return rope


def _read_vision(section: _Section) -> VisionConfig:
    rope = section.get("rope_parameters") or {}
    theta = rope.get("rope_theta", 100.0) if isinstance(rope, dict) else rope
    kind = section.get("model_type")
    if kind not in ("gemma4_vision", None):
        raise CheckpointError(f"{section.name}: model_type is {kind!r}; supported: gemma4_vision")
    section.neutral()
    heads = section.size("num_attention_heads", most=4096)
    config = VisionConfig(
        hidden_size=section.size("hidden_size"),
        intermediate_size=section.size("intermediate_size"),
        num_hidden_layers=section.size("num_hidden_layers", most=1024),
        num_attention_heads=heads,
        num_key_value_heads=section.size("num_key_value_heads", heads),
        head_dim=section.size("head_dim", most=4096),
        patch_size=section.size("patch_size", 16, most=256),
        pooling_kernel_size=section.size("pooling_kernel_size", 3, most=16),
        position_embedding_size=section.size("position_embedding_size", 10_240),
        rms_norm_eps=section.real("rms_norm_eps", 1e-6),
        rope_theta=_real(theta, f"{section.name}: rope_theta"),
        standardize=bool(section.get("standardize", False)),
        use_clipped_linears=bool(section.get("use_clipped_linears", False)),
    )
    section.finish()
    return config
