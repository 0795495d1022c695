"""Failures to load a model folder become one sentence, and interruptions stay what they are."""

import asyncio
from pathlib import Path

import pytest

from workers.engine.model.model_folder import check_folder, refusing
from workers.engine.types import ModelUnusable


@pytest.mark.parametrize("failure", [ValueError("two\nlines"), SystemExit(1), BaseException("x")])
def test_c4_any_failure_to_load_is_one_sentence(tmp_path: Path, failure: BaseException) -> None:
    with pytest.raises(ModelUnusable) as unusable, refusing(tmp_path):
        raise failure
    message = str(unusable.value)
    assert message.startswith(f"The model in {tmp_path} cannot be loaded (")
    assert message.endswith(").")
    assert "\n" not in message


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, asyncio.CancelledError])
def test_an_interruption_is_no_failure(tmp_path: Path, interruption: type[BaseException]) -> None:
    with pytest.raises(interruption), refusing(tmp_path):
        raise interruption


@pytest.mark.parametrize(
    ("weights", "problem"),
    [(None, "weights are missing"), (b"short", "model.safetensors is damaged or incomplete")],
)
def test_a_folder_without_whole_weights_is_refused_in_plain_words(
    tmp_path: Path, weights: bytes | None, problem: str
) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 4}')
    if weights:
        (tmp_path / "model.safetensors").write_bytes(weights)
    with pytest.raises(ValueError, match=problem):
        check_folder(tmp_path)
