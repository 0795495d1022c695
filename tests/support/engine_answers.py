"""Questions to an engine, and its answers, without a server."""

from typing import Any

from paceline.request.profile import Sampling
from workers.engine.engine import Engine
from workers.engine.types import Delta, Finished, Generation, LaneName, Prompt


def generation_for(engine: Engine, question: str, **fields: Any) -> Generation:
    """Return a question to the text lane, greedy unless the fields of its generation say so."""
    prompt = Prompt(text=engine.prompts.chat([{"role": "user", "content": question}]))
    given = {"lane": LaneName.TEXT_MTP, "prompt": prompt, "sampling": Sampling(temperature=0)}
    return Generation(**{"request_id": "test", **given, **fields})


async def collect(engine: Engine, generation: Generation) -> tuple[str, Finished]:
    events = [event async for event in engine.generate(generation)]
    assert isinstance(events[-1], Finished), "every generation finishes"
    return "".join(event.text for event in events if isinstance(event, Delta)), events[-1]


async def answer(engine: Engine, question: str, **fields: Any) -> tuple[str, Finished]:
    return await collect(engine, generation_for(engine, question, **fields))
