"""MTP heads that are not in the folder of their model, or have other names there."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_vlm.speculative.drafters.qwen3_5_mtp.split import Qwen3_5MTPSplitter
from safetensors import safe_open

from workers.demo import CHECKPOINT
from workers.engine.engine import load_engine
from workers.engine.model.checkpoint import load_checkpoint
from workers.engine.model.known_heads import KNOWN_HEADS, known_head
from workers.engine.model.mtp_head import HeadUnusable
from workers.engine.types import EngineSettings, LaneName, ModelUnusable

HEAD_FILE = "model-mtp.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def headless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the demo model as conversions leave it: without its head."""
    return _without_head(tmp_path_factory.mktemp("models") / "headless", lambda _: None)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the head of the demo model alone, in the format of mlx-vlm."""
    folder = tmp_path_factory.mktemp("heads") / "head"
    Qwen3_5MTPSplitter().split(str(CHECKPOINT), str(folder))
    return folder


def _without_head(folder: Path, also: Callable[[dict[str, str]], None]) -> Path:
    shutil.copytree(CHECKPOINT, folder, ignore=shutil.ignore_patterns(HEAD_FILE))
    index = json.loads((folder / INDEX).read_text())
    names = index["weight_map"]
    index["weight_map"] = {key: name for key, name in names.items() if name != HEAD_FILE}
    also(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def _changed(folder: Path, target: Path, **text: Any) -> Path:
    """Return a copy of a head whose configuration says something else."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    config |= {name: text.pop(name) for name in ("model_file",) if name in text}
    config["text_config"] |= text
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_a_model_without_its_head_drafts_with_one_from_another_folder(headless, head) -> None:
    settings = EngineSettings(
        model=headless, served_name="demo", lanes=(LaneName.TEXT_MTP,), mtp=head
    )
    card = load_engine(settings).card
    assert (card.mtp, card.looks_up, card.mtp_unavailable_reason) == (True, True, None)


def test_without_a_head_the_reason_is_named_and_prompt_lookup_drafts(headless: Path) -> None:
    checkpoint = load_checkpoint(headless)
    assert checkpoint.head is None
    assert "no mtp.* tensors" in (checkpoint.mtp_unavailable_reason or "")


def test_a_whole_checkpoint_is_a_source_of_a_head(headless: Path) -> None:
    assert load_checkpoint(headless, mtp=CHECKPOINT).head is not None


def test_a_head_below_language_model_is_found_and_is_the_same(tmp_path: Path) -> None:
    nested = {f"language_model.{key}": array for key, array in _head_arrays().items()}
    folder = _without_head(
        tmp_path / "nested", lambda names: names.update(dict.fromkeys(nested, HEAD_FILE))
    )
    with safe_open(CHECKPOINT / HEAD_FILE, framework="numpy") as file:
        mx.save_safetensors(str(folder / HEAD_FILE), nested, metadata=file.metadata())
    found, own = load_checkpoint(folder).head, load_checkpoint(CHECKPOINT).head
    assert found is not None
    assert own is not None
    hidden = mx.random.normal((1, 1, own.drafter.config.text_config.hidden_size))
    states = [
        one.forward(mx.array([[30]]), hidden, one.new_caches(), mx.array([[0]]))
        for one in (found, own)
    ]
    assert mx.array_equal(*states).item()


def _head_arrays() -> dict[str, mx.array]:
    return mx.load(str(CHECKPOINT / HEAD_FILE))


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"hidden_size": 64}, "cannot be loaded|is of another model: its hidden size is 64"),
        ({"vocab_size": 999}, "is of another model: its vocabulary is 999"),
        ({"model_file": "code.py"}, "model_file"),
        ({"mtp_num_hidden_layers": 100_000}, "mtp_num_hidden_layers"),
    ],
)
def test_a_head_of_another_model_is_refused_in_one_sentence(
    headless: Path, head: Path, tmp_path: Path, changed: dict[str, Any], sentence: str
) -> None:
    folder = _changed(head, tmp_path / "other", **changed)
    with pytest.raises(HeadUnusable, match=sentence) as raised:
        load_checkpoint(headless, mtp=folder)
    assert "\n" not in str(raised.value)


def test_a_folder_without_a_checkpoint_holds_no_head(headless: Path, tmp_path: Path) -> None:
    """The sentence says what the folder lacks, and no class of Python."""
    with pytest.raises(HeadUnusable, match=r"holds no MTP head: it needs config\.json") as raised:
        load_checkpoint(headless, mtp=tmp_path)
    assert "Error" not in str(raised.value)


def test_a_folder_without_a_head_is_refused_by_the_engine(headless: Path) -> None:
    settings = EngineSettings(model=headless, served_name="demo", mtp=headless)
    with pytest.raises(ModelUnusable, match="cannot be loaded"):
        load_engine(settings)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("mlx-community/Qwen3.5-4B-MLX-4bit", "Qwen3.5-4B"),
        ("mlx-community/Qwen3.5-9B-4bit", "Qwen3.5-9B"),
        ("Qwen3.8-27B", "Qwen3.8-27B"),
        ("mlx-community/Qwen3.6-35B-A3B-8bit", "Qwen3.6-35B-A3B"),
        ("mlx-community/GLM-4.7-Flash-4bit", "GLM-4.7-Flash"),
        ("mlx-community/Qwen3-Next-80B-A3B-Instruct-4bit", "Qwen3-Next-80B-A3B-Instruct"),
        ("mlx-community/gemma-4-e4b-it-4bit", "gemma-4-E4B-it"),
        ("mlx-community/gemma-4-26b-a4b-it-6bit", "gemma-4-26B-A4B-it"),
        ("mlx-community/gemma-4-E4B-it-assistant-bf16", None),
        ("mlx-community/GLM-4.7-4bit", None),
        ("mlx-community/Qwen3.5-4B.1", None),
        ("mlx-community/Qwen3.8-27B-A3B-4bit", None),
        ("mlx-community/Qwen3.5-40B-4bit", None),
        ("mlx-community/gemma-3-4b-it-4bit", None),
    ],
)
def test_the_head_of_a_conversion_is_known_by_the_name_of_its_model(name, model) -> None:
    assert known_head(name) == (KNOWN_HEADS[model] if model else None)
