"""A DiffusionGemma that mlx-vlm has loaded (github.com/Blaizzy/mlx-vlm), as dgemma runs it: the same arrays, no copy.

mlx-vlm's modules carry the stored names, so its arrays are checked as the tensors of a checkpoint folder are. Nothing of
mlx-vlm is imported: its model, config and processor are read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from . import backend
from .processor import Processor, check_budget
from .config import GenerationConfig, ModelConfig
from .errors import OptionError
from .formats import Format, Quantization
from .model import DiffusionGemma
from .names import module
from .stored import Tensor
from .weights import DTYPES, Checkpoint, pack

SOURCE = Path("mlx-vlm's model")  # what messages call it, in place of a folder
KINDS = {dtype: name for name, dtype in DTYPES.items()} | {mx.uint32: "U32", mx.uint8: "U8"}
LOAD = "model, processor = mlx_vlm.load(...)"


def adopt(theirs: Any, image_attention: str = "encoder-window") -> DiffusionGemma:
    """Our model made of the arrays of mlx-vlm's; both may be used after that.

    OptionError when `theirs` is no DiffusionGemma of mlx-vlm's or its floats are of a dtype that does not run here;
    CheckpointError names a tensor that does not fit.
    """
    config = read_config(theirs)
    arrays = dict(tree_flatten(theirs.parameters()))
    _check_dtypes(arrays)
    found = {name: Tensor(SOURCE, KINDS.get(array.dtype, str(array.dtype)), array.shape) for name, array in arrays.items()}
    opened = Checkpoint.of(SOURCE, config, found, Quantization(None, _formats(theirs)))
    model = DiffusionGemma(opened.config, image_attention)
    pack(model, opened.formats)
    shared = []
    for name, recipe in opened.recipes.items():
        if len(recipe.names) > 1 or recipe.stacked:
            raise OptionError(
                f"{SOURCE} keeps {recipe.names[0]} and {recipe.names[-1]} apart, and joining them would copy them; "
                "Pipeline.from_pretrained loads the same checkpoint"
            )
        shared.append((name, arrays[recipe.names[0]]))
    model.load_weights(shared)
    return model


def read_config(theirs: Any) -> ModelConfig:
    """The config of mlx-vlm's model, as ours. What mlx-vlm does not keep of a config.json, it does not compute with."""
    config = vars(theirs).get("config") if isinstance(theirs, nn.Module) else None
    raw = dataclasses.asdict(config) if dataclasses.is_dataclass(config) else {}
    if raw.get("model_type") != "diffusion_gemma":
        kind = f", model_type {raw['model_type']!r}" if "model_type" in raw else ""
        seen = f"{type(theirs).__module__}.{type(theirs).__qualname__}{kind}"
        raise OptionError(f"the model is a {seen}; mlx-vlm's DiffusionGemma is needed, as in {LOAD}")
    return ModelConfig.from_dict(raw, source="mlx-vlm's config")


def read_generation(theirs: Any, changes: Mapping[str, Any] | None = None) -> GenerationConfig:
    """The generation_config.json that mlx-vlm's config keeps, with `changes` to its keys; the rest is the model card's."""
    config = dataclasses.asdict(vars(theirs)["config"])
    raw = {"eos_token_id": config.get("eos_token_id")} | dict(config.get("generation_config") or {})
    return GenerationConfig.from_dict(raw | dict(changes or {}), source="mlx-vlm's generation_config")


def read_processor(processor: Any, config: ModelConfig) -> Processor:
    """Tokenizer, chat template and image budget of mlx-vlm's processor. OptionError when it is none."""
    # Whatever class it is of: transformers gives processors their parts as plain attributes.
    tokenizer = getattr(processor, "tokenizer", None)
    if not hasattr(tokenizer, "apply_chat_template"):
        seen = f"{type(processor).__module__}.{type(processor).__qualname__}"
        raise OptionError(f"the processor is a {seen}; one with a tokenizer is needed, as in {LOAD}")
    budget = getattr(getattr(processor, "image_processor", None), "max_soft_tokens", None)
    return Processor(
        tokenizer,
        config,
        image_budget=check_budget(budget, "mlx-vlm's image processor"),
        template=tokenizer.chat_template or getattr(processor, "chat_template", None),
        source="mlx-vlm's processor",
    )


def _formats(theirs: nn.Module) -> dict[str, Format]:
    """Our module paths -> how mlx-vlm's modules say that their matrix is packed."""
    packed = {path: vars(one) for path, one in theirs.named_modules() if "scales" in one}
    return {
        module(path): Format.of(said.get("mode", "affine"), said.get("bits"), said.get("group_size"))
        for path, said in packed.items()
    }


def _check_dtypes(arrays: Mapping[str, mx.array]) -> None:
    """Refuse floats that do not run here, or of several dtypes: where one meets another, mlx computes in the wider."""
    floats = {array.dtype for array in arrays.values() if mx.issubdtype(array.dtype, mx.floating)}
    allowed = set(DTYPES.values()) if backend.is_gpu() else {mx.float32}
    if len(floats) == 1 and floats <= allowed:
        return
    names = [str(dtype).rpartition(".")[2] for dtype in (*sorted(floats, key=str), *sorted(allowed, key=str))]
    seen, fits = ", ".join(names[: len(floats)]), " or ".join(names[len(floats) :])
    raise OptionError(
        f"the model's floats are {seen}; on this device they must be {fits}, all of them: "
        f"model.set_dtype(mx.{'bfloat16' if mx.bfloat16 in allowed else 'float32'}) casts them, and packed weights stay packed"
    )
