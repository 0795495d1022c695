"""Downloads: what is checked before the first byte and after the last, and what a failure says."""

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import (
    DryRunError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from workers.engine.model import device
from workers.engine.types import ModelUnusable
from workers.model_source import download

GB = 1_000_000_000


@dataclass
class File:
    filename: str
    file_size: int | None
    local_path: str
    will_download: bool = True


class Disk(NamedTuple):
    free: int


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Mock:
    """Replace the hub's client; `files` are those of the repository."""
    client = Mock(files=[])

    def fetch(*_: object, dry_run: bool = False, **__: object) -> object:
        return client.files if dry_run else str(tmp_path)

    client.side_effect = fetch
    monkeypatch.setattr(huggingface_hub, "snapshot_download", client)
    monkeypatch.setattr(device, "memory_limit_bytes", lambda: 20 * GB)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk(30 * GB))
    return client


def fetched(client: Mock) -> bool:
    return any(not call.kwargs.get("dry_run") for call in client.call_args_list)


def assert_refused(client: Mock, reason: str) -> None:
    with pytest.raises(ModelUnusable, match=reason):
        download("some/model", Mock())
    assert not fetched(client)


def weights(size_bytes: int, path: Path, name: str = "model.safetensors") -> File:
    return File(name, size_bytes, str(path / "snapshots" / name))


def test_a_model_that_the_disk_has_no_room_for_is_not_fetched(hub: Mock, tmp_path: Path) -> None:
    half = [weights(15 * GB, tmp_path, f"{number}.bin") for number in range(2)]
    hub.files = half
    assert_refused(hub, r"30\.0 GB are missing, .* room for 29\.0 GB")
    half[0].will_download = False
    download("some/model", Mock())
    assert fetched(hub), "what is there already needs no room"


def test_a_model_that_exceeds_the_memory_is_not_fetched(hub: Mock, tmp_path: Path) -> None:
    hub.files = [weights(19 * GB + 1, tmp_path)]
    assert_refused(hub, r"take 19\.0 GB, and models may use 20\.0 GB")
    hub.files = [weights(19 * GB, tmp_path)]
    download("some/model", Mock())


def test_a_damaged_file_is_deleted_and_named(hub: Mock, tmp_path: Path) -> None:
    contents = {"one.safetensors": b"as it was sent", "two.safetensors": b"as it was sent too"}
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for name, content in contents.items():
        blob = blobs / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content if name == "one.safetensors" else b"as it came")
        (tmp_path / name).symlink_to(blob)
        hub.files.append(File(name, len(content), str(tmp_path / name)))
    small = blobs / ("0" * 40)
    small.write_bytes(b"{}")
    hub.files.append(File("config.json", 2, str(small)))

    with pytest.raises(ModelUnusable, match=r"damaged two\.safetensors"):
        download("some/model", Mock())
    assert (tmp_path / "one.safetensors").exists()
    assert not (tmp_path / "two.safetensors").exists()
    assert small.exists()


@pytest.mark.parametrize(
    ("names", "files"),
    [
        (("model.layers.46.x", "model.layers.47.eh_proj.weight"), ["2.safetensors"]),
        (("mtp.fc.weight", "model.layers.4.x"), ["1.safetensors"]),
        (("language_model.mtp.fc.weight", "mtp.norm.weight"), ["1.safetensors", "2.safetensors"]),
        (("fc.weight", "norm.weight"), ["1.safetensors", "2.safetensors"]),
    ],
)
def test_of_a_head_the_files_with_its_tensors_are_fetched_alone(
    hub: Mock, tmp_path: Path, names: tuple[str, str], files: list[str]
) -> None:
    """If no name is that of a head in a whole checkpoint, the repository has a head alone."""
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 47}))
    index = {"weight_map": {name: f"{at}.safetensors" for at, name in enumerate(names, 1)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    download("some/model", Mock(), head_only=True)
    patterns = hub.call_args.kwargs["allow_patterns"]
    assert [name for name in patterns if name.endswith(".safetensors")] == files
    assert "config.json" in patterns
    (tmp_path / "model.safetensors.index.json").unlink()
    download("some/model", Mock(), head_only=True)
    assert "*.safetensors" in hub.call_args.kwargs["allow_patterns"], "nobody tells where it is"


@pytest.mark.parametrize(
    ("raised", "hint"),
    [
        (GatedRepoError, "HF_TOKEN"),
        (RepositoryNotFoundError, "no such public repository"),
        (LocalEntryNotFoundError, "cannot be reached"),
        (HfHubHTTPError, "goes on where it ended"),
        (OSError, "goes on where it ended"),
    ],
)
@pytest.mark.parametrize("asked_first", [False, True])
def test_a_failed_download_says_why(hub, raised, hint, asked_first) -> None:
    """Also if the hub refuses already the question for the files."""
    response = httpx.Response(404, request=httpx.Request("GET", "http://x"))
    keywords = {"response": response} if issubclass(raised, HfHubHTTPError) else {}
    error = raised("library text", **keywords)

    def fail(*_: object, dry_run: bool = False, **__: object) -> object:
        if dry_run and asked_first:
            raise DryRunError("library text") from error
        if dry_run:
            return []
        raise error

    hub.side_effect = fail
    with pytest.raises(ModelUnusable, match=hint) as unusable:
        download("some/model", Mock())
    assert "library text" not in str(unusable.value)


def test_a_cached_model_is_served_while_the_hub_is_away(hub: Mock, tmp_path: Path) -> None:
    def fetch(*_: object, dry_run: bool = False, **__: object) -> object:
        if dry_run:
            raise DryRunError("offline") from httpx.ConnectError("offline")
        return str(tmp_path)

    hub.side_effect = fetch
    assert download("some/model", Mock()) == tmp_path
