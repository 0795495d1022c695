"""Checks of a model folder, before libraries read it: it holds data, and none of its code runs."""

import functools
import json
import os
import re
import sys
from asyncio import CancelledError
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from paceline.request.profile import Endpoint
from paceline.terminal import printable
from workers.engine.types import ModelUnusable

_MAX_REASON_CHARS = 300
_LAYERS = re.compile(r"(layers?|depths?|blocks?|stages?)$")
_INDEX = "model.safetensors.index.json"
ENCODERS = frozenset(("bert", "modernbert", "xlm-roberta"))
"""Types of models that read a text in both directions."""
DECODERS = frozenset(("qwen3",))
"""Types of models that generate; some embedders and rerankers have these types too."""


@contextmanager
def refusing(folder: Path) -> Iterator[None]:
    """Raise `ModelUnusable` with one sentence for any failure to load this folder."""
    try:
        yield
    except (ModelUnusable, KeyboardInterrupt, CancelledError):
        raise
    except BaseException as error:  # libraries raise any kind; a panic of Rust code is no Exception
        text = str(error)[:_MAX_REASON_CHARS]
        if type(error) is not ValueError:  # of which ours are sentences
            text = f"{type(error).__name__}: {text}"
        if isinstance(error, OSError) and error.filename and error.strerror:
            text = f"{Path(os.fsdecode(error.filename)).name}: {error.strerror.lower()}"
        reason = " ".join(printable(text).split()).strip(" :.")
        if any(folder.glob("*.py")):
            reason += "; Paceline never runs the Python files of a model folder"
        raise ModelUnusable(f"The model in {folder} cannot be loaded ({reason}).") from error


def check_folder(folder: Path, *, head: bool = False) -> dict[str, Any]:
    """Return the configuration in a folder; raise ValueError or OSError for an unsafe one.

    Of the folder of an MTP `head` only the layers of the head are built.
    """
    config = read_object(folder / "config.json")
    if config.get("model_file") is not None:
        raise ValueError("config.json names a Python file in model_file, which would run")
    if (folder / _INDEX).exists():
        # MLX reads files with other names in other formats, and a path may lead out of the folder.
        names = set(read_object(folder / _INDEX).get("weight_map", {}).values())
        if not all(Path(name).name == name and name.endswith(".safetensors") for name in names):
            raise ValueError(f"{_INDEX} names other files than safetensors files in the folder")
    tensors = 0
    for path in (*folder.glob("*.safetensors"), *folder.glob("*/*.safetensors")):
        try:
            with safe_open(path, framework="numpy") as file:  # checks the header, which MLX trusts
                tensors += len(file.keys())
        except SafetensorError:
            raise ValueError(f"{path.name} is damaged or incomplete") from None
    if not tensors:
        raise ValueError("the weights are missing: no safetensors file is there")
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    built = config
    if head:
        built = {k: v for part in parts for k, v in part.items() if k.startswith("mtp_")}
    _check_layers(built, tensors)
    return config


def find_task(folder: Path, name: str) -> Endpoint | None:
    """Return the task of a folder with an embedder or a reranker; None for any other model.

    Its files show it, in the layout of sentence-transformers, or its architecture. Qwen's embedders
    and rerankers have the files of a chat model where others converted them, so their name counts.
    """
    try:
        config = read_object(folder / "config.json")
        path = folder / "modules.json"
        modules = json.loads(path.read_bytes()) if path.exists() else []
    except (OSError, ValueError):
        return None  # the engine reports what is wrong
    architectures, family = config.get("architectures"), str(config.get("model_type"))
    named = architectures if isinstance(architectures, list) else []
    if any(str(one).endswith("ForSequenceClassification") for one in named):
        return Endpoint.RERANK
    listed = modules if isinstance(modules, list) else []
    types = [one.get("type") for one in listed if isinstance(one, dict)]
    if family in ENCODERS or any(str(one).endswith(".Pooling") for one in types):
        return Endpoint.EMBEDDINGS
    if family in DECODERS:
        if "rerank" in name.lower():
            return Endpoint.RERANK
        if "embedding" in name.lower():
            return Endpoint.EMBEDDINGS
    return None


@functools.cache
def forbid_code() -> None:
    """Let no Python file of any model run.

    transformers copies such a file to its own folder before it runs it. `trust_remote_code=False`
    is not enough: some families of mlx-vlm replace it by True.
    """
    from transformers.utils import HF_MODULES_CACHE  # noqa: PLC0415  # takes a second to import

    folder = f"{Path(HF_MODULES_CACHE).absolute()}{os.sep}"

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "exec" and arguments[0].co_filename.startswith(folder):
            raise ImportError("the model needs its own Python code")

    sys.addaudithook(refuse)


def _check_layers(config: object, tensors: int, name: str = "") -> None:
    """Raise ValueError for more layers than tensors: building them would take all memory."""
    if isinstance(config, dict):
        for key, value in config.items():
            _check_layers(value, tensors, key)
    elif isinstance(config, list):
        for value in config:
            _check_layers(value, tensors, name)
    elif isinstance(config, int | float) and config > tensors and _LAYERS.search(name):
        raise ValueError(f"{name} in config.json is {config}, and there are {tensors} tensors")


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file; raise ValueError or OSError without one."""
    try:
        document = json.loads(path.read_bytes())
    except ValueError:
        raise ValueError(f"{path.name} is not JSON") from None
    if not isinstance(document, dict):
        raise ValueError(f"{path.name} is not an object")
    return document


def positive(name: str, value: object) -> int:
    """Return a number of a configuration file; raise ValueError for anything else."""
    if type(value) is not int or not 0 < value <= 1 << 31:
        raise ValueError(f"{name} is {value!r}, which is no whole number above 0")
    return value
