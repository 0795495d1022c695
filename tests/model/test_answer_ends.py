"""What ends an answer and what a prompt keeps, from the field of the body to the engine."""

from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from tests.support.worker_process import RunningWorker
from workers.demo import CHECKPOINT

MAX_TOKENS = 60


@pytest.fixture
def answer_of(real_worker: RunningWorker):
    """Ask with these fields; with and without drafts the answers must be the same."""

    def answer(question: str = "Count from 1 to 5.", **fields: Any) -> dict[str, Any]:
        body = {
            "model": real_worker.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
            **fields,
        }
        plain, drafted = (
            httpx.post(
                f"{real_worker.url}/v1/chat/completions",
                json={**body, "draft_tokens": k},
                timeout=60,
            )
            .raise_for_status()
            .json()
            for k in (0, 3)
        )
        for one in (plain, drafted):
            one.pop("metrics", None)
        assert plain["choices"] == drafted["choices"]
        assert plain["usage"] == drafted["usage"]
        choice = drafted["choices"][0]
        return {
            "text": choice["message"]["content"],
            "reason": choice["finish_reason"],
            "stop": choice.get("stop_reason"),
            "tokens": drafted["usage"]["completion_tokens"],
            "prompt": drafted["usage"]["prompt_tokens"],
        }

    return answer


def test_with_ignore_eos_an_answer_goes_on_to_its_limit(answer_of) -> None:
    ended, further = answer_of(), answer_of(ignore_eos=True)
    assert (ended["reason"], ended["tokens"] < MAX_TOKENS) == ("stop", True)
    assert (further["reason"], further["tokens"]) == ("length", MAX_TOKENS)
    assert further["text"].startswith(ended["text"])


def test_no_end_comes_before_min_tokens(answer_of) -> None:
    fewest = answer_of()["tokens"] + 7
    assert answer_of(min_tokens=fewest)["tokens"] >= fewest


def test_a_token_of_stop_token_ids_ends_the_answer_and_is_no_text(answer_of) -> None:
    whole = answer_of()
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    comma = tokenizer.encode(",", add_special_tokens=False).ids
    assert len(comma) == 1
    ended = answer_of(stop_token_ids=comma)
    assert (ended["reason"], ended["text"]) == ("stop", whole["text"].partition(",")[0])
    assert (ended["stop"], whole["stop"]) == (comma[0], None)


def test_an_answer_names_the_stop_string_that_ended_it(answer_of) -> None:
    ended = answer_of(stop=["nowhere", " 3"])
    assert (ended["reason"], ended["stop"]) == ("stop", " 3")
    assert ended["text"] == answer_of()["text"].partition(" 3")[0]


def test_the_tokens_of_a_prompt_are_counted_without_an_answer(answer_of, real_worker) -> None:
    question = "Count from 1 to 5."
    body = {"model": real_worker.model, "messages": [{"role": "user", "content": question}]}
    counted = httpx.post(f"{real_worker.url}/tokenize", json=body, timeout=60).json()
    assert counted["count"] == answer_of(question)["prompt"]
    assert counted["max_model_len"] > counted["count"]


def test_truncate_prompt_tokens_keeps_the_end_of_a_longer_prompt(answer_of) -> None:
    one, other = (
        answer_of(word * 50 + "Count from 1 to 5.", truncate_prompt_tokens=15)
        for word in ("word ", "story ")
    )
    assert one == other
    assert one["prompt"] == 15
    assert one["text"] == answer_of(truncate_prompt_tokens=15)["text"]


@pytest.mark.parametrize("limit", [1000, -1])
def test_a_prompt_that_fits_is_not_cut(answer_of, limit: int) -> None:
    assert answer_of(truncate_prompt_tokens=limit) == answer_of()
