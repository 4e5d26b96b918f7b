"""Where a checkpoint is: the demo inside the package, a folder, or a repository on the Hugging Face hub.

A repository comes in three steps, so that a mistake is said before gigabytes are fetched: `find` gets the small files
(configs, tokenizer, template, index), `Found.headers` the first bytes of each file of weights, `Found.fetch` the rest.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .download import Download
from .errors import CheckpointError, OptionError
from .stored import shards

DEMO = Path(__file__).parent / "demo"
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
SMALL, NOT_SMALL = ("*.json", "*.jinja", "*.model", "*.txt"), "*/*"  # a repository's top folder is the checkpoint
REFUSED = (401, 403)  # answers to someone who may not read a repository
KEPT = "what has come is kept, and the same command goes on from there"


@dataclass(frozen=True, kw_only=True)
class Found:
    """A checkpoint: `folder` holds its small files, and its weights but those that are `absent`."""

    folder: Path
    hub_id: str | None = None
    absent: Mapping[str, int] = field(default_factory=dict)  # files of weights that are still on the hub -> their bytes

    def headers(self) -> dict[str, dict[str, Any]]:
        """The headers of the absent files, as stored.tensors and weights.Checkpoint.open take them. CheckpointError."""
        if not self.absent:
            return {}
        from huggingface_hub import HfApi  # here, so that local checkpoints never touch the network's libraries

        def ask(name: str) -> dict[str, Any]:
            told = HfApi().parse_safetensors_file_metadata(self.hub_id, name, revision=self.folder.name)
            entries = {tensor: vars(entry) for tensor, entry in told.tensors.items()}
            return entries | {"__metadata__": told.metadata}

        try:
            with ThreadPoolExecutor(8) as pool:
                return dict(zip(self.absent, pool.map(ask, self.absent)))
        except Exception as error:  # as in _ask
            raise _refusal(self.hub_id, self.folder.name, error) from None

    def nbytes(self, path: Path) -> int:
        """Bytes of one of the checkpoint's files, wherever it is."""
        name = path.relative_to(self.folder).as_posix()
        return self.absent[name] if name in self.absent else path.stat().st_size

    def fetch(self) -> Path:
        """The folder, whole: what is absent is fetched, with progress on a terminal's stderr.

        CheckpointError when that fails; what had come is kept and the next call goes on from there. Ctrl-C does the same.
        """
        if not self.absent:
            return self.folder
        work = Download(self.hub_id, self.folder, self.absent)
        try:
            work.run()
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"while downloading {self.hub_id}; {KEPT}") from None
        except Exception as error:  # as in _ask
            if not work.here or _status(error) in REFUSED:
                raise _refusal(self.hub_id, self.folder.name, error) from None
            size, unit = (1e9, "GB") if work.total >= 1e9 else (1e6, "MB")
            share = f"the download stopped at {work.here / size:.1f} of {work.total / size:.1f} {unit}"
            raise CheckpointError(f"{self.hub_id}: {share} ({_reason(error)}); {_advice(error)}{KEPT}") from None
        return self.folder


def find(checkpoint: str | Path | None = None, revision: str | None = None) -> Found:
    """A checkpoint: None is the shipped demo, then a folder, then a hub id such as "google/name" (at a `revision`).

    Of a hub repository the small files are downloaded, once, into Hugging Face's cache; no weights. CheckpointError, and
    OptionError for a revision of what has none.
    """
    folder = _local(checkpoint)
    if folder is not None:
        if revision is not None:
            raise OptionError(f"revision is {revision!r}, and {checkpoint or 'demo'} is here; only hub repositories have them")
        return Found(folder=folder)
    if not HUB_ID.fullmatch(str(checkpoint)):
        raise CheckpointError(
            f"{checkpoint}: no such folder; give a checkpoint folder, a hub id like google/diffusiongemma-26B-A4B-it, or demo"
        )
    return _ask(str(checkpoint), revision)


def _local(checkpoint: str | Path | None) -> Path | None:
    """The folder that a checkpoint's name names here; None when there is none of that name."""
    if checkpoint is None or str(checkpoint) == "demo":
        return DEMO
    try:
        path = Path(checkpoint).expanduser()
        if str(checkpoint) and path.is_dir():
            return path
        if path.is_file():
            raise CheckpointError(f"{path}: a file; give the folder that holds config.json")
    except (OSError, RuntimeError, ValueError):  # a name too long, a ~user that is not, a NUL: no folder of that name
        pass
    return None


def resolve(checkpoint: str | Path | None = None, revision: str | None = None) -> Path:
    """The folder of a checkpoint, as `find`, weights included."""
    return find(checkpoint, revision).fetch()


