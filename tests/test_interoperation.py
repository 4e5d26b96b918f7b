"""A DiffusionGemma that mlx-vlm has loaded, driven by dgemma: the same arrays, the same answers.

Where mlx-vlm is not installed a stand-in takes its place: modules that hold the arrays of a checkpoint under mlx-vlm's
names, with its config's fields. Where it is, every test runs on the real thing too, and one holds the stand-in to it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from transformers import AutoTokenizer

from conftest import add_words
from dgemma import CheckpointError, OptionError, Pipeline, PromptError, weights
from dgemma.formats import Format
from oracle import tiny

HAS_MLX_VLM = importlib.util.find_spec("mlx_vlm") is not None
FORMATS = {"affine": Format.of("affine", 4, 64), "mxfp4": Format.of("mxfp4")}
PACKED = re.compile(r"(embed_tokens|self_attn\.[qkvo]_proj|mlp\.\w+_proj|experts\.\w+_proj|self_conditioning\.\w+_proj)(\.weight)?$")


# -- checkpoints as mlx-vlm writes them --------------------------------------------------------------------------------


def write(folder: Path, kind: str) -> Path:
    """A tiny checkpoint in the spelling that mlx-vlm knows: bfloat16, packed in a format, or without eyes."""
    tiny.write_checkpoint(folder, "text" if kind == "text" else "packable")
    arrays = {name: array.astype(mx.bfloat16) for name, array in mx.load(str(folder / "model.safetensors")).items()}
    config = json.loads((folder / "config.json").read_text())
    config["generation_config"] = {"max_new_tokens": 16, "max_denoising_steps": 4, "eos_token_id": [1, 6], "t_max": 0.7}
    if kind in FORMATS:
        arrays, config["quantization"] = packed(arrays, FORMATS[kind])
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    add_words(folder)
    (folder / "generation_config.json").write_text(json.dumps(config["generation_config"]))
    return folder


def packed(arrays: dict[str, mx.array], usual: Format) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """The text stack's matrices in a format, the embeddings and attention in 8 bits; and what config.json says of it."""
    found, said, eight = {}, dict(usual.settings), Format.of("affine", 8, 64)
    for name, array in arrays.items():
        if "encoder." in name or not PACKED.search(name):
            found[name] = array
            continue
        path = name.removesuffix(".weight")
        fmt = eight if "embed_tokens" in name or "self_attn" in name else usual
        if fmt is eight:
            said[path] = {"group_size": 64, "bits": 8}
        found |= {f"{path}.{part}": one for part, one in zip(fmt.parts, mx.quantize(array, **fmt.settings))}
    return found, said


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A folder of each kind."""
    return {kind: write(tmp_path_factory.mktemp(kind), kind) for kind in ("plain", "affine", "mxfp4", "text")}


# -- what loads them ----------------------------------------------------------------------------------------------------


class Holder(nn.Module):
    """A module that holds what it is given, as any of mlx-vlm's does."""


@dataclasses.dataclass
class TextConfig:
    """The fields of mlx-vlm's that dgemma reads."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    num_global_key_value_heads: int | None
    head_dim: int
    global_head_dim: int
    hidden_activation: str
    rms_norm_eps: float
    max_position_embeddings: int
    pad_token_id: int
    rope_parameters: dict
    attention_bias: bool
    sliding_window: int
    layer_types: list
    use_bidirectional_attention: str | None
    num_experts: int
    top_k_experts: int
    final_logit_softcapping: float = 30.0


@dataclasses.dataclass
class VisionConfig:
    """Likewise."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_activation: str
    rms_norm_eps: float
    attention_bias: bool
    patch_size: int
    position_embedding_size: int
    pooling_kernel_size: int
    rope_parameters: dict
    use_clipped_linears: bool
    standardize: bool


@dataclasses.dataclass
class Config:
    """Likewise."""

    model_type: str
    text_config: TextConfig
    vision_config: VisionConfig | None
    boi_token_id: int
    eoi_token_id: int
    image_token_id: int
    canvas_length: int
    generation_config: dict | None
    eos_token_id: int | list | None


