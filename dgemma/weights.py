"""From files to a model: find the safetensors of a checkpoint, rename, check every tensor, load.

Loading is strict. A tensor that is missing, left over, or of another shape is named; nothing is filled in.
"""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from . import backend
from .config import ModelConfig, read_json
from .errors import CheckpointError, OptionError
from .model import DiffusionGemma

# The checkpoint's names -> ours: the decoder's weights serve both passes, the encoder adds a scalar a layer and the eyes.
RENAMES = (
    (r"^model\.decoder\.", ""),
    (r"^model\.encoder\.language_model\.layers\.(\d+)\.layer_scalar$", r"layers.\1.encoder_layer_scalar"),
    (r"^model\.encoder\.(vision_tower|embed_vision)\.", r"\1."),
)
# Second copies of tied weights, which some writers store: the encoder's text stack and the head repeat the decoder.
TIED = re.compile(r"^model\.encoder\.language_model\.|^lm_head\.weight$")
DTYPES = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}


def load(folder: str | Path, image_attention: str = "encoder-window", dtype: mx.Dtype | None = None) -> DiffusionGemma:
    """The model of a checkpoint folder, its weights in `dtype` (default: the backend's choice for the stored one).

    CheckpointError names the file, the tensor or the key at fault.
    """
    folder = Path(folder)
    config = ModelConfig.read(folder)
    if config.quantization is not None:
        raise CheckpointError(f"{folder}: quantised checkpoints are not supported yet; use the bf16 original")
    stored: dict[str, mx.array] = {}
    for path in shards(folder):
        check_file(path)
        for name, array in _read(path).items():
            if name in stored:
                raise CheckpointError(f"{path}: tensor {name} stands in two files of this checkpoint")
            stored[name] = array
    backend.fit_threads(config.text.hidden_size)
    model = DiffusionGemma(config, image_attention)
    weights = rename(stored)
    check(model, weights, str(folder))
    dtype = check_dtype(dtype or backend.activation_dtype(weights["embed_tokens.weight"].dtype))
    stored.clear()  # each stored tensor is let go as soon as its cast is made, not when all are
    model.load_weights([(name, weights.pop(name).astype(dtype)) for name in list(weights)], strict=True)
    mx.eval(model.parameters())
    return model


def check_dtype(dtype: mx.Dtype) -> mx.Dtype:
    """The dtype, if the model can compute in it here."""
    allowed = tuple(DTYPES.values()) if backend.is_gpu() else (mx.float32,)
    if dtype not in allowed:
        raise OptionError(f"dtype is {dtype}; on this device allowed: {', '.join(str(one) for one in allowed)}")
    return dtype


def shards(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint: one, or those that the index names; each must exist."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        found = sorted(folder.glob("*.safetensors"))
        if found:
            return found
        other = sorted(p.name for p in folder.glob("*.bin")) or sorted(p.name for p in folder.glob("*.gguf"))
        hint = f"; {other[0]} is of a format that is not read, convert it to safetensors" if other else ""
        raise CheckpointError(f"{folder}: no *.safetensors file{hint}")
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise CheckpointError(f"{index}: 'weight_map' must map tensor names to files")
    paths = []
    for name in sorted(set(names.values())):
        if Path(name).name != name:
            raise CheckpointError(f"{index}: {name!r} points outside the checkpoint folder")
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder}: shard {name} is missing; the index lists {len(set(names.values()))} files")
        paths.append(folder / name)
    return paths


def check_file(path: Path) -> None:
    """Refuse a safetensors file that is cut short or has a damaged header, before mlx maps it.

    Layout (github.com/huggingface/safetensors): u64 header length, JSON header with `data_offsets`, the data.
    """
    header = read_header(path)
    size = path.stat().st_size
    try:
        ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
    except (KeyError, TypeError, IndexError, ValueError, OverflowError):
        raise CheckpointError(f"{path}: damaged header; download it again") from None
    needed = max(ends, default=0)
    with path.open("rb") as file:
        start = 8 + struct.unpack("<Q", file.read(8))[0]
    if size < start + needed:
        raise CheckpointError(f"{path}: truncated, {size:,} of {start + needed:,} bytes; download it again")


def read_header(path: Path) -> dict:
    """The header of a safetensors file: tensor name -> dtype, shape, data_offsets."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if length > min(size - 8, 100_000_000):
                raise CheckpointError(f"{path}: not a whole safetensors file ({size:,} bytes); download it again")
            header = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise CheckpointError(f"{path}: the safetensors header is damaged; download it again") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the safetensors header is damaged; download it again")
    return header


def _read(path: Path) -> dict[str, mx.array]:
    for name, entry in read_header(path).items():
        if name != "__metadata__" and entry.get("dtype") not in DTYPES:
            raise CheckpointError(
                f"{path}: tensor {name} is {entry.get('dtype')}; weights are {', '.join(DTYPES)} in an unquantised checkpoint"
            )
    try:
        return mx.load(str(path), format="safetensors")
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be loaded ({error})") from None


def rename(stored: dict[str, mx.array]) -> dict[str, mx.array]:
    """Tensors under our names; second copies of tied weights are left out."""
    renamed = {}
    for name, array in stored.items():
        for pattern, ours in RENAMES:
            new, count = re.subn(pattern, ours, name)
            if count:
                renamed[new] = array
                break
        else:
            if not TIED.match(name):
                renamed[name] = array
    return renamed


def check(model: DiffusionGemma, weights: dict[str, mx.array], source: str) -> None:
    """Compare names and shapes with what the config's geometry needs; the first difference is named."""
    expected = {name: array.shape for name, array in tree_flatten(model.parameters())}
    missing, extra = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    if missing:
        raise CheckpointError(f"{source}: tensor {missing[0]} is missing ({len(missing)} of {len(expected)} in all)")
    if extra:
        raise CheckpointError(f"{source}: tensor {extra[0]} has no place in this model ({len(extra)} such in all)")
    for name, shape in expected.items():
        if weights[name].shape != shape:
            raise CheckpointError(
                f"{source}: tensor {name} has shape {tuple(weights[name].shape)}; config.json asks for {tuple(shape)}"
            )
