"""What lies in a checkpoint folder: safetensors files, their headers, the index; no weight is read.

Layout of a file (github.com/huggingface/safetensors): u64 header length, JSON header with `data_offsets`, the data.
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import read_json
from .errors import CheckpointError

INDEX = "model.safetensors.index.json"
# Where mlx-optiq keeps the eyes that it takes out of its quantised files; their names are vision_tower... there.
SIDECARS = ("optiq/optiq_vision.safetensors", "optiq_vision.safetensors")
SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1,
         "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U64": 8}  # fmt: skip
UNREAD = {
    ".bin": "a pickle, which may run code of its own when it is read",
    ".pt": "a pickle, which may run code of its own when it is read",
    ".pth": "a pickle, which may run code of its own when it is read",
    ".gguf": "GGUF, which is not read",
}
Headers = Mapping[str, dict[str, Any]]  # names of files that are not in the folder -> their headers


@dataclass(frozen=True)
class Tensor:
    """One stored tensor."""

    file: Path
    dtype: str  # safetensors' name: BF16, F32, U32, ...
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * SIZES.get(self.dtype, 1)


def tensors(folder: Path, headers: Headers | None = None) -> dict[str, Tensor]:
    """Every tensor of a checkpoint folder by its stored name; CheckpointError names the file or tensor at fault.

    `headers` are those of files that are still to come into the folder (hub.Found.headers).
    """
    headers = headers or {}
    found: dict[str, Tensor] = {}
    origins: dict[str, str] = {}
    for path in shards(folder, headers):
        header = headers.get(path.relative_to(folder).as_posix())
        if header is None:
            header = check_file(path)
        else:
            check_header(header, path)
        origin = (header.get("__metadata__") or {}).get("dgemma")
        if origin:
            origins.setdefault(origin, path.name)
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if name in found:
                raise CheckpointError(f"{path}: tensor {name} stands in two files of this checkpoint")
            found[name] = Tensor(path, str(entry["dtype"]), tuple(entry["shape"]))
    if len(origins) > 1:
        first, second = list(origins.values())[:2]
        raise CheckpointError(f"{folder}: {first} and {second} are of two conversions; download or convert it anew")
    _check_index(folder, found)
    return found


def shards(folder: Path, coming: Collection[str] = ()) -> list[Path]:
    """The safetensors files of a checkpoint: those that the index names, else all.

    Each must exist, in the folder or among `coming`, the names (relative to it) of files that are still to be fetched.
    """
    index, here = folder / INDEX, [folder / name for name in coming if "/" not in name]
    if index.exists():
        named = sorted(set(_weight_map(index).values()))
        for name in named:
            if Path(name).name != name or "\\" in name:
                raise CheckpointError(f"{index}: {name!r} points outside the checkpoint folder")
            if name not in coming and not os.path.isfile(folder / name):  # False, too, for a name too long
                raise CheckpointError(f"{folder}: shard {name} is missing; the index lists {len(named)} files")
        paths = [folder / name for name in named]
    else:
        paths = sorted({*folder.glob("*.safetensors"), *(path for path in here if path.suffix == ".safetensors")})
    if not paths:
        other = sorted(path for path in {*folder.glob("*"), *here} if path.suffix in UNREAD)
        hint = f"; {other[0].name} is {UNREAD[other[0].suffix]}: convert it to safetensors" if other else ""
        raise CheckpointError(f"{folder}: no *.safetensors file{hint}")
    beside = [name for name in SIDECARS if name in coming or (folder / name).is_file()]
    return paths + [folder / name for name in beside if folder / name not in paths]


def _weight_map(index: Path) -> dict[str, str]:
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise CheckpointError(f"{index}: 'weight_map' must map tensor names to files")
    return names


def _check_index(folder: Path, found: dict[str, Tensor]) -> None:
    """The index and the files must tell the same story, or shards of two checkpoints lie here together."""
    index = folder / INDEX
    if not index.exists():
        return
    named = _weight_map(index)
    for name, file in named.items():
        if name not in found or found[name].file.name != file:
            where = "in no file" if name not in found else f"in {found[name].file.name}"
            raise CheckpointError(
                f"{folder}: the index says tensor {name} is in {file}, but it is {where}; these are files of two checkpoints"
            )
    sidecars = {folder / name for name in SIDECARS}
    for name, tensor in found.items():
        if name not in named and tensor.file not in sidecars:
            raise CheckpointError(
                f"{folder}: {tensor.file.name} holds tensor {name}, which the index does not name; "
                "these are files of two checkpoints"
            )


def check_file(path: Path) -> dict[str, Any]:
    """The header of a safetensors file: tensor name -> dtype, shape, data_offsets.

    Refuses a file that is cut short or damaged, before mlx maps it.
    """
    header, begin, size = _read_header(path)
    end = begin + check_header(header, path)
    if size < end:
        raise CheckpointError(f"{path}: truncated, {size:,} of {end:,} bytes; download it again")
    return header


def check_header(header: dict[str, Any], path: Path) -> int:
    """The bytes of data that a header speaks of; CheckpointError when it contradicts itself.

    As safetensors' own reader, and unlike mlx's, it wants tensors that follow one another without gap or overlap.
    """
    spans = []
    try:
        for name, entry in header.items():
            if name == "__metadata__":
                if not all(isinstance(value, str) for value in dict(entry or {}).values()):
                    raise ValueError
                continue
            (begin, end), shape, size = entry["data_offsets"], entry["shape"], SIZES.get(entry["dtype"])
            if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
                raise ValueError
            if size is not None and end - begin != math.prod(shape) * size:
                raise CheckpointError(f"{path}: damaged header (sizes and shapes differ); download it again")
            spans.append((begin, end))
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{path}: damaged header; download it again") from None
    spans.sort()
    ends = [0, *(end for _, end in spans)]
    if [begin for begin, _ in spans] != ends[:-1]:
        raise CheckpointError(f"{path}: damaged header (tensors overlap, or leave gaps); download it again")
    return ends[-1]


def _read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """The header of a safetensors file as it stands there, the byte at which the data begins, and the file's size."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # to open a pipe would be to wait for ever
            raise CheckpointError(f"{path}: not a file")
        with path.open("rb") as file:
            start, size = file.read(8), status.st_size
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if length > min(size - 8, 100_000_000):
                raise CheckpointError(f"{path}: not a whole safetensors file ({size:,} bytes); download it again")
            header = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):  # no UTF-8, no JSON, a number of more than 4,300 digits
        header = None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the safetensors header is damaged; download it again")
    return header, 8 + length, size
