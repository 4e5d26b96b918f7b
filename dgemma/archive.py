"""A record and arrays in one file: a safetensors file, written whole or not at all, and read only if it is what was written.

    metadata   format, version, what it belongs to, the record as JSON, a SHA-256 of everything else in the file
    tensors    the arrays by name

Nothing in it is code: JSON and numbers.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import numpy as np

from . import files, stored
from .errors import CheckpointError, OutputError, SessionError

DTYPES = {mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16", mx.int32: "I32", mx.uint32: "U32"}
PIECE = 1 << 24  # bytes of a file that are hashed at a time


def write(name: str | Path, kind: str, version: int, owner: str, record: Any, arrays: Mapping[str, mx.array]) -> None:
    """Write `record` (JSON) and `arrays` to a file; `owner` is what alone may read it. OutputError, SessionError.

    Arrays are evaluated one at a time.
    """
    try:
        text = json.dumps(record, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise SessionError(f"{name}: something said cannot be written as JSON ({error})") from None
    fields = {"format": kind, "version": str(version), "owner": owner, "record": text}
    files.check_output(name)
    if Path(name).expanduser().exists() and not Path(name).expanduser().is_file():  # to open a pipe would be to wait for ever
        raise OutputError(f"{name}: is no regular file; give another name")
    with files.whole(str(name)) as file:
        digest = _digest(fields, _table(arrays))
        begin = len(_header(fields | {"digest": digest.hexdigest()}, arrays))  # a digest is as long as any other
        file.seek(begin)
        for array in arrays.values():
            data = memoryview(mx.contiguous(array).reshape(-1).view(mx.uint8)) if array.size else b""
            digest.update(data)
            file.write(data)
        file.seek(0)
        file.write(_header(fields | {"digest": digest.hexdigest()}, arrays))


def check(name: str | Path, kind: str, version: int) -> tuple[Path, dict[str, str], dict[str, Any]]:
    """Path, metadata and table of arrays of a file of that kind and version, nothing else of it looked at; SessionError."""
    try:
        path = Path(name).expanduser()
        table = stored.check_file(path)
        fields = dict(table.pop("__metadata__", None) or {})
    except CheckpointError as error:
        raise SessionError(str(error).replace("; download it again", "")) from None
    except (TypeError, RuntimeError) as error:  # no path, no home
        raise SessionError(f"{name}: not a file that can be read ({error})") from None
    if fields.get("format") != kind:
        raise SessionError(f"{path}: is a safetensors file, but not a {kind}")
    if fields.get("version") != str(version):
        raise SessionError(f"{path}: is of version {fields.get('version')!r}; this dgemma reads version {version}")
    return path, fields, table


def read(name: str | Path, kind: str, version: int, owner: str) -> tuple[Any, dict[str, mx.array]]:
    """The record and the arrays of a file. SessionError when it is no such file, damaged, or belongs to another `owner`."""
    path, found, table = check(name, kind, version)
    fields = {key: value for key, value in found.items() if key != "digest"}
    with path.open("rb") as file:
        if _of_data(file, _digest(fields, table)) != found.get("digest"):
            if check(name, kind, version)[1:] != (found, table):  # saved anew between two looks at it
                return read(name, kind, version, owner)
            raise SessionError(f"{path}: is damaged: what it holds is not what was written")
        if fields.get("owner") != owner:
            raise SessionError(f"{path}: was saved with another checkpoint, dtype or image attention; load it with those")
        file.seek(0)
        try:
            arrays = mx.load(file, format="safetensors")  # this file, not one that has taken its place since
            mx.eval(arrays)
            return json.loads(fields["record"]), arrays
        except (KeyError, ValueError, RuntimeError) as error:  # what only a forger can have written; RecursionError is one
            raise SessionError(f"{path}: cannot be read ({type(error).__name__}: {error})") from None


def _plain(value: Any) -> Any:
    """A number of numpy's as Python's; TypeError for anything else."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is neither text nor a number")


def _table(arrays: Mapping[str, mx.array]) -> dict[str, dict[str, Any]]:
    """What a safetensors header says of the arrays: name -> dtype, shape, where it lies in the data; in the order given."""
    table, end = {}, 0
    for name, array in arrays.items():
        table[name] = {"dtype": DTYPES[array.dtype], "shape": list(array.shape), "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    return table


def _header(fields: Mapping[str, str], arrays: Mapping[str, mx.array]) -> bytes:
    """The beginning of a safetensors file."""
    text = json.dumps({"__metadata__": dict(fields)} | _table(arrays)).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _digest(fields: Mapping[str, str], table: Mapping[str, Any]) -> Any:
    """The beginning of a file's digest: all of its metadata, and what it says of its arrays."""
    return hashlib.sha256(json.dumps([sorted(fields.items()), sorted(table.items())], sort_keys=True).encode())


def _of_data(file: BinaryIO, digest: Any) -> str:
    """The digest of a whole file, `digest` being its beginning."""
    (length,) = struct.unpack("<Q", file.read(8))
    file.seek(length, os.SEEK_CUR)
    while piece := file.read(PIECE):
        digest.update(piece)
    return digest.hexdigest()
