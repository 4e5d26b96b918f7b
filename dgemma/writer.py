"""A checkpoint folder being written: filled tensor by tensor, there only when it is whole.

The plan says which bytes of which file a tensor takes. So tensors may come in any order, none waits for another, and what
is held at a time is the one that came and a piece of it packed.

Everything goes into a folder beside the wanted one, `.NAME.PID.part`. A file gets the header that makes it readable when
all tensors are there, config.json comes last, then the folder is renamed. A run that is killed leaves that folder at
most, which no loader takes for a checkpoint; the next run of the same name removes it.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import mlx.core as mx

from .config import read_json
from .errors import CheckpointError, OptionError, OutputError
from .formats import Format
from .plan import Place, Plan
from .stored import INDEX
from .weights import cast

PIECE = 1 << 24  # numbers of a tensor that are unpacked, cast and packed at once

Progress = Callable[[int, int], None]  # bytes written so far, bytes in all


class Writer:
    """The files of a plan, to be filled inside `with`; leaving it normally puts the folder `out` in its place.

    An exception, Ctrl-C too, leaves nothing behind. OutputError says why a folder cannot be written.
    """

    def __init__(self, out: str | Path, plan: Plan, overwrite: bool = False, progress: Progress | None = None):
        self.out, self.plan = check_folder(out, overwrite), plan
        self._name, self._overwrite, self._progress = str(out), overwrite, progress
        self._part, self._old = (_sibling(self.out, kind) for kind in ("part", "old"))
        self._waiting, self._done = set(plan.places), 0

    def __enter__(self) -> Writer:
        with self._mentioning():
            _sweep(self.out)
            check_folder(self._name, self._overwrite)  # once more: what was swept may have been put back
            self._check_free()
        with self._mentioning(), self._undone():
            self._part.mkdir()
            for name, file in self.plan.files.items():
                with (self._part / name).open("xb") as made:
                    made.truncate(file.nbytes)  # zeros for now: no header
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        with self._undone():
            if kind is None:
                self._finish()
        if kind is not None:
            shutil.rmtree(self._part, ignore_errors=True)

    def put(self, name: str, array: mx.array) -> None:
        """Our parameter `name`, packed on the way if the plan says so."""
        mx.eval(array)
        flat = _rows(array)
        self._fill(name, array.shape, lambda rows: flat[rows])

    def put_packed(self, name: str, parts: Mapping[str, mx.array], format: Format) -> None:
        """The same, of a matrix that is packed in `format`: its parts as they are if the plan has that format too."""
        mx.eval(*parts.values())
        flat = {part: _rows(array) for part, array in parts.items()}
        *rows, words = parts["weight"].shape
        shape = (*rows, words * 32 // format.bits)
        if self.plan.format(name) == format:
            for part, place in self._take(name, shape).items():
                self._store(place, flat[part], 0)
            self._account(name)
        else:
            self._fill(name, shape, lambda rows: format.unpack({part: of[rows] for part, of in flat.items()}, mx.float32))

    def save(self, name: str, data: bytes) -> None:
        """A small file beside the weights."""
        with self._mentioning(), (self._part / name).open("xb") as file:
            file.write(data)
            _sync(file)

    # -- tensors ------------------------------------------------------------------------------------------------------

    def _fill(self, name: str, shape: tuple[int, ...], rows: Callable[[slice], mx.array]) -> None:
        """Write a parameter piece by piece; `rows` gives some of its rows, all leading axes taken as one."""
        places, fmt = self._take(name, tuple(shape)), self.plan.format(name)
        count, width = _flat(shape)
        for begin in range(0, count, step := max(1, PIECE // width)):
            piece = rows(slice(begin, begin + step))
            # Scales come of the exact numbers and are rounded once, to the dtype that they are stored in.
            made = {name.rpartition(".")[2]: piece} if fmt is None else fmt.pack(piece.astype(mx.float32))
            mx.eval(made)
            for part, place in places.items():
                self._store(place, made[part], begin)
        self._account(name)

    def _take(self, name: str, shape: tuple[int, ...]) -> dict[str, Place]:
        """The places of a parameter of this shape that has not come before."""
        if name not in self._waiting:
            where = "came twice" if name in self.plan.places else "has no place in this model"
            raise CheckpointError(f"tensor {name} {where}")
        if shape != self.plan.shapes[name]:
            raise CheckpointError(f"tensor {name} has shape {shape}; the config asks for {self.plan.shapes[name]}")
        self._waiting.remove(name)
        return self.plan.places[name]

    def _store(self, place: Place, rows: mx.array, first: int) -> None:
        """Write some rows of a stored tensor, from row `first` on."""
        data = cast(rows, place.dtype)
        if place.dtype == mx.float16 and mx.any(mx.isinf(data) & ~mx.isinf(rows)).item():
            raise OptionError(f"tensor {place.name} has numbers beyond float16's 65,504; take bfloat16 or float32")
        count, _ = _flat(place.shape)
        with self._mentioning(), (self._part / place.file).open("r+b") as file:
            file.seek(place.offset + first * (place.nbytes // max(1, count)))
            file.write(memoryview(mx.contiguous(data).reshape(-1).view(mx.uint8)))

    def _account(self, name: str) -> None:
        """Count a parameter as written, and let go of the memory that it took."""
        self._done += sum(place.nbytes for place in self.plan.places[name].values())
        mx.clear_cache()
        if self._progress is not None:
            self._progress(self._done, self.plan.nbytes)

    # -- the end ------------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Headers, index, config, and the folder's name: from then on it is a checkpoint."""
        if self._waiting:
            first = min(self._waiting)
            raise CheckpointError(f"tensor {first} is missing ({len(self._waiting)} of {len(self.plan.places)} in all)")
        with self._mentioning():
            for name, file in self.plan.files.items():
                with (self._part / name).open("r+b") as made:
                    made.write(file.header)
                    _sync(made)
        places = [place for parts in self.plan.places.values() for place in parts.values()]
        index = {"metadata": {"total_size": sum(place.nbytes for place in places)}}
        self.save(INDEX, _json(index | {"weight_map": {place.name: place.file for place in places}}))
        self.save("config.json", _json(self.plan.config))
        with self._mentioning():
            _sync_folder(self._part)
            self._swap()
        with suppress(OSError):  # it is there, and whole
            _sync_folder(self.out.parent)
        shutil.rmtree(self._old, ignore_errors=True)

    def _swap(self) -> None:
        """Give the finished folder its name; one that is in its place goes only in that moment."""
        try:
            if self._overwrite and self.out.exists():
                self.out.rename(self._old)
            self._part.rename(self.out)
        except BaseException:
            if self._old.exists() and not self.out.exists():
                self._old.rename(self.out)
            raise

    def _check_free(self) -> None:
        """Refuse a disk that is too full before any work is done."""
        free = shutil.disk_usage(self.out.parent).free
        if free < self.plan.nbytes:
            raise OutputError(f"{self._name}: needs {self.plan.nbytes:,} bytes, but {free:,} are free on that disk; make room")

    @contextmanager
    def _mentioning(self) -> Iterator[None]:
        """An operating system's error as one line that names the folder."""
        try:
            yield
        except OSError as error:
            raise OutputError(f"{self._name}: cannot be written ({error.strerror or error}); nothing was kept") from None

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Take the unfinished folder away if this fails."""
        try:
            yield
        except BaseException:
            shutil.rmtree(self._part, ignore_errors=True)
            raise


def check_folder(out: str | Path, overwrite: bool = False) -> Path:
    """The absolute path of a folder that a checkpoint can be written to; OutputError says why it cannot."""
    if not str(out):  # would be the folder that one works in
        raise OutputError("the folder to write has an empty name; give one")
    try:
        path = Path(out).expanduser().resolve()
        if path.exists() and not path.is_dir():
            raise OutputError(f"{out}: is a file; give the name of a folder")
        if path.is_mount():
            raise OutputError(f"{out}: is where a disk is mounted; give the name of a folder inside it")
        if not path.parent.is_dir():
            raise OutputError(f"{out}: there is no folder {path.parent}; make it first")
        if not os.access(path.parent, os.W_OK):
            raise OutputError(f"{out}: cannot be written (permission denied)")
        if path.is_dir() and any(path.iterdir()):
            if not overwrite:
                raise OutputError(f"{out}: is not empty; give another name, or overwrite it (--overwrite)")
            if not _is_checkpoint(path):
                raise OutputError(f"{out}: is not empty and no DiffusionGemma; only a checkpoint is overwritten")
            if not os.access(path, os.W_OK):  # it could be moved away, but not removed
                raise OutputError(f"{out}: cannot be overwritten (permission denied)")
    except (ValueError, RuntimeError, OSError) as error:  # a NUL, no home, a name too long
        reason = getattr(error, "strerror", None) or error
        raise OutputError(f"{out}: not a folder that can be written ({reason})") from None
    return path


def _is_checkpoint(folder: Path) -> bool:
    """Whether a folder may be replaced: other projects have a config.json too."""
    try:
        return read_json(folder / "config.json").get("model_type") == "diffusion_gemma"
    except CheckpointError:
        return False


def _sibling(out: Path, kind: str) -> Path:
    return out.with_name(f".{_stem(out)}.{os.getpid()}.{kind}")


def _stem(out: Path) -> str:
    """The folder's name, cut so that a file's name (255 bytes) has room for what stands around it."""
    stem = out.name
    while len(os.fsencode(stem)) > 200:
        stem = stem[:-1]
    return stem


def _sweep(out: Path) -> None:
    """Remove what killed runs of the same `out` left beside it, or put back the folder that one was about to replace."""
    pattern = re.compile(rf"\.{re.escape(_stem(out))}\.(\d+)\.(part|old)")
    for path in sorted(out.parent.iterdir()):
        found = pattern.fullmatch(path.name)
        if not found or path.is_symlink() or not path.is_dir() or _runs(int(found[1])):
            continue
        if found[2] == "old" and not out.exists():
            path.rename(out)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _runs(pid: int) -> bool:
    """Whether another process has this id; this one's own was left by one that had the same, as in a container."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _rows(array: mx.array) -> mx.array:
    """`array` as a matrix, all leading axes taken as one."""
    return array.reshape(_flat(array.shape))


def _flat(shape: tuple[int, ...]) -> tuple[int, int]:
    """(rows, width) of a tensor whose leading axes are taken as one; a vector is one row."""
    return (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _sync(file: Any) -> None:
    """Have what was written on the disk before going on."""
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
