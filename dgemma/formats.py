"""How quantised weights are packed: mlx's formats, and which tensor of a checkpoint has which.

A packed matrix `[..., O, I]` is stored as three or two tensors: `weight` uint32 `[..., O, I bits / 32]`, `scales`
`[..., O, I / group]` and, in affine formats only, `biases` of the same shape. An affine value is `scale * q + bias`, q a
whole number of `bits` bits; the others are small floats times a power of two (mxfp4, mxfp8: OCP Microscaling Formats
v1.0, one scale for 32) or times a float8 (nvfp4, one for 16).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from .errors import CheckpointError, OptionError

DEFAULTS = {"affine": (4, 64), "mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}  # mode -> bits, group size
BITS, GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)  # what affine may choose


@dataclass(frozen=True, kw_only=True)
class Format:
    """One way of packing: mode, bits a value, values that share a scale. OptionError when mlx packs nothing so."""

    mode: str = "affine"
    bits: int = 4
    group_size: int = 64

    def __post_init__(self) -> None:
        if self.mode not in DEFAULTS:
            raise OptionError(f"quantisation mode is {self.mode!r}; allowed: {', '.join(DEFAULTS)}")
        if self.mode != "affine":
            bits, group = DEFAULTS[self.mode]
            if (self.bits, self.group_size) != (bits, group):
                raise OptionError(f"{self.mode} has {bits} bits in groups of {group}, not {self.bits} in {self.group_size}")
        elif self.bits not in BITS or self.group_size not in GROUPS:
            raise OptionError(
                f"{self.bits} bits in groups of {self.group_size}; "
                f"affine has {', '.join(map(str, BITS))} bits in groups of {', '.join(map(str, GROUPS))}"
            )

    @classmethod
    def of(cls, mode: str = "affine", bits: int | None = None, group_size: int | None = None) -> Format:
        """The format, what is None being the mode's usual."""
        usual = DEFAULTS.get(mode, (None, None))
        return cls(
            mode=mode,
            bits=usual[0] if bits is None else bits,
            group_size=usual[1] if group_size is None else group_size,
        )

    def __str__(self) -> str:
        return f"{self.bits} bit, groups of {self.group_size}" if self.mode == "affine" else self.mode

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the tensors of a packed matrix."""
        return ("weight", "scales", "biases") if self.mode == "affine" else ("weight", "scales")

    @property
    def settings(self) -> dict[str, Any]:
        """What mlx's quantised operations, and config.json, call this format."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a matrix of `shape` can be packed: whole groups, whole 32-bit words."""
        return shape[-1] % self.group_size == 0 and shape[-1] * self.bits % 32 == 0

    def shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """The shapes of the parts of a packed matrix of `shape`."""
        *rows, width = shape
        groups = (*rows, width // self.group_size)
        return dict(zip(self.parts, ((*rows, width * self.bits // 32), groups, groups)))

    def nbytes(self, shape: tuple[int, ...], scale_bytes: int = 2) -> int:
        """Bytes of a packed matrix of `shape`, affine scales taking `scale_bytes` each."""
        sizes = {name: math.prod(of) for name, of in self.shapes(shape).items()}
        each = scale_bytes if self.mode == "affine" else 1
        return 4 * sizes["weight"] + each * (sizes["scales"] + sizes.get("biases", 0))

    def pack(self, matrix: mx.array) -> dict[str, mx.array]:
        """The parts of a matrix `[..., O, I]`."""
        return dict(zip(self.parts, mx.quantize(matrix, **self.settings)))

    def unpack(self, parts: Mapping[str, mx.array], dtype: mx.Dtype) -> mx.array:
        """The matrix `[..., O, I]` of its parts."""
        scales, biases = parts["scales"], parts.get("biases")
        if self.mode == "affine":  # in the dtype asked for, not in the one the scales are stored in
            scales, biases = scales.astype(dtype), biases.astype(dtype)
            return mx.dequantize(parts["weight"], scales, biases, **self.settings)
        return mx.dequantize(parts["weight"], scales, **self.settings, dtype=dtype)


@dataclass(frozen=True)
class Quantization:
    """The `quantization` of a config.json: a default, and entries for single modules (None: not quantised)."""

    default: Format | None = None
    entries: Mapping[str, Format | None] = field(default_factory=dict)

    @classmethod
    def of(cls, raw: Mapping[str, Any] | None, rename: Callable[[str], str], source: str) -> Quantization:
        """From config.json; `rename` turns a stored module path into ours. CheckpointError names what cannot be read."""
        if raw is None:
            return cls()
        if not isinstance(raw, dict):
            raise CheckpointError(f"{source}: quantization: a JSON object is expected, found {type(raw).__name__}")
        method = raw.get("quant_method")  # mlx's own entries never have one; those of gptq and awq have bits as well
        if method is not None or ("bits" not in raw and "mode" not in raw):
            raise CheckpointError(
                f"{source}: quantised by {method if isinstance(method, str) else 'an unknown method'}, which mlx has no format for; "
                "use the bf16 original or an MLX conversion of it"
            )
        default, entries = _format(raw, f"{source}: quantization"), {}
        for path, entry in raw.items():
            if isinstance(entry, dict):
                entries[rename(path)] = _format(entry, f"{source}: quantization of {path}")
            elif isinstance(entry, bool):
                entries[rename(path)] = default if entry else None
        return cls(default, entries)

    def format(self, path: str) -> Format | None:
        """The format of the module at `path`; None when it is not quantised."""
        return self.entries.get(path, self.default)


def _format(entry: Mapping[str, Any], name: str) -> Format:
    """One entry. What it leaves out is its mode's default; an entry without a mode is affine, as mlx-vlm writes them."""
    mode, bits, group = entry.get("mode", "affine"), entry.get("bits"), entry.get("group_size")
    for value in (bits, group):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise CheckpointError(f"{name}: bits and group_size are {bits!r} and {group!r}; whole numbers are needed")
    try:
        return Format.of(str(mode), bits, group)
    except OptionError as error:
        raise CheckpointError(f"{name}: {error}") from None