def only(cls: type, raw: dict) -> Any:
    """A dataclass of those keys that it has fields for, as mlx-vlm reads a config.json."""
    return cls(**{field.name: raw[field.name] for field in dataclasses.fields(cls) if field.name in raw})


def stand_in(folder: Path) -> tuple[nn.Module, Any]:
    """What `mlx_vlm.load` returns, as far as dgemma looks at it."""
    raw = json.loads((folder / "config.json").read_text())
    text, vision = only(TextConfig, raw["text_config"]), raw["vision_config"] and only(VisionConfig, raw["vision_config"])
    ends = raw["generation_config"]["eos_token_id"]
    model = Holder()
    model.config = only(Config, raw | {"text_config": text, "vision_config": vision, "eos_token_id": ends})
    said = raw.get("quantization") or {}
    tree: dict[str, Any] = {}
    for name, array in mx.load(str(folder / "model.safetensors")).items():
        at = tree
        *way, last = re.sub(r"(experts\.\w+_proj)$", r"\1.weight", name).split(".")
        for step in way:
            at = at.setdefault(step, {})
        at[last] = array
    fill(model, tree, said, "")
    words = AutoTokenizer.from_pretrained(str(folder))
    return model, SimpleNamespace(tokenizer=words, image_processor=SimpleNamespace(max_soft_tokens=70))


def fill(module: nn.Module, tree: dict[str, Any], said: dict[str, Any], path: str) -> None:
    """Hang a tree of arrays under a module; numbered branches are lists."""
    for name, branch in tree.items():
        here = f"{path}.{name}".lstrip(".")
        if not isinstance(branch, dict):
            module[name] = branch
        elif all(key.isdigit() for key in branch):
            module[name] = [Holder() for _ in branch]
            for key, one in branch.items():
                fill(module[name][int(key)], one, said, f"{here}.{key}")
        else:
            inner = Holder()
            setattr(module, name, inner)
            if "scales" in branch:
                own = said.get(here, said)
                inner.group_size, inner.bits, inner.mode = own["group_size"], own["bits"], own.get("mode", "affine")
            fill(inner, branch, said, here)


def real(folder: Path) -> tuple[nn.Module, Any]:
    """What `mlx_vlm.load` returns."""
    import mlx_vlm

    return mlx_vlm.load(str(folder))


LOADERS = [stand_in, pytest.param(real, marks=pytest.mark.skipif(not HAS_MLX_VLM, reason="mlx-vlm is not installed"))]


@pytest.fixture(params=LOADERS, ids=lambda loader: loader.__name__)
def load(request):
    """Loads a folder as mlx-vlm does, its floats in float32."""

    def call(folder: Path) -> tuple[nn.Module, Any]:
        model, processor = request.param(folder)
        model.set_dtype(mx.float32)
        return model, processor

    return call


@pytest.mark.skipif(not HAS_MLX_VLM, reason="mlx-vlm is not installed")
@pytest.mark.parametrize("kind", ["plain", "affine", "mxfp4", "text"])
def test_the_stand_in_is_like_the_real_one(folders, kind):
    (ours, words), (theirs, processor) = stand_in(folders[kind]), real(folders[kind])
    shown = lambda model: {name: (array.shape, array.dtype) for name, array in tree_flatten(model.parameters())}
    assert shown(ours) == shown(theirs)
    settings = lambda model: {
        path: (one.group_size, one.bits, one.mode) for path, one in model.named_modules() if "scales" in one
    }
    assert settings(ours) == settings(theirs)
    here, there = dataclasses.asdict(ours.config), dataclasses.asdict(theirs.config)
    for part in ("text_config", "vision_config"):
        one, other = here.pop(part), there.pop(part)
        assert one == (other and {key: other[key] for key in one})
    assert here == {key: there[key] for key in here}
    assert words.image_processor.max_soft_tokens == processor.image_processor.max_soft_tokens
    assert words.tokenizer.chat_template == processor.tokenizer.chat_template


