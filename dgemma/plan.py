"""What a checkpoint folder will hold, down to the byte, before a weight is read: config.json, files, where tensors lie."""

from __future__ import annotations

import copy
import json
import math
import secrets
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import mlx.core as mx

from .config import FULL, SLIDING, ModelConfig
from .errors import OptionError
from .formats import Format
from .matrices import PACKED
from .model import DiffusionGemma
from .names import EXPERT, stored
from .weights import DTYPES, shapes

SHARD = 5_000_000_000  # bytes of a file, where no parameter is larger
TYPES = {dtype: name for name, dtype in DTYPES.items()} | {mx.uint32: "U32", mx.uint8: "U8"}  # as safetensors calls them
QUANTIZATION = ("quantization", "quantization_config")  # keys of config.json: mlx's own, and Hugging Face's


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one stored tensor lies: its file, and the byte of it at which the data begins."""

    name: str  # as stored
    dtype: mx.Dtype
    shape: tuple[int, ...]
    file: str = ""
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * self.dtype.size


@dataclass(frozen=True, kw_only=True)
class File:
    """One safetensors file: what stands before the data, and its whole length in bytes."""

    header: bytes
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a checkpoint folder will hold, down to the byte, before a weight is read."""

    config: dict[str, Any]  # config.json
    shapes: dict[str, tuple[int, ...]]  # our parameters, as if nothing were packed
    formats: dict[str, Format]  # our module paths -> how their matrix is packed
    places: dict[str, dict[str, Place]]  # our parameters -> their parts
    files: dict[str, File]

    @classmethod
    def of(
        cls,
        config: Mapping[str, Any],
        formats: Mapping[str, Format] | None = None,
        dtype: mx.Dtype | Mapping[str, mx.Dtype] = mx.bfloat16,
        shard_size: float = SHARD,
    ) -> Plan:
        """The plan for a model of this config.json.

        `formats` says which of `matrices` are packed; everything else, and the scales of affine formats, is in `dtype`,
        which may name one for each of our parameters. OptionError for a format that does not fit its matrix,
        CheckpointError for a config that is no model's.
        """
        if not shard_size > 0:
            raise OptionError(f"shard_size is {shard_size}; a number of bytes above 0 is needed")
        formats = dict(formats or {})
        read = ModelConfig.from_dict(dict(config))
        wanted, packable = shapes(read), matrices(read)
        dtypes = {name: dtype if isinstance(dtype, mx.Dtype) else dtype[name] for name in wanted}
        for path, fmt in formats.items():
            if path not in packable:
                raise OptionError(f"{path} is no matrix of this model that can be packed")
            if not fmt.fits(packable[path]):
                raise OptionError(f"{path} is {packable[path][-1]} wide, which {fmt} does not divide")
        parts = {name: _parts(name, shape, dtypes[name], formats) for name, shape in wanted.items()}
        places, files = _arrange(parts, shard_size)
        written = _described(config, read, _quantization(formats, packable), dtype_name(dtypes["norm.weight"]))
        return cls(config=written, shapes=wanted, formats=formats, places=places, files=files)

    @property
    def parameters(self) -> int:
        """Numbers of the model."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all safetensors files."""
        return sum(file.nbytes for file in self.files.values())

    @property
    def bits_per_weight(self) -> float:
        """Bits of the files for each number of the model."""
        return 8 * self.nbytes / self.parameters

    def format(self, name: str) -> Format | None:
        """How our parameter `name` is packed; None when it is not."""
        path, _, last = name.rpartition(".")
        return self.formats.get(path) if last == "weight" else None


