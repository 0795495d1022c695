"""Sources of models: a folder, a Hugging Face repository, or the demo checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.demo import CHECKPOINT
from workers.engine.types import ModelUnusable

DEMO_NAME = "demo"
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
"""Weights and text files. The engine runs no Python file of a folder that has some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A local folder or a repository, and the served name of its model."""

    folder: Path | None
    """None: the folder is only known after the download."""
    served_name: str
    toy: bool = False

    def fetch(self, progress: Callable[[int, int], None] = lambda *_: None) -> Path:
        """Return the folder, after a download of what is missing; raise `ModelUnusable`.

        `progress` is called from any thread with the bytes so far, and of all files.
        """
        return self.folder or _download(self.served_name, progress)


def resolve_model(named: str) -> ModelSource:
    """Return the source of a model; raise `ModelUnusable` if there can be none.

    The name comes from the settings of the worker, never from a request.
    """
    folder = Path(named).expanduser() if named else CHECKPOINT
    if folder.resolve() == CHECKPOINT.resolve():
        if not CHECKPOINT.is_dir():
            raise ModelUnusable("The demo checkpoint is missing; choose a model with --model.")
        return ModelSource(folder=CHECKPOINT, served_name=DEMO_NAME, toy=True)
    if folder.is_dir():
        name = folder.resolve().name
        if not name.isprintable() or not name:
            raise ModelUnusable("A model is named as its folder, so the name must be printable.")
        return ModelSource(folder=folder, served_name=name)
    if _REPOSITORY.fullmatch(named):
        return ModelSource(folder=None, served_name=named)
    raise ModelUnusable(f"'{named}' is neither a folder nor the name of a Hugging Face repository.")


def _download(repository: str, progress: Callable[[int, int], None]) -> Path:
    # Imported late: a worker with a local folder does not need it.
    from huggingface_hub import errors, snapshot_download  # noqa: PLC0415

    bars = _progress_bars(progress)
    try:
        return Path(snapshot_download(repository, allow_patterns=_FILES, tqdm_class=bars))
    except (errors.HfHubHTTPError, OSError) as error:
        match error:
            case errors.GatedRepoError():
                reason = "accept the terms on the model's page, then run `hf auth login`"
            case errors.RepositoryNotFoundError():
                reason = "there is no such folder and no such public repository"
            case errors.LocalEntryNotFoundError():
                reason = "it is not in the local cache, and Hugging Face cannot be reached"
            case _:
                reason = "the download failed"
        raise ModelUnusable(f"Cannot download the model '{repository}': {reason}.") from error


def _progress_bars(progress: Callable[[int, int], None]) -> type[Any]:
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
