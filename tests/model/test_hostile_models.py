"""Model folders from strangers: no code of theirs runs, and a worker refuses or serves damage."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.support.hostile_checkpoints import HostileCheckpoint, hostile_checkpoints
from tests.support.model_loader import REFUSED, SERVED, ModelLoader, model_loader
from tests.support.worker_process import run_worker
from workers.demo import CHECKPOINT
from workers.engine.lane.sparse_prefill import load_sparse_prefill
from workers.engine.model.checkpoint import load_checkpoint
from workers.engine.model.mtp_head import HeadUnusable
from workers.engine.types import SpecPrefillSettings

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="Metal does not survive a fork, and limits differ"
)

CONFIGURATION = {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil"}
TOKENIZER = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
PROCESSORS = {"AutoProcessor": "evil.Evil", "AutoImageProcessor": "evil.Evil"}
# Places in a folder that name a Python file, and whether a model loads without it.
PLACES = [
    ("config.json", {"auto_map": CONFIGURATION | TOKENIZER | PROCESSORS}, SERVED),
    ("tokenizer_config.json", {"auto_map": TOKENIZER}, SERVED),
    ("tokenizer_config.json", {"auto_map": TOKENIZER, "tokenizer_class": "Evil"}, SERVED),
    ("processor_config.json", {"auto_map": PROCESSORS, "processor_class": "Evil"}, SERVED),
    ("preprocessor_config.json", {"auto_map": PROCESSORS}, SERVED),
    ("video_preprocessor_config.json", {"auto_map": {"AutoVideoProcessor": "evil.E"}}, SERVED),
    ("config.json", {"model_file": "evil.py"}, REFUSED),
    ("config.json", {"model_type": "evil", "auto_map": CONFIGURATION}, REFUSED),
]
in_each_place = pytest.mark.parametrize(
    ("expected", "places"),
    [
        (SERVED, [place[:2] for place in PLACES if place[2] == SERVED]),
        *((REFUSED, [place[:2]]) for place in PLACES if place[2] == REFUSED),
    ],
)


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelLoader]:
    modules = tmp_path_factory.mktemp("modules")
    with model_loader({**os.environ, "HF_MODULES_CACHE": str(modules)}) as running:
        yield running


def plant(folder: Path, *places: tuple[str, dict[str, Any]]) -> Path:
    """Copy the demo checkpoint with a Python file; return the file that it would write."""
    shutil.copytree(CHECKPOINT, folder)
    marker = folder / "it-ran"
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    for file, fields in places:
        path = folder / file
        document = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(document | fields))
    return marker


@in_each_place
def test_c4_no_python_file_of_a_model_folder_runs(loader, tmp_path, expected, places) -> None:
    """CVE-2026-5843 (GHSA-9m9w-53g9-47c4), CVE-2026-22807 (GHSA-2pc9-4j83-qjmr)."""
    marker = plant(tmp_path / "model", *places)
    code, output = loader.load(tmp_path / "model")
    assert not marker.exists()
    assert code == expected, output
    if expected == REFUSED:
        assert "never runs the Python files of a model folder" in output


@in_each_place
def test_c4_no_python_file_of_a_draft_model_or_a_head_runs(
    checkpoint, tmp_path, expected, places
) -> None:
    marker = plant(tmp_path / "model", *places)
    sparse = load_sparse_prefill(SpecPrefillSettings(draft=tmp_path / "model"), checkpoint)
    assert (sparse.draft is None) == (expected == REFUSED)
    with contextlib.suppress(HeadUnusable):
        load_checkpoint(CHECKPOINT, mtp=tmp_path / "model")
    assert not marker.exists()


def test_c4_code_does_not_run_where_a_library_trusts_it(tmp_path: Path) -> None:
    """CVE-2026-27893 (GHSA-7972-pg2x-xr59): some families of mlx-vlm set `trust_remote_code=True`
    whatever the caller passes."""
    marker = plant(tmp_path / "model", ("tokenizer_config.json", {"auto_map": TOKENIZER}))
    load = "AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)"
    script = (
        "import sys; from transformers import AutoTokenizer; "
        f"from workers.engine.model.model_folder import forbid_code; forbid_code(); {load}"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "model")],
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not marker.exists()
    assert "ImportError: the model needs its own Python code" in result.stderr


def test_c4_a_refused_model_ends_the_worker_with_code_3_and_one_sentence(tmp_path: Path) -> None:
    marker = plant(tmp_path / "model", ("config.json", {"model_file": "evil.py"}))
    result = run_worker("--model", str(tmp_path / "model"), "--port", "0")
    assert result.returncode == 3
    assert not marker.exists()
    assert result.stderr.splitlines() == [
        f"paceline worker: The model in {tmp_path / 'model'} cannot be loaded ("
        "config.json names a Python file in model_file, which would run; Paceline never runs the "
        "Python files of a model folder)."
    ]


def test_a_folder_without_a_tokenizer_is_refused_before_kernels_are_compiled(tmp_path) -> None:
    shutil.copytree(CHECKPOINT, tmp_path / "m", ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(ValueError, match="the tokenizer is missing"):
        load_checkpoint(tmp_path / "m")
    (tmp_path / "m/tekken.json").write_text("{}")  # the only file of Mistral's own tokenizer
    with pytest.raises(KeyError, match="config"):  # it is read
        load_checkpoint(tmp_path / "m")


def test_c4_a_model_that_fails_after_its_weights_have_loaded_does_not_abort(tmp_path: Path) -> None:
    """MLX aborts a process whose thread ends with streams of its own."""
    shutil.copytree(CHECKPOINT, tmp_path / "model")
    (tmp_path / "model" / "model-mtp.safetensors").unlink()
    (tmp_path / "model" / "model.safetensors.index.json").unlink()
    flags = ("--lanes", "text-mtp", "--draft-tokens", "0", "--port", "0")
    result = run_worker("--model", str(tmp_path / "model"), *flags)
    assert (result.returncode, "terminate" in result.stderr) == (3, False)


@pytest.mark.parametrize(
    ("file", "fields", "reason"),
    [
        ("config.json", {"text_config": {"num_hidden_layers": 1 << 40}}, "num_hidden_layers"),
        ("config.json", {"vision_config": {"depth": 1e12}}, "depth"),
        ("config.json", {"max_position_embeddings": 1, "text_config": None}, "loaded"),
        ("config.json", {"model_type": "bert_nope"}, "does not support the model type 'bert_nope'"),
        ("generation_config.json", {"max_new_tokens": "many"}, "max_new_tokens"),
        ("model.safetensors.index.json", {"weight_map": {"a": "../a.safetensors"}}, "names other"),
        ("model.safetensors.index.json", {"weight_map": {"a": "a.gguf"}}, "names other"),
        ("model.safetensors.index.json", {"weight_map": {"a": 5}}, "cannot be loaded"),
    ],
)
def test_c4_a_hostile_value_is_refused(loader, tmp_path, file, fields, reason) -> None:
    plant(tmp_path / "model", (file, fields))
    code, output = loader.load(tmp_path / "model")
    assert (code, reason in output) == (REFUSED, True), output


@pytest.mark.parametrize("count", [4, pytest.param(200, marks=pytest.mark.proof)])
def test_c4_the_worker_refuses_or_serves_any_damaged_checkpoint(loader, tmp_path, count) -> None:
    """No child is killed: not by a signal of its own, and not by the limits of time and memory.

    CVE-2026-7482; MLX GHSA-m354-cccg-cx5m, GHSA-gc76-m4ff-mfmx, GHSA-m6v2-px5w-fw97,
    GHSA-2m2v-7fpr-2g4c: loaders that trust the contents of a file.
    """

    @settings(
        max_examples=count,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(hostile_checkpoints())
    def check(checkpoint: HostileCheckpoint) -> None:
        folder = tmp_path / "damaged"
        checkpoint.write(folder)
        code, output = loader.load(folder)
        shutil.rmtree(folder)
        assert code in (SERVED, REFUSED), output
        assert "Traceback" not in output or code == SERVED

    check()
