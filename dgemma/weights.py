"""From files to a model: check every tensor of a checkpoint against its config, and load.

Checking needs headers only, so that whatever is wrong is said before a weight is read. It is strict: a tensor that is
missing, left over, or of another shape is named; nothing is filled in. Loading reads one tensor after the other, so that
at most one is held twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from . import backend
from .config import ModelConfig
from .errors import CheckpointError, OptionError
from .formats import Format, Quantization
from .matrices import PACKED
from .model import DiffusionGemma
from .names import EYES, Recipe, module, recipes, stored
from .stored import Headers, Tensor, tensors

DTYPES = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
BATCH = 1 << 26  # bytes of small tensors that are read in one go
SPARE = 0.8  # of the free memory that unpacked weights may take

Progress = Callable[[int, int], None]  # bytes read so far, bytes in all


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint folder, checked: every tensor that its config asks for is there and fits, and no other."""

    folder: Path
    config: ModelConfig
    tensors: dict[str, Tensor]  # by stored name
    recipes: dict[str, Recipe]  # our tensors -> how they are made of stored ones
    shapes: dict[str, tuple[int, ...]]  # our parameters, as if nothing were packed
    formats: dict[str, Format]  # our module paths -> how their matrix is packed
    free: int | None = field(default_factory=backend.free_memory)  # bytes of memory when it was opened: decides `unpacks`

    @classmethod
    def open(cls, folder: str | Path, headers: Headers | None = None) -> Checkpoint:
        """Read config and headers. CheckpointError names the file, the tensor or the key at fault.

        `headers` are those of files that are not in the folder yet (hub.Found.headers): all but `read` works without them.
        """
        folder = Path(folder)
        config = ModelConfig.read(folder)
        quantization = Quantization.of(config.quantization, module, str(folder / "config.json"))
        return cls.of(folder, config, tensors(folder, headers), quantization)

    @classmethod
    def of(cls, folder: Path, config: ModelConfig, found: dict[str, Tensor], quantization: Quantization) -> Checkpoint:
        """The checkpoint of these tensors, checked. CheckpointError names the first that does not fit."""
        try:
            made = recipes(found)
        except CheckpointError as error:  # names alone do not tell whose they are
            raise CheckpointError(f"{folder}: {error}") from None
        if config.vision is not None and not any(name.startswith(EYES) for name in made):
            config = replace(config, vision=None)  # a conversion that left the eyes out: it reads text
        opened = cls(folder=folder, config=config, tensors=found, recipes=made, shapes=shapes(config), formats={})
        opened._check(quantization)
        return opened

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype that the unquantised weights are stored in."""
        return DTYPES[self.tensors[self.recipes["norm.weight"].names[0]].dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that are read."""
        return sum(self.tensors[name].nbytes for recipe in self.recipes.values() for name in recipe.names)

    def nbytes_as(self, dtype: mx.Dtype, unpack: bool) -> int:
        """Bytes of the loaded weights in `dtype`, quantised ones unpacked or as they are."""
        total = 0
        for name, shape in self.shapes.items():
            fmt = None if unpack else self.formats.get(name.rpartition(".")[0])
            packed = fmt is not None and name.endswith(".weight")
            total += fmt.nbytes(shape, dtype.size) if packed else math.prod(shape) * dtype.size
        return total

    def unpacks(self, dtype: mx.Dtype) -> bool:
        """Whether loading here unpacks quantised weights: on a CPU, where products of packed ones are slow, if they fit."""
        if not self.formats or backend.is_gpu():
            return False
        return self.free is None or self.nbytes_as(dtype, unpack=True) < SPARE * self.free

    # -- checks -------------------------------------------------------------------------------------------------------

    def _check(self, quantization: Quantization) -> None:
        """Compare names, dtypes and shapes with what the config asks for; the first difference is named."""
        seen = set()
        for name, shape in self.shapes.items():
            path, _, part = name.rpartition(".")
            if part == "weight" and f"{path}.scales" in self.recipes:
                fmt = quantization.format(path)
                if fmt is None:
                    self._fail(f"tensor {stored(path)}.scales belongs to a quantised weight; config.json says nothing of it")
                self._check_packed(path, fmt, shape)
                self.formats[path] = fmt
                seen |= {f"{path}.{one}" for one in fmt.parts}
            else:
                self._check_plain(name, shape)
                seen.add(name)
        extra = sorted(self.recipes.keys() - seen)
        if extra:
            first = self.recipes[extra[0]].names[0]
            self._fail(f"tensor {first} has no place in this model ({len(extra)} such in all)")

    def _check_plain(self, name: str, shape: tuple[int, ...]) -> None:
        for one in self.recipes[name].names if name in self.recipes else ():
            if self.tensors[one].dtype == "U32":
                self._fail(f"tensor {one} is quantised, but its scales are missing")
        self._check_shape(name, shape, "config.json asks for")
        for one in self.recipes[name].names:
            tensor = self.tensors[one]
            if tensor.dtype not in DTYPES:
                self._fail(f"tensor {one} is {tensor.dtype}; unquantised weights are {', '.join(DTYPES)}")

    def _check_packed(self, path: str, fmt: Format, shape: tuple[int, ...]) -> None:
        if len(shape) < 2:
            self._fail(f"tensor {stored(path)}.weight is quantised; only matrices are")
        if not fmt.fits(shape):
            self._fail(f"{stored(path)} is {shape[-1]} wide, which {fmt} does not divide; config.json's quantization is wrong")
        for part, packed in fmt.shapes(shape).items():
            self._check_shape(f"{path}.{part}", packed, f"quantization in config.json ({fmt}) asks for")
            kinds = ("U32",) if part == "weight" else tuple(DTYPES) if fmt.mode == "affine" else ("U8",)
            for one in self.recipes[f"{path}.{part}"].names:
                if self.tensors[one].dtype not in kinds:
                    self._fail(f"tensor {one} is {self.tensors[one].dtype}; {fmt} needs {', '.join(kinds)}")

    def _check_shape(self, name: str, shape: tuple[int, ...], who: str) -> None:
        if name not in self.recipes:
            missing = [n for n in self.shapes if n not in self.recipes]
            self._fail(f"tensor {stored(name)} is missing ({max(1, len(missing))} of {len(self.shapes)} in all)")
        found = self._shape(self.recipes[name])
        if found != shape:
            self._fail(f"tensor {stored(name)} has shape {found}; {who} {shape}")

    def _shape(self, recipe: Recipe) -> tuple[int, ...]:
        """The shape that a recipe makes."""
        parts = []
        for names in recipe.parts:
            first = self.tensors[names[0]]
            for name in names[1:]:
                if (self.tensors[name].shape, self.tensors[name].dtype) != (first.shape, first.dtype):
                    self._fail(f"tensors {names[0]} and {name} differ in shape or dtype; experts must be alike")
            parts.append((len(names), *first.shape) if recipe.stacked else first.shape)
        if len(parts) == 1:
            return parts[0]
        if any(len(p) < 2 or p[:-2] != parts[0][:-2] or p[-1] != parts[0][-1] for p in parts):
            self._fail(f"tensors {recipe.parts[0][0]} and {recipe.parts[1][0]} do not fit together: {parts[0]}, {parts[1]}")
        return (*parts[0][:-2], sum(p[-2] for p in parts), parts[0][-1])

    def _fail(self, what: str) -> None:
        raise CheckpointError(f"{self.folder}: {what}")

    # -- reading ------------------------------------------------------------------------------------------------------

    def read(self) -> Iterator[tuple[str, dict[str, mx.array]]]:
        """Every parameter, file after file: its name, and its parts as stored ({"weight": ...}, and scales if packed).

        Arrays are lazy, and only held by whoever received them.
        """
        files: dict[Path, dict[str, mx.array]] = {}
        for name in sorted(self.shapes, key=lambda n: (self.tensors[self.recipes[n].names[0]].file, n)):
            path, _, last = name.rpartition(".")
            fmt = self.formats.get(path) if last == "weight" else None
            parts = {part: f"{path}.{part}" for part in fmt.parts} if fmt else {last: name}
            yield name, {part: self._make(self.recipes[of], files) for part, of in parts.items()}

    def _make(self, recipe: Recipe, files: dict[Path, dict[str, mx.array]]) -> mx.array:
        parts = []
        for names in recipe.parts:
            read = [self._take(name, files) for name in names]
            parts.append(mx.stack(read) if recipe.stacked else read[0])
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-2)

    def _take(self, name: str, files: dict[Path, dict[str, mx.array]]) -> mx.array:
        path = self.tensors[name].file
        if path not in files:
            try:
                files[path] = mx.load(str(path), format="safetensors")
            except (RuntimeError, ValueError) as error:
                raise CheckpointError(f"{path}: cannot be loaded ({error})") from None
        return files[path].pop(name)


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter of a model, nothing packed."""
    return {name: tuple(array.shape) for name, array in tree_flatten(DiffusionGemma(config).parameters())}


def load(
    checkpoint: str | Path | Checkpoint,
    image_attention: str = "encoder-window",
    dtype: mx.Dtype | None = None,
    progress: Progress | None = None,
) -> DiffusionGemma:
    """The model of a checkpoint, its weights in `dtype` (default: the backend's choice for the stored one).

    Quantised weights stay packed on a GPU; on a CPU they are unpacked if they fit. CheckpointError names what is wrong.
    """
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint.open(checkpoint)
    dtype = check_dtype(dtype or backend.activation_dtype(opened.dtype))
    model = DiffusionGemma(opened.config, image_attention)
    unpack = opened.unpacks(dtype)
    if not unpack:
        pack(model, opened.formats)
    done, total, waiting = 0, opened.nbytes, []
    for name, parts in opened.read():
        path, _, last = name.rpartition(".")
        done += sum(part.nbytes for part in parts.values())
        if unpack and len(parts) > 1:
            parts = {last: opened.formats[path].unpack(parts, dtype)}
        waiting += [(f"{path}.{part}" if path else part, cast(array, dtype)) for part, array in parts.items()]
        if sum(array.nbytes for _, array in waiting) >= BATCH:
            _install(model, waiting)
            if progress is not None:
                progress(done, total)
    _install(model, waiting)
    if progress is not None:
        progress(total, total)
    return model


def _install(model: DiffusionGemma, waiting: list[tuple[str, mx.array]]) -> None:
    """Read these tensors now, put them into the model, and forget what they were made of."""
    mx.eval([array for _, array in waiting])
    model.load_weights(waiting, strict=False)  # Checkpoint.open has been strict
    waiting.clear()


def pack(model: DiffusionGemma, formats: dict[str, Format]) -> None:
    """Replace the modules at these paths by packed ones; their tensors are still to be loaded."""
    modules = dict(model.named_modules())
    twins = [(path, PACKED[type(modules[path])](modules[path].weight.shape, fmt)) for path, fmt in formats.items()]
    if twins:
        model.update_modules(tree_unflatten(twins))


def cast(array: mx.array, dtype: mx.Dtype) -> mx.array:
    """`array` in `dtype` if it holds floats; packed integers and float8 scales stay."""
    return array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array


def check_dtype(dtype: mx.Dtype) -> mx.Dtype:
    """The dtype, if the model can compute in it here."""
    allowed = tuple(DTYPES.values()) if backend.is_gpu() else (mx.float32,)
    if dtype not in allowed:
        raise OptionError(f"dtype is {dtype}; on this device allowed: {', '.join(str(one) for one in allowed)}")
    return dtype
