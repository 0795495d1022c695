"""Sources of models: a folder, a Hugging Face repository, or the demo checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from workers.demo import CHECKPOINT
from workers.engine.types import ModelUnusable
from workers.server.model_download import download

DEMO_NAME = "demo"
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


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
        return self.folder or download(self.served_name, progress)

    def fetch_head(self, progress: Callable[[int, int], None]) -> Path:
        """Return the folder of an MTP head, as `fetch` does, without the other weights."""
        return self.folder or download(self.served_name, progress, head_only=True)

    def served_name_with(self, adapter: ModelSource | None) -> str:
        """Return the served name of the model with an adapter, if there is one."""
        return f"{self.served_name}+{adapter.served_name}" if adapter else self.served_name


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
    raise _unknown(named)


def resolve_adapter(named: str) -> ModelSource:
    """Return the source of a LoRA adapter; raise `ModelUnusable` if there can be none."""
    folder = Path(named).expanduser()
    if folder.is_dir() and folder.resolve().name.isprintable():
        return ModelSource(folder=folder, served_name=folder.resolve().name)
    if _REPOSITORY.fullmatch(named):
        return ModelSource(folder=None, served_name=named)
    raise _unknown(named)


def _unknown(named: str) -> ModelUnusable:
    return ModelUnusable(
        f"'{named}' is neither a folder nor the name of a Hugging Face repository."
    )
