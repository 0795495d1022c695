"""Answers of an engine to one question each, without a server."""

from typing import Any

from paceline.request.profile import Sampling
from workers.engine.engine import Engine
from workers.engine.types import Delta, Finished, Generation, LaneName, Prompt


async def answer(engine: Engine, question: str, **fields: Any) -> tuple[str, Finished]:
    """Return the text of an answer, greedy unless the fields of its generation say otherwise."""
    prompt = Prompt(text=engine.prompts.chat([{"role": "user", "content": question}]))
    given = {"lane": LaneName.TEXT_MTP, "sampling": Sampling(temperature=0), **fields}
    events = [
        one async for one in engine.generate(Generation(request_id="a", prompt=prompt, **given))
    ]
    assert isinstance(events[-1], Finished), "every generation finishes"
    return "".join(one.text for one in events if isinstance(one, Delta)), events[-1]
