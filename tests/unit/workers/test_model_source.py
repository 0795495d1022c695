"""The model of a worker: a folder, a repository or the demo."""

from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pytest

from workers.demo import CHECKPOINT
from workers.engine.types import ModelUnusable
from workers.model_source import resolve_model


def test_a_folder_is_served_under_its_name_and_else_the_demo(tmp_path: Path) -> None:
    folder = tmp_path / "my-qwen"
    folder.mkdir()
    with pytest.raises(ModelUnusable, match=r"has no model: its config\.json is missing"):
        resolve_model(str(folder))
    (folder / "config.json").touch()
    for name, expected in ((str(folder), (folder, "my-qwen", False)), ("", DEMO)):
        source = resolve_model(name)
        assert (source.folder, source.served_name, source.toy) == expected


DEMO = (CHECKPOINT, "demo", True)


def test_a_repository_is_downloaded_without_its_code_and_served_under_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fetch = Mock(side_effect=lambda *_, dry_run=False, **__: [] if dry_run else str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    source = resolve_model("Qwen/Qwen3.5-4B")
    assert (source.fetch(), source.served_name) == (tmp_path, "Qwen/Qwen3.5-4B")
    assert "*.safetensors" in fetch.call_args.kwargs["allow_patterns"]
    assert not any(p.endswith(".py") for p in fetch.call_args.kwargs["allow_patterns"])


NO_MODELS = ("/nowhere", "~nobody-has-this", "x" * 9999, "a/b/c", "http://host/model", "one word")


@pytest.mark.parametrize("named", NO_MODELS)
def test_other_names_are_rejected_without_a_download(monkeypatch, named) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(side_effect=AssertionError))
    with pytest.raises(ModelUnusable, match="neither a folder"):
        resolve_model(named)
