"""One request drafts and reuses earlier tokens at once, through a gateway, in both lanes.

Engines have lost one of the two unseen, because each of them alone still works.
"""

from pathlib import Path
from typing import Any

import pytest

from bench.families.checkpoints import write_checkpoint
from bench.families.configs import family
from bench.families.heads import write_head
from tests.support.openai_requests import text_and_cached_tokens
from tests.support.served_engine import gateway_with, running_engine
from workers.demo import CHECKPOINT
from workers.engine.startup import self_test

STORY = "The red fox sees the old tree and the blue boat finds the warm stone. " * 24
LANES: dict[str, dict[str, Any]] = {
    "text-mtp": {"temperature": 0},
    "vlm": {"temperature": 0.3, "seed": 5},
}


@pytest.mark.parametrize("name", ["demo", "GLM-4.6", "GLM-4.7-Flash"])
def test_the_next_turn_of_a_chat_drafts_and_reads_only_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model = CHECKPOINT
    if name != "demo":
        model = tmp_path / "model"
        write_checkpoint(model, family(name))
        write_head(model, family(name))
        # Its random head drafts, however few of its drafts are accepted.
        monkeypatch.setattr(self_test, "MIN_STEPS", 1 << 30)
    with running_engine(model) as engine, gateway_with(tmp_path / "gateway", engine) as running:
        for pool, fields in LANES.items():
            messages = [{"role": "user", "content": f"In {pool}: {STORY}"}]
            for again in (False, True):
                body = {"model": "demo", "messages": messages, "max_tokens": 60, **fields}
                response = running.gateway.client.post("/v1/chat/completions", json=body)
                answer = response.raise_for_status().json()
                assert response.headers["x-paceline-pool"] == pool
                text, cached = text_and_cached_tokens(answer)
                assert (cached > 256) == again
                assert answer["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
                messages += [
                    {"role": "assistant", "content": text},
                    {"role": "user", "content": "Tell it once more."},
                ]
