"""What the gateway remembers of a server of Ollama."""

import json

from gateway.engines.base import HttpAnswer, Question
from gateway.engines.ollama import Ollama


async def test_a_server_that_tells_ever_new_digests_takes_no_more_memory() -> None:
    engine = Ollama()
    shown = []
    digests = [f"digest-{number}" for number in (*range(100), 99)]
    left = iter(digests)

    async def ask(question: Question) -> HttpAnswer:
        if question.path == "/api/show":
            shown.append(question)
        told: dict[str, object] = {}
        if question.path == "/api/tags":
            told = {"models": [{"name": "qwen", "digest": next(left)}]}
        return HttpAnswer(200, {}, json.dumps(told))

    for _ in digests:
        assert [one.name for one in (await engine.read(ask)).models] == ["qwen"]
    assert len(engine._abilities) == 1
    assert len(shown) == 100, "a digest that is still listed is not asked for again"
