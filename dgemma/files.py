"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from .errors import OutputError


def check_output(name: str | Path) -> None:
    """Refuse an output that cannot be written before any work is done."""
    try:
        path = Path(name).expanduser()
        parent = path.resolve().parent
        if path.is_dir():
            raise OutputError(f"{name}: is a folder; give a file to write")
        if not parent.is_dir():
            raise OutputError(f"{name}: there is no folder {parent}; make it first")
        if not os.access(path if path.exists() else parent, os.W_OK):
            raise OutputError(f"{name}: cannot be written (permission denied)")
    except (TypeError, ValueError, RuntimeError, OSError) as error:  # no path, a NUL, no home, a name too long
        reason = getattr(error, "strerror", None) or error
        raise OutputError(f"{name}: not a file that can be written ({reason})") from None


@contextmanager
def whole(name: str) -> Iterator[BinaryIO]:
    """A file to write: it stands beside `name` first, and takes its place when all is written and on the disk.

    A device or a pipe is written directly. OutputError when the file cannot be written; then `name` is as it was.
    """
    path = Path(name).expanduser().resolve()
    part = path.with_name(f".{path.name[:40]}.{os.getpid()}.{secrets.token_hex(4)}.part")  # threads may write one file at once
    try:
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            with path.open("wb") as file:
                yield file
            return
        try:
            with part.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise OutputError(f"{name}: cannot be written ({error.strerror or error}); nothing was kept") from None


def write_whole(name: str, text: str) -> None:
    """Write a text file whole or not at all."""
    with whole(name) as file:
        file.write(text.encode("utf-8", "backslashreplace"))
