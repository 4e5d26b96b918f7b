"""What mlx-vlm's `convert` makes of a checkpoint: the formats, and their files made again without mlx-vlm.

The golden of a format (goldens/formats: a .json and an .npz, both by make_formats.py) lists what mlx-vlm wrote, tensor by
tensor, and holds what mlx-vlm computed with it. The weights are not stored: `rebuild` makes them of oracle.tiny and
mx.quantize under the listed names and dtypes, and the checksums in the list tell that they are mlx-vlm's bits.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from oracle import cases, tiny
from oracle.cases import Case

GOLDENS = Path(__file__).resolve().parent / "goldens" / "formats"
DTYPES = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16, "U32": mx.uint32, "U8": mx.uint8}
MODEL = "packable"  # of tiny.CONFIGS
PATCHES = "model.encoder.vision_tower.patch_embedder.input_proj"

Choice = Callable[[str], "bool | dict[str, Any]"]  # a module's path -> whether it is quantised, or how


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """One call of mlx_vlm.convert.convert: its arguments, and the predicate that it is given.

    `choose` None leaves the choice of modules to mlx-vlm. `variant` says what is converted: the tiny model that sees
    pictures, the same with clipped linears, or one without a tower ("text").
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    choose: Choice | None = None
    variant: str = "pictures"


def words(path: str) -> bool:
    """All that reads and writes text; the eyes stay as they are."""
    return "vision" not in path


def everything(path: str) -> bool:
    """Every matrix, the patch projection too."""
    return True


def all_but_patches(path: str) -> bool:
    """Every matrix but the first of the vision tower."""
    return not path.endswith("input_proj")


def like_optiq(path: str) -> bool | dict[str, Any]:
    """An entry for every matrix, 4 or 8 bit by its place, as OptiQ's files have them."""
    if "vision" in path:
        return False
    careful = ".layers.0." in path or path.endswith(("embed_tokens", "v_proj", "mlp.down_proj"))
    return {"group_size": 64, "bits": 8 if careful else 4}


def every_mode(path: str) -> bool | dict[str, Any]:
    """As many formats as there are kinds of matrices, and some matrices not quantised at all."""
    for ending, entry in (
        ("embed_tokens", {"group_size": 32, "bits": 8, "mode": "mxfp8"}),
        ("q_proj", {"group_size": 16, "bits": 4, "mode": "nvfp4"}),
        ("k_proj", {"group_size": 32, "bits": 5}),
        ("v_proj", {"bits": 6}),  # in groups of affine's usual 64
        ("router.proj", False),
        ("experts.gate_up_proj", {"group_size": 32, "bits": 4, "mode": "mxfp4"}),
        ("experts.down_proj", {"group_size": 128, "bits": 3, "mode": "affine"}),
    ):
        if path.endswith(ending):
            return entry
    return "vision" not in path


def _affine(bits: int, group: int = 64, **more: Any) -> dict[str, Any]:
    return {"quantize": True, "q_bits": bits, "q_group_size": group} | more


def _mode(mode: str) -> dict[str, Any]:
    return {"quantize": True, "q_mode": mode, "q_bits": None, "q_group_size": None}


CONVERSIONS = {
    one.name: one
    for one in (
        *(
            Conversion(name=f"affine-{bits}-{group}", arguments=_affine(bits, group), choose=words)
            for bits in (3, 4, 5, 6, 8)
            for group in (32, 64, 128)
        ),
        *(Conversion(name=mode, arguments=_mode(mode), choose=words) for mode in ("mxfp4", "mxfp8", "nvfp4")),
        # What `mlx_vlm.convert` does when nobody brings a predicate: its own, and its recipes.
        Conversion(name="bf16", arguments={"dtype": "bfloat16"}),
        Conversion(name="f16", arguments={"dtype": "float16"}),
        Conversion(name="own-4", arguments=_affine(4)),
        Conversion(name="own-4-bf16", arguments=_affine(4, dtype="bfloat16")),
        Conversion(name="own-mxfp4", arguments=_mode("mxfp4")),
        Conversion(name="own-nvfp4-bf16", arguments=_mode("nvfp4") | {"dtype": "bfloat16"}),
        Conversion(name="recipe-2-6", arguments=_affine(4, quant_predicate="mixed_2_6")),
        Conversion(name="recipe-3-4", arguments=_affine(4, quant_predicate="mixed_3_4")),
        Conversion(name="optiq", arguments=_affine(4), choose=like_optiq),
        Conversion(name="every-mode", arguments=_affine(4), choose=every_mode),
        # The eyes too.
        Conversion(name="eyes-8", arguments=_affine(8), choose=all_but_patches),
        Conversion(name="patches-4", arguments=_affine(4), choose=everything),
        Conversion(name="patches-8", arguments=_affine(8), choose=everything),
        Conversion(name="patches-nvfp4", arguments=_mode("nvfp4"), choose=everything),
        Conversion(name="clipped-own-4", arguments=_affine(4), variant="clipped"),
        Conversion(name="clipped-4-32", arguments=_affine(4, 32), choose=everything, variant="clipped"),
        Conversion(name="text-own-4", arguments=_affine(4), variant="text"),
        Conversion(name="text-mxfp4", arguments=_mode("mxfp4"), choose=words, variant="text"),
    )
}

