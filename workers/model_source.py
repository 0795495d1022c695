"""Sources of models: a folder, the demo checkpoint, or a Hugging Face repository.

Before the first byte of a download it is known how much is missing, whether the disk has room for
it, whether the weights fit into the memory of this machine, and whether the owner of the repository
lets this user in. A broken download is resumed. The contents of each new file are compared with the
digest by which the hub names it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.command_line import model_problem
from workers.demo import CHECKPOINT
from workers.engine.model.known_heads import head_files
from workers.engine.types import ModelUnusable

if TYPE_CHECKING:
    from huggingface_hub import DryRunFileInfo

DEMO_NAME = "demo"
_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
"""Weights and text files. The engine runs no Python file of a folder that has some."""
_DUPLICATES = ["original/*", "metal/*", "consolidated*"]
"""The same weights in other formats."""
_CONFIG, _INDEX = "config.json", "model.safetensors.index.json"
_DISK_MARGIN_BYTES = 1_000_000_000
"""Left free: a full disk harms more than this download."""
_SHARE_OF_MEMORY = 0.95
"""Of the memory that the device may use; weights that take more leave no room to answer."""
_SHA256_DIGITS = 64

Progress = Callable[[int, int], None]
"""Called from any thread with the bytes so far, and of all files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A local folder or a repository, and the served name of its model."""

    folder: Path | None
    """None: the folder is only known after the download."""
    served_name: str
    toy: bool = False

    def fetch(self, progress: Progress = lambda *_: None, *, head_only: bool = False) -> Path:
        """Return the folder, after a download of missing files; raise `ModelUnusable`.

        With `head_only` a download fetches only weight files with tensors of an MTP head.
        """
        return self.folder or download(self.served_name, progress, head_only=head_only)


def resolve_model(named: str) -> ModelSource:
    """Return the source of a model, an MTP head or an adapter; raise `ModelUnusable`.

    The name comes from the settings of the worker, never from a request.
    """
    if not named and not CHECKPOINT.is_dir():
        raise ModelUnusable("The demo checkpoint is missing; choose a model with --model.")
    if named and (problem := model_problem(named)):
        raise ModelUnusable(problem)
    folder = Path(named).expanduser() if named else CHECKPOINT
    if folder.resolve() == CHECKPOINT.resolve():
        return ModelSource(folder=CHECKPOINT, served_name=DEMO_NAME, toy=True)
    if folder.is_dir():
        name = folder.resolve().name
        if not name.isprintable() or not name:
            raise ModelUnusable("A model is named as its folder, so the name must be printable.")
        return ModelSource(folder=folder, served_name=name)
    return ModelSource(folder=None, served_name=named)


def download(repository: str, progress: Progress, *, head_only: bool = False) -> Path:
    """Return the local folder of a repository; raise `ModelUnusable` with the reason if that fails.

    The hub is asked for the missing files first. If it cannot be reached, the download itself looks
    into the local cache, and says what is wrong.
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
        missing: Sequence[DryRunFileInfo] = ()
        try:
            missing = [file for file in fetch(dry_run=True) if file.will_download]
        except errors.DryRunError as error:
            if isinstance(error.__cause__, errors.GatedRepoError | errors.RepositoryNotFoundError):
                raise error.__cause__ from error
        if missing:
            _check_room(repository, missing)
        folder = Path(fetch(tqdm_class=_progress_bars(progress)))
    except (errors.HfHubHTTPError, OSError) as error:
        match error:
            case errors.GatedRepoError():
                reason = (
                    "its owner lets in only registered users. Accept the terms on the model's "
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


def _check_room(repository: str, missing: Sequence[DryRunFileInfo]) -> None:
    """Raise `ModelUnusable` if the disk or the memory has no room for a download."""
    from workers.engine.model.device import memory_limit_bytes  # noqa: PLC0415 - it takes seconds

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


def _verify(repository: str, files: Sequence[DryRunFileInfo]) -> None:
    """Compare new files with their digests; delete damaged ones, and raise `ModelUnusable`.

    The cache names a large file by the SHA-256 of its contents. Of a small one only the size is
    compared, which the hub's client does.
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
            super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]
            # One bar counts files.
            self._counts_bytes = options.get("unit") == "B"

        def update(self, n: float | None = 1) -> bool | None:
            self.n += n or 0
            if self._counts_bytes:
                progress(int(self.n), int(self.total or 0))
            return None

    return Bar
