"""Several generations as one stream of events, each tagged with the choice it belongs to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from workers.engine.types import Event, Finished, Generation, GenerationFailed
from workers.server.ports import ServingEngine


async def events_of(
    engine: ServingEngine, generations: Sequence[Generation]
) -> AsyncGenerator[tuple[int, Event], None]:
    """Yield the events of all choices as they come; closing it removes every row.

    The first error of any choice ends all of them and is raised.
    """
    if len(generations) == 1:
        async with aclosing(_run(engine, generations[0])) as events:
            async for event in events:
                yield 0, event
        return
    arrived: asyncio.Queue[tuple[int, Event | Exception]] = asyncio.Queue()
    tasks = [
        asyncio.create_task(_collect(engine, generation, index, arrived))
        for index, generation in enumerate(generations)
    ]
    try:
        running = len(tasks)
        while running:
            index, outcome = await arrived.get()
            if isinstance(outcome, Exception):
                raise outcome
            yield index, outcome
            running -= isinstance(outcome, Finished)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _collect(
    engine: ServingEngine,
    generation: Generation,
    index: int,
    arrived: asyncio.Queue[tuple[int, Event | Exception]],
) -> None:
    try:
        async with aclosing(_run(engine, generation)) as events:
            async for event in events:
                arrived.put_nowait((index, event))
    except Exception as error:  # noqa: BLE001 - handed over, and raised by the reader
        arrived.put_nowait((index, error))


async def _run(engine: ServingEngine, generation: Generation) -> AsyncGenerator[Event, None]:
    """Yield events up to `Finished`; an end without it is a failure, never a short answer."""
    async with aclosing(engine.generate(generation)) as events:
        async for event in events:
            yield event
            if isinstance(event, Finished):
                return
    raise GenerationFailed("The engine ended a generation without finishing it.")
