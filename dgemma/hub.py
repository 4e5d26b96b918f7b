"""Where a checkpoint is: the demo inside the package, a folder, or a repository on the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from .errors import CheckpointError

DEMO = Path(__file__).parent / "demo"
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def resolve(checkpoint: str | Path | None = None, revision: str | None = None) -> Path:
    """The folder of a checkpoint: None is the shipped demo, then a folder, then a hub id such as "google/name".

    A hub repository is downloaded once into Hugging Face's cache, with progress on stderr.
    """
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
    if not HUB_ID.fullmatch(str(checkpoint)):
        raise CheckpointError(
            f"{checkpoint}: no such folder; give a checkpoint folder, a hub id like google/diffusiongemma-26B-A4B-it, or demo"
        )
    return _download(str(checkpoint), revision)


def _download(hub_id: str, revision: str | None) -> Path:
    import huggingface_hub  # here, so that local checkpoints never touch the network's libraries

    try:
        return Path(huggingface_hub.snapshot_download(hub_id, revision=revision, allow_patterns=FILES))
    except huggingface_hub.errors.RepositoryNotFoundError:
        raise CheckpointError(
            f"{hub_id}: no such folder here and no such repository on the Hugging Face hub (or it needs a login)"
        ) from None
    except huggingface_hub.errors.RevisionNotFoundError:
        raise CheckpointError(f"{hub_id}: the hub has no revision {revision!r} of it") from None
    except Exception as error:  # no network, no space, a proxy's answer: requests, httpx and OSError each have their own
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{hub_id}: no such folder here, and it cannot be fetched from the Hugging Face hub ({reason[:120]}); "
            "connect, or give the folder of a downloaded checkpoint"
        ) from None
