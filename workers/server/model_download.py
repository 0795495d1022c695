"""Downloads of models from Hugging Face: checked before they begin, resumed, and verified.

Before the first byte it is known how much is missing, whether the disk has room for it, whether the
weights fit into the memory of this machine, and whether the owner of the repository lets this user
in. What a broken download has left is gone on with. The contents of each new file are compared with
the digest by which the hub names it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from workers.engine.model.known_heads import head_files
from workers.engine.types import ModelUnusable

_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
"""Weights and text files. The engine runs no Python file of a folder that has some."""
_DUPLICATES = ["original/*", "metal/*", "consolidated*"]
"""The same weights in other formats."""
_CONFIG, _INDEX = "config.json", "model.safetensors.index.json"
_DISK_MARGIN_BYTES = 1_000_000_000
"""Left free: a full disk harms more than this download."""
_SHARE_OF_MEMORY = 0.95
"""Of the memory that the device may use; weights alone that take more leave no room to answer."""
_SHA256_DIGITS = 64

Progress = Callable[[int, int], None]


class _FileInfo(Protocol):
    """What the hub knows of a file, and where the local cache will have it."""

    filename: str
    file_size: int | None
    local_path: str
    will_download: bool


def download(repository: str, progress: Progress, *, head_only: bool = False) -> Path:
    """Return the local folder of a repository; raise `ModelUnusable` with the reason if that fails.

    `progress` is called from any thread with the bytes so far, and of all files. With `head_only`
    it has no weights but the files with tensors of an MTP head.
    """
    # Imported late: a worker with a local folder does not need it.
    from huggingface_hub import errors, snapshot_download  # noqa: PLC0415

    names = _FILES

    def fetch(**options: Any) -> Any:
        return snapshot_download(
            repository, allow_patterns=names, ignore_patterns=_DUPLICATES, **options
        )

    try:
        if head_only:
            names = [_CONFIG, _INDEX]
            names = [*names, *_head_files(Path(fetch()))]
        missing = _missing_files(fetch)
        _check_room(repository, missing)
        folder = Path(fetch(tqdm_class=_progress_bars(progress)))
    except (errors.HfHubHTTPError, OSError) as error:
        match error:
            case errors.GatedRepoError():
                reason = (
                    "its owner lets in registered users alone. Accept the terms on the model's "
                    "page, then set HF_TOKEN to a token of your account, or run `hf auth login`"
                )
            case errors.RepositoryNotFoundError():
                reason = "there is no such folder and no such public repository"
            case errors.LocalEntryNotFoundError():
                reason = "it is not in the local cache, and Hugging Face cannot be reached"
            case _:
                reason = "the download failed; the next start goes on where it ended"
        raise ModelUnusable(f"Cannot download the model '{repository}': {reason}.") from error
    _verify(repository, missing)
    return folder


def _head_files(folder: Path) -> Sequence[str]:
    """Return the files with tensors of an MTP head; all weights if the index names none."""
    try:
        config = json.loads((folder / _CONFIG).read_bytes())
        files = json.loads((folder / _INDEX).read_bytes())["weight_map"]
        return sorted(head_files(config, files))
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return _FILES[:1]  # one file of weights has no index; the engine tells what is damaged


def _missing_files(fetch: Callable[..., Any]) -> Sequence[_FileInfo]:
    """Return the files that a download will fetch; none if the hub cannot be asked.

    The download itself then looks into the local cache, and says what is wrong.
    """
    from huggingface_hub import errors  # noqa: PLC0415

    try:
        files: list[_FileInfo] = fetch(dry_run=True)
    except errors.DryRunError as error:
        if isinstance(error.__cause__, errors.GatedRepoError | errors.RepositoryNotFoundError):
            raise error.__cause__ from error
        return []
    return [file for file in files if file.will_download]


def _check_room(repository: str, missing: Sequence[_FileInfo]) -> None:
    """Raise `ModelUnusable` if the disk or the memory has no room for what a download fetches."""
    if not missing:
        return
    needed_bytes = sum(file.file_size or 0 for file in missing)
    disk = next(path for path in Path(missing[0].local_path).parents if path.exists())
    free_bytes = shutil.disk_usage(disk).free - _DISK_MARGIN_BYTES
    if needed_bytes > free_bytes:
        raise ModelUnusable(
            f"The model '{repository}' is not downloaded: {_gb(needed_bytes)} are missing, and "
            f"{disk} has room for {_gb(max(free_bytes, 0))}. Set HF_HOME to a folder on a larger "
            "disk, or choose a smaller model."
        )
    weights_bytes = sum(
        file.file_size or 0 for file in missing if file.filename.endswith(".safetensors")
    )
    limit_bytes = memory_limit_bytes()
    if weights_bytes > _SHARE_OF_MEMORY * limit_bytes:
        raise ModelUnusable(
            f"The model '{repository}' is not downloaded: its weights take {_gb(weights_bytes)}, "
            f"and models may use {_gb(limit_bytes)} of this machine's memory. Choose a smaller "
            "model, or one with fewer bits per weight."
        )


def memory_limit_bytes() -> int:
    """Return the memory that a model may use: of the device, or else of the machine."""
    import mlx.core as mx  # noqa: PLC0415 - it takes seconds

    working_set = mx.device_info().get("max_recommended_working_set_size")
    return int(working_set or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _verify(repository: str, files: Sequence[_FileInfo]) -> None:
    """Compare new files with their digests; delete damaged ones, and raise `ModelUnusable`.

    The cache names a large file by the SHA-256 of its contents. A small one is compared by its size
    alone, which the hub's client does.
    """
    damaged = []
    for file in files:
        blob = Path(file.local_path).resolve()
        if len(blob.name) != _SHA256_DIGITS or not blob.is_file():
            continue
        with blob.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        if digest != blob.name:
            damaged.append(file.filename)
            blob.unlink()
    if damaged:
        raise ModelUnusable(
            f"The download of '{repository}' has damaged {', '.join(damaged)[:200]}, which is "
            "deleted; start again to fetch it anew."
        )


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.1f} GB"


def _progress_bars(progress: Progress) -> type[Any]:
    """Return a class of tqdm's bars that print nothing and report their bytes."""
    from huggingface_hub.utils.tqdm import tqdm  # noqa: PLC0415

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            silent = {**options, "disable": True}
            super().__init__(*args, **silent)  # type: ignore[no-untyped-call]
            # One bar counts files.
            self._counts_bytes = options.get("unit") == "B"

        def update(self, n: float | None = 1) -> bool | None:
            self.n += n or 0
            if self._counts_bytes:
                progress(int(self.n), int(self.total or 0))
            return None

    return Bar