# -- laws ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "affine", "mxfp4", "text"])
def test_answers_are_those_of_our_own_loading(load, folders, pictures, kind, monkeypatch):
    monkeypatch.setattr(weights.Checkpoint, "unpacks", lambda *_: False)  # packed weights stay packed, as mlx-vlm's do
    theirs, ours = Pipeline.from_mlx_vlm(*load(folders[kind])), Pipeline.from_pretrained(folders[kind])
    assert theirs.options == ours.options and theirs.options.t_max == 0.7
    assert theirs.processor.image_budget == ours.processor.image_budget == 70
    images = [] if kind == "text" else [str(pictures / "shapes.png")]
    for prompt, sources in (("Hello there.", images), ("Another?", [])):
        got, expected = (pipe(prompt, images=sources, seed=3) for pipe in (theirs, ours))
        assert (got.tokens, got.text, got.steps) == (expected.tokens, expected.text, expected.steps)
        assert got.image_tokens == expected.image_tokens and len(set(got.tokens)) > 3


@pytest.mark.parametrize("kind", ["plain", "affine", "mxfp4"])
def test_weights_are_shared_and_not_copied(load, folders, kind):
    model, processor = load(folders[kind])
    mx.eval(model.parameters())
    before = mx.get_active_memory()
    pipe = Pipeline.from_mlx_vlm(model, processor)
    mx.eval(pipe.model.parameters())
    assert mx.get_active_memory() - before < 1 << 16
    theirs = {id(array) for _, array in tree_flatten(model.parameters())}
    ours = tree_flatten(pipe.model.parameters())
    assert len(ours) == len(theirs) and {id(array) for _, array in ours} == theirs
    kinds = {array.dtype for _, array in ours}
    assert kinds == {"plain": {mx.float32}, "affine": {mx.float32, mx.uint32}}.get(kind, {mx.float32, mx.uint32, mx.uint8})


def test_a_generation_config_replaces_what_mlx_vlm_kept(folders):
    model, processor = stand_in(folders["plain"])
    model.set_dtype(mx.float32)
    pipe = Pipeline.from_mlx_vlm(model, processor, generation_config={"max_new_tokens": 5})
    assert (pipe.options.max_new_tokens, pipe.options.t_max, pipe.options.end_token_ids) == (5, 0.7, (1, 6))
    model.config.generation_config = None  # a checkpoint without one: the model card's, and the end tokens of its config
    options = Pipeline.from_mlx_vlm(model, processor).options
    assert (options.max_new_tokens, options.t_max, options.end_token_ids) == (256, 0.8, (1, 6))
    with pytest.raises(CheckpointError, match="mlx-vlm's generation_config: max_new_tokens is 0"):
        Pipeline.from_mlx_vlm(model, processor, generation_config={"max_new_tokens": 0})


def test_a_template_that_only_the_processor_has(folders):
    model, processor = stand_in(folders["plain"])
    model.set_dtype(mx.float32)
    processor.chat_template, processor.tokenizer.chat_template = processor.tokenizer.chat_template, None
    assert Pipeline.from_mlx_vlm(model, processor)("Hi", max_new_tokens=4, steps=1).prompt_tokens > 0
    processor.chat_template = None
    with pytest.raises(CheckpointError, match="mlx-vlm's processor: no chat template"):
        Pipeline.from_mlx_vlm(model, processor)


def test_image_attention_passes_through(folders):
    model, processor = stand_in(folders["plain"])
    model.set_dtype(mx.float32)
    assert Pipeline.from_mlx_vlm(model, processor, image_attention="bidirectional").model.image_attention == "bidirectional"


def test_pictures_for_a_model_without_eyes(load, folders, pictures):
    pipe = Pipeline.from_mlx_vlm(*load(folders["text"]))
    with pytest.raises(PromptError, match="this checkpoint has no vision tower: it reads text only"):
        pipe("Hi", images=[str(pictures / "shapes.png")])