def _ask(hub_id: str, revision: str | None) -> Found:
    """The small files of a repository, and which files of weights are not in the cache."""
    import huggingface_hub  # here, as above

    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                hub_id, revision=revision, allow_patterns=list(SMALL), ignore_patterns=[NOT_SMALL]
            )
        )
    except Exception as error:  # no network, no space, a proxy's answer: httpx, OSError and the hub each have their own
        raise _refusal(hub_id, revision, error) from None
    try:
        told = huggingface_hub.HfApi().model_info(hub_id, revision=folder.name, files_metadata=True, timeout=10)
    except Exception as error:  # as above
        return _from_cache(hub_id, folder, error)
    sizes = {one.rfilename: one.size or 0 for one in told.siblings or ()}
    try:
        names = [path.relative_to(folder).as_posix() for path in shards(folder, sizes)]
    except CheckpointError as error:
        raise CheckpointError(str(error).replace(str(folder), hub_id)) from None
    return Found(
        folder=folder, hub_id=hub_id, absent={name: sizes[name] for name in names if not (folder / name).is_file()}
    )


def _from_cache(hub_id: str, folder: Path, error: Exception) -> Found:
    """What the cache holds of a repository, when the hub does not answer: all of it, or CheckpointError says what lacks."""
    try:
        shards(folder)
    except CheckpointError as lack:
        what = str(lack).removeprefix(f"{folder}: ")
        raise CheckpointError(
            f"{hub_id}: {what} in the cache ({folder}), and it cannot be fetched ({_reason(error)}); {_online(hub_id)}"
        ) from None
    return Found(folder=folder, hub_id=hub_id)


# -- what went wrong --------------------------------------------------------------------------------------------------


def _refusal(hub_id: str, revision: str | None, error: Exception) -> CheckpointError:
    """What the hub's or the network's error means, and what to do about it."""
    from huggingface_hub import errors  # here, as above

    error = _root(error)
    page = f"https://huggingface.co/{hub_id}"
    if isinstance(error, (CheckpointError, errors.SafetensorsParsingError)):
        return CheckpointError(f"{hub_id}: {_reason(error)}")
    if isinstance(error, errors.HFValidationError):
        return CheckpointError(f"{hub_id}: no such folder here, and no name that the hub could have ({_reason(error)})")
    if isinstance(error, errors.GatedRepoError):
        return CheckpointError(f"{hub_id}: gated; accept its licence at {page}, then run: hf auth login")
    if isinstance(error, errors.RepositoryNotFoundError):
        return CheckpointError(
            f"{hub_id}: no such folder here and no such repository on the Hugging Face hub; "
            "if it is a private one, run: hf auth login"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return CheckpointError(f"{hub_id}: the hub has no revision {revision!r} of it")
    if _status(error) in REFUSED:
        return CheckpointError(
            f"{hub_id}: the hub refuses it ({_status(error)}); run hf auth login with a token that may read it, "
            f"and accept its licence at {page}"
        )
    if advice := _advice(error):
        return CheckpointError(f"{hub_id}: it cannot be fetched ({_reason(error)}); {advice}{KEPT}")
    return CheckpointError(
        f"{hub_id}: no such folder here, and it cannot be fetched from the Hugging Face hub ({_reason(error)}); "
        f"{_online(hub_id)}"
    )


def _root(error: Exception) -> Exception:
    """The error behind huggingface_hub's "not in the cache", which is what it makes of most others."""
    from huggingface_hub import errors  # here, as above

    cause = error.__cause__
    return cause if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(cause, Exception) else error


def _status(error: Exception) -> int | None:
    """The status of the hub's answer, if the error is one."""
    return getattr(getattr(error, "response", None), "status_code", None)


def _reason(error: Exception) -> str:
    """The error in a few words."""
    from huggingface_hub import errors  # here, as above

    error = _root(error)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    if isinstance(error, TimeoutError):
        return "another program is downloading it"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return (text.strip().splitlines() or [type(error).__name__])[0][:120]


def _advice(error: Exception) -> str:
    """What to do about a disk; empty when it is not the disk's fault."""
    code = error.errno if isinstance(error, OSError) else None
    if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "make room, or set HF_HOME to a folder on a larger disk; "
    return "set HF_HOME to a folder that can be written; " if code in (errno.EACCES, errno.EPERM, errno.EROFS) else ""


def _online(hub_id: str) -> str:
    """How to come by a repository that cannot be fetched now."""
    from huggingface_hub import constants  # here, as above

    first = "unset HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else "connect"
    return f"{first}, or run hf download {hub_id} where there is network and give the folder that it names"
