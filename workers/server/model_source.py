"""Where the weights come from: a folder, a Hugging Face repository, or the demo checkpoint."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from workers.demo import CHECKPOINT
from workers.engine.types import ModelUnusable

DEMO_NAME = "demo"
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
"""Weights and texts; a repository's Python is never fetched, so it can never run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A local folder, and the name it is served under."""

    folder: Path
    served_name: str
    toy: bool = False


def resolve_model(named: str) -> ModelSource:
    """Return the folder of a model, fetched first where needed; raise `ModelUnusable`.

    Only the person who starts the worker names it; no request ever does.
    """
    folder = Path(named).expanduser() if named else CHECKPOINT
    if folder.resolve() == CHECKPOINT.resolve():
        if not CHECKPOINT.is_dir():
            raise ModelUnusable("The demo checkpoint is missing; name a model with --model.")
        return ModelSource(folder=CHECKPOINT, served_name=DEMO_NAME, toy=True)
    if folder.is_dir():
        return ModelSource(folder=folder, served_name=folder.resolve().name)
    if _REPOSITORY.fullmatch(named):
        return ModelSource(folder=_fetch(named), served_name=named)
    raise ModelUnusable(f"'{named}' is neither a folder nor the name of a Hugging Face repository.")


def _fetch(repository: str) -> Path:
    # Imported late: a worker on a local folder needs none of it.
    from huggingface_hub import snapshot_download  # noqa: PLC0415
    from huggingface_hub.errors import (  # noqa: PLC0415
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(repository, allow_patterns=_FILES))
    except GatedRepoError as error:
        why = "its owner asks for consent: accept it on the model's page, then `hf auth login`"
        raise ModelUnusable(_unfetched(repository, why)) from error
    except RepositoryNotFoundError as error:
        why = "there is no such folder here and no such public repository"
        raise ModelUnusable(_unfetched(repository, why)) from error
    except LocalEntryNotFoundError as error:
        why = "it is not in the local cache, and Hugging Face cannot be reached"
        raise ModelUnusable(_unfetched(repository, why)) from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelUnusable(_unfetched(repository, "the download failed")) from error


def _unfetched(repository: str, why: str) -> str:
    return f"The model '{repository}' cannot be fetched: {why}."
