"""Failures to load a model folder become one sentence, and interruptions stay what they are."""

import asyncio
from pathlib import Path

import pytest

from workers.engine.model.model_folder import refusing
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