PROMPTS = {
    "picture": Case(name="packable-picture", model=MODEL, rows=((5, (3, 2), 9),)),  # longer than the window
    "words": Case(name="packable-words", model=MODEL, rows=((7,),)),
}


def prompts(variant: str) -> dict[str, Case]:
    """The prompts that a variant can read."""
    return {name: case for name, case in PROMPTS.items() if name == "words" or variant != "text"}


def canvases(case: Case) -> list[np.ndarray]:
    """Two canvases int32 [1, C] for a prompt."""
    return cases.canvases(tiny.CONFIGS[case.model], len(case.rows), case.name)


def config(variant: str) -> dict[str, Any]:
    """config.json of what is converted."""
    found = tiny.config(MODEL)
    if variant == "text":
        found["vision_config"] = None
    if variant == "clipped":
        found["vision_config"]["use_clipped_linears"] = True
    return found


@dataclass(frozen=True, kw_only=True)
class Listing:
    """What mlx-vlm wrote: the keys that it added to config.json, and each tensor's dtype, shape and checksum."""

    added: dict[str, Any]
    tensors: dict[str, tuple[str, list[int], int]]

    @classmethod
    def read(cls, name: str) -> Listing:
        """The golden of a format."""
        raw = json.loads((GOLDENS / f"{name}.json").read_text())
        return cls(added=raw["added"], tensors=raw["tensors"])

    def write(self, name: str) -> None:
        """One line a tensor, so that a changed one is a changed line."""
        lines = [f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in self.tensors.items()]
        added = json.dumps(self.added)
        (GOLDENS / f"{name}.json").write_text(f'{{"added": {added},\n"tensors": {{\n' + ",\n".join(lines) + "\n}}\n")

    @property
    def packs_patches(self) -> bool:
        """Whether the projection of the patches is quantised."""
        return f"{PATCHES}.scales" in self.tensors


def listed(tensors: dict[str, mx.array]) -> dict[str, tuple[str, list[int], int]]:
    """Tensors as a Listing has them."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    return {name: (names[t.dtype], list(t.shape), checksum(t)) for name, t in sorted(tensors.items())}


def checksum(tensor: mx.array) -> int:
    """CRC-32 of a tensor's bytes."""
    as_bytes = tensor.reshape(-1).view(mx.uint8)
    return zlib.crc32(np.array(as_bytes).tobytes())


def rebuild(folder: Path, name: str) -> Path:
    """The folder of a converted checkpoint, as mlx-vlm wrote it; returns the folder."""
    found = Listing.read(name)
    made = tensors(found, CONVERSIONS[name].variant)
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), made, metadata={"format": "mlx"})
    size = sum(tensor.nbytes for tensor in made.values())
    index = {"metadata": {"total_size": size}, "weight_map": {name: "model.safetensors" for name in sorted(made)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config(CONVERSIONS[name].variant) | found.added))
    return folder


def tensors(listing: Listing, variant: str) -> dict[str, mx.array]:
    """Every listed tensor, made of a tiny checkpoint's weights. Packed on the CPU: a GPU rounds otherwise."""
    source, stored = tiny.weights(config(variant)), listing.tensors
    made: dict[str, mx.array] = {}
    for name, (dtype, _, _) in stored.items():
        path, _, part = name.rpartition(".")
        if f"{path}.scales" not in stored:
            made[name] = _source(source, name).astype(DTYPES[dtype])
        elif part == "weight":
            how = settings(listing, path)
            unpacked = stored[f"{path}.scales" if how["mode"] == "affine" else "model.decoder.norm.weight"][0]
            parts = mx.quantize(_source(source, name).astype(DTYPES[unpacked]), **how, stream=mx.cpu)
            made |= {f"{path}.{kind}": array for kind, array in zip(("weight", "scales", "biases"), parts)}
    return made


def _source(weights: dict[str, np.ndarray], name: str) -> mx.array:
    """The tensor of a Hugging Face checkpoint; mlx-vlm writes `.weight` after the experts' names."""
    return mx.array(weights[name if name in weights else name.removesuffix(".weight")])


def settings(listing: Listing, path: str) -> dict[str, Any]:
    """The settings of one matrix, as mlx reads an entry: without a mode it is affine."""
    quantization = listing.added["quantization"]
    entry = quantization.get(path) or {key: quantization[key] for key in ("group_size", "bits", "mode")}
    return {"mode": "affine"} | entry