# -- what is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(mx.default_device() == mx.gpu, reason="a GPU computes in bfloat16")
@pytest.mark.parametrize("loader", LOADERS, ids=lambda loader: loader.__name__)
def test_floats_that_do_not_run_here_name_the_line_that_casts_them(loader, folders):
    model, processor = loader(folders["affine"])
    with pytest.raises(OptionError) as refused:
        Pipeline.from_mlx_vlm(model, processor)
    assert str(refused.value) == (
        "the model's floats are bfloat16; on this device they must be float32, all of them: "
        "model.set_dtype(mx.float32) casts them, and packed weights stay packed"
    )
    before = {name for name, array in tree_flatten(model.parameters()) if array.dtype == mx.uint32}
    model.set_dtype(mx.float32)
    Pipeline.from_mlx_vlm(model, processor)
    assert before == {name for name, array in tree_flatten(model.parameters()) if array.dtype == mx.uint32} != set()


def test_floats_of_two_dtypes(folders):
    model, processor = stand_in(folders["plain"])
    model.set_dtype(mx.float32)
    model.model.decoder.norm.weight = model.model.decoder.norm.weight.astype(mx.bfloat16)
    with pytest.raises(OptionError, match="the model's floats are bfloat16, float32; on this device they must be "):
        Pipeline.from_mlx_vlm(model, processor)


@pytest.mark.parametrize(
    "model, seen",
    [
        ("google/diffusiongemma-26B-A4B-it", "builtins.str"),
        (None, "builtins.NoneType"),
        (nn.Linear(2, 2), "mlx.nn.layers.linear.Linear"),
        ((Holder(), Holder()), "builtins.tuple"),
    ],
    ids=["name", "none", "linear", "both"],
)
def test_what_is_no_model_of_mlx_vlm(model, seen):
    with pytest.raises(OptionError) as refused:
        Pipeline.from_mlx_vlm(model, None)
    said = f"the model is a {seen}; mlx-vlm's DiffusionGemma is needed, as in model, processor = mlx_vlm.load(...)"
    assert str(refused.value) == said


def test_another_model_and_no_processor(folders):
    model, processor = stand_in(folders["plain"])
    model.set_dtype(mx.float32)
    with pytest.raises(OptionError, match="the processor is a builtins.NoneType; one with a tokenizer is needed"):
        Pipeline.from_mlx_vlm(model, None)
    model.config.model_type = "gemma4"
    with pytest.raises(OptionError, match=r"the model is a test_interoperation.Holder, model_type 'gemma4'; mlx-vlm's Diff"):
        Pipeline.from_mlx_vlm(model, processor)


def test_tensors_and_configs_that_do_not_fit(folders):
    model, processor = stand_in(folders["plain"])
    model.set_dtype(mx.float32)
    layer = model.model.decoder.layers[2].self_attn
    model.config.text_config.global_head_dim = 64  # as when a config.json says it in a way that mlx-vlm does not keep
    with pytest.raises(CheckpointError, match=r"mlx-vlm's model: tensor model\.decoder\.layers\.2\.self_attn\.\w+\.weight has shape"):
        Pipeline.from_mlx_vlm(model, processor)
    model.config.text_config.global_head_dim = 32
    layer.q_proj.lora_a = mx.zeros((2, 2))
    with pytest.raises(CheckpointError, match=r"tensor model\.decoder\.layers\.2\.self_attn\.q_proj\.lora_a has no place in"):
        Pipeline.from_mlx_vlm(model, processor)
    del layer.q_proj["lora_a"]
    processor.image_processor.max_soft_tokens = 71
    with pytest.raises(CheckpointError, match="mlx-vlm's image processor: max_soft_tokens is 71; allowed are 70, 140"):
        Pipeline.from_mlx_vlm(model, processor)


def test_experts_that_are_kept_apart_are_not_copied(folders):
    model, processor = stand_in(folders["plain"])
    model.set_dtype(mx.float32)
    experts = model.model.decoder.layers[0].experts
    experts.gate_proj, experts.up_proj = Holder(), Holder()
    experts.gate_proj.weight, experts.up_proj.weight = mx.split(experts.gate_up_proj.weight, 2, axis=1)
    del experts["gate_up_proj"]
    with pytest.raises(OptionError, match="gate_proj.weight and .*up_proj.weight apart, and joining them would copy them"):
        Pipeline.from_mlx_vlm(model, processor)