def matrices(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The modules that can be packed by our path, and the shapes of their matrices."""
    modules = DiffusionGemma(config).named_modules()
    return {path: tuple(module.weight.shape) for path, module in modules if type(module) in PACKED}


def dtype_name(dtype: mx.Dtype) -> str:
    """As config.json calls it: bfloat16, float32, ..."""
    return str(dtype).rpartition(".")[2]


def _parts(name: str, shape: tuple[int, ...], dtype: mx.Dtype, formats: Mapping[str, Format]) -> dict[str, Place]:
    """The stored tensors of one of our parameters, their place still open."""
    path, _, last = name.rpartition(".")
    fmt = formats.get(path) if last == "weight" else None
    if fmt is None:  # Hugging Face's files have the experts' stacks without ".weight"; mlx-vlm adds it when it reads
        plain = stored(path) if EXPERT.match(name) else stored(name)
        return {last: Place(name=plain, dtype=dtype, shape=shape)}
    scales = dtype if fmt.mode == "affine" else mx.uint8
    return {
        part: Place(name=f"{stored(path)}.{part}", dtype=mx.uint32 if part == "weight" else scales, shape=of)
        for part, of in fmt.shapes(shape).items()
    }


def _arrange(
    parts: Mapping[str, Mapping[str, Place]], most: float
) -> tuple[dict[str, dict[str, Place]], dict[str, File]]:
    """Every tensor in a file of at most `most` bytes of data (or of one parameter), and these files."""
    shards: list[list[tuple[str, str]]] = [[]]
    filled = 0
    for name, of in parts.items():
        size = sum(place.nbytes for place in of.values())
        if shards[-1] and filled + size > most:
            shards.append([])
            filled = 0
        shards[-1] += [(name, part) for part in of]
        filled += size
    mark, files = secrets.token_hex(8), {}  # loading refuses files of two marks in one folder
    places: dict[str, dict[str, Place]] = {name: dict(of) for name, of in parts.items()}
    for number, keys in enumerate(shards, 1):
        keys.sort(key=lambda key: (-parts[key[0]][key[1]].dtype.size, parts[key[0]][key[1]].name))  # wide ones first: aligned
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        header, ends = _header([parts[name][part] for name, part in keys], mark)
        for (name, part), end in zip(keys, ends):
            place = parts[name][part]
            places[name][part] = replace(place, file=file, offset=len(header) + end - place.nbytes)
        files[file] = File(header=header, nbytes=len(header) + ends[-1])
    return places, files


def _header(held: list[Place], mark: str) -> tuple[bytes, list[int]]:
    """What stands before the data of a file (github.com/huggingface/safetensors), and where each tensor's data ends."""
    ends = list(accumulate(place.nbytes for place in held))
    entries: dict[str, Any] = {"__metadata__": {"format": "mlx", "dgemma": mark}}
    for place, end in zip(held, ends):
        offsets = (end - place.nbytes, end)
        entries[place.name] = {"dtype": TYPES[place.dtype], "shape": place.shape, "data_offsets": offsets}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, ends


def _quantization(formats: Mapping[str, Format], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any] | None:
    """config.json's `quantization`: the format of most numbers, and an entry for each matrix that has another."""
    if not formats:
        return None
    count: Counter[Format] = Counter()
    for path, fmt in formats.items():
        count[fmt] += math.prod(shapes[path])
    default = count.most_common(1)[0][0]
    return default.settings | {stored(path): fmt.settings for path, fmt in formats.items() if fmt != default}


def _described(raw: Mapping[str, Any], read: ModelConfig, quantization: dict[str, Any] | None, dtype: str) -> dict[str, Any]:
    """config.json as released files spell it, which every loader knows; what else it says stays."""
    config = copy.deepcopy(dict(raw))
    for section in (config, config["text_config"], config.get("vision_config") or {}):
        for key in QUANTIZATION:
            section.pop(key, None)
        for key in ("dtype", "torch_dtype"):
            if section.get(key) is not None:
                section[key] = dtype
    config["dtype"] = dtype
    text, layers = config["text_config"], read.text.layers
    text["layer_types"] = [layer.kind for layer in layers]
    kinds = {kind: {(one.head_dim, one.kv_heads) for one in layers if one.kind == kind} for kind in (SLIDING, FULL)}
    if all(len(found) <= 1 for found in kinds.values()):  # mlx-vlm knows no per_layer_config
        text.pop("per_layer_config", None)
        for head, heads in kinds[SLIDING]:
            text |= {"head_dim": head, "num_key_value_heads": heads}
        for head, heads in kinds[FULL]:
            text |= {"global_head_dim": head, "num_global_key_value_heads": heads}
    return config | ({} if quantization is None else dict.fromkeys(QUANTIZATION, quantization))
