"""Files of a hub repository, into Hugging Face's cache: each whole or not at all, and a download that broke off goes on.

huggingface_hub keeps the files that were finished when a download broke off and begins the others anew; of weights, one
file is gigabytes. So their bytes are fetched here, into `blobs/<etag>.incomplete`, the name that the cache's own tools
list and clear. Names, log-in, locks and the links of the snapshot are huggingface_hub's.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from .errors import CheckpointError

WORKERS = 4  # files that are fetched at once
TIMEOUT = 10.0  # seconds of silence after which a connection counts as broken
PATIENCE = 5.0  # seconds to wait for another program that fetches the same file
TRIES, WAIT = 5, 1.0  # attempts in a row that bring no byte, and the seconds between them
BUFFER = 1 << 20
MOST = 50 * 10**9  # bytes of a file that the hub gives to plain requests; huggingface_hub knows how to get larger ones
PASSING = (408, 429, 500, 502, 503, 504)  # answers that are another a little later
Progress = Callable[[int], object]  # told how many bytes came
NAME = re.compile(r"[\w.-]+")  # an etag that can be a file's name
SHA256 = re.compile(r"[0-9a-f]{64}")  # the etag of a large file


@dataclass(frozen=True)
class _File:
    """One file on the hub: where its bytes go, and how many there are."""

    name: str
    url: str
    blob: Path
    size: int

    @property
    def part(self) -> Path:
        """What has come of it."""
        return self.blob.with_name(f"{self.blob.name}.incomplete")

    @property
    def here(self) -> int:
        """Bytes that have come, in this run or an earlier one."""
        for path in (self.blob, self.part):
            if path.is_file():
                return min(self.size, path.stat().st_size)
        return 0


class Download:
    """Files of one commit that are fetched together into the snapshot `folder` of Hugging Face's cache.

    `files` are their names and bytes.
    """

    def __init__(self, hub_id: str, folder: Path, files: Mapping[str, int]):
        self.hub_id, self.commit, self._names = hub_id, folder.name, list(files)
        self._store = folder.parents[1]  # models--owner--name
        self.total, self._files = sum(files.values()), []
        self._stop = threading.Event()

    @property
    def here(self) -> int:
        """Bytes that have come, in this run or an earlier one."""
        return sum(file.here for file in self._files)

    def run(self) -> None:
        """Fetch all. Whatever stops it is raised as it comes; what has come is kept, and the next run goes on from there."""
        # Here, so that local checkpoints need no network's libraries; tqdm comes with huggingface_hub.
        from huggingface_hub import hf_hub_download
        # as above
        from huggingface_hub.utils import are_progress_bars_disabled
        # as above
        from tqdm import tqdm

        self._files = [file for name in self._names if (file := self._find(name)) is not None]
        self._check_space()
        look = {"desc": f"downloading {self.hub_id}", "unit": "B", "unit_scale": True}
        silent = are_progress_bars_disabled() or None  # None: where there is no terminal
        with tqdm(total=self.total, initial=self.here, disable=silent, **look) as bar:
            self._together([lambda file=file: self._fetch(file, bar.update) for file in self._files])
        for name in self._names:  # the bytes are there: this makes the links of the snapshot
            hf_hub_download(self.hub_id, name, revision=self.commit)

    def _find(self, name: str) -> _File | None:
        """A file's place in the cache; None for a file that only huggingface_hub can fetch."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url  # here, as above

        url = hf_hub_url(self.hub_id, name, revision=self.commit)
        told = get_hf_file_metadata(url)
        if not NAME.fullmatch(told.etag or "") or told.size is None or told.size > MOST:
            return None
        return _File(name, url, self._store / "blobs" / told.etag, told.size)

    def _check_space(self) -> None:
        """Refuse what the disk cannot hold before it is full."""
        self._store.mkdir(parents=True, exist_ok=True)
        needed, free = sum(file.size for file in self._files) - self.here, shutil.disk_usage(self._store).free
        if needed > free:
            raise OSError(errno.ENOSPC, f"{needed / 1e9:.1f} GB are to come, {free / 1e9:.1f} GB are free")

    def _together(self, tasks: Sequence[Callable[[], None]]) -> None:
        """Run the tasks, some at a time; the first that fails, or Ctrl-C, stops all."""
        with ThreadPoolExecutor(WORKERS) as pool:
            waiting = [pool.submit(task) for task in tasks]
            try:
                for one in as_completed(waiting):
                    one.result()
            except BaseException:
                self._stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _fetch(self, file: _File, progress: Progress) -> None:
        """One file, alone: a lock keeps other programs from it meanwhile."""
        from huggingface_hub.utils import WeakFileLock  # here, as above

        lock = self._store.parent / ".locks" / self._store.name / f"{file.blob.name}.lock"
        for folder in (lock.parent, file.blob.parent):
            folder.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock, timeout=PATIENCE):
            if file.blob.exists():
                return
            resumed = file.part.exists()
            self._fill(file, progress)
            hashed = resumed and SHA256.fullmatch(file.blob.name)
            if file.part.stat().st_size != file.size or (hashed and _sha256(file.part) != file.blob.name):
                file.part.unlink()
                raise CheckpointError(f"{file.name} came damaged and was thrown away")
            file.part.replace(file.blob)

    def _fill(self, file: _File, progress: Progress) -> None:
        """Append to the part until it is whole, asking again when the connection breaks."""
        from huggingface_hub.errors import HfHubHTTPError  # here, as above

        idle = 0
        with file.part.open("ab", buffering=BUFFER) as part:
            if part.tell() > file.size:
                _empty(part)
            while (had := part.tell()) < file.size:
                broken: Exception = ConnectionError("the hub closed the connection")
                try:
                    self._pull(file, part, had, progress)
                except HfHubHTTPError as error:
                    if error.response.status_code not in PASSING:
                        raise
                    broken = error
                except OSError:  # the disk's; the connection's own errors are none
                    raise
                except Exception as error:  # httpx's, whatever its name is in this version of huggingface_hub
                    broken = error
                idle = 0 if part.tell() > had else idle + 1
                if self._stop.is_set() or idle == TRIES:
                    raise broken
                if part.tell() < file.size:
                    self._stop.wait(WAIT)
            part.flush()
            os.fsync(part.fileno())

    def _pull(self, file: _File, part: BinaryIO, had: int, progress: Progress) -> None:
        """One request for the bytes from `had` on."""
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status  # here, as above

        headers = build_hf_headers() | {"Accept-Encoding": "identity"} | ({"Range": f"bytes={had}-"} if had else {})
        with get_session().stream("GET", file.url, headers=headers, timeout=TIMEOUT) as response:
            hf_raise_for_status(response)
            if had and response.status_code != 206:  # all of it, from the beginning
                _empty(part)
                progress(-had)
            for piece in response.iter_bytes():
                if self._stop.is_set():
                    return
                part.write(piece)
                progress(len(piece))


def _empty(part: BinaryIO) -> None:
    part.seek(0)
    part.truncate()


def _sha256(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(BUFFER):
            found.update(piece)
    return found.hexdigest()
