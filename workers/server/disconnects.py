"""A client that leaves ends the work done for it, for whole answers as for streams."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from workers.server.errors import ClientLeft

Result = TypeVar("Result")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Await the work; cancel it and raise `ClientLeft` when the client is gone first.

    The body must have been read: what then comes from `receive` is the disconnect.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
