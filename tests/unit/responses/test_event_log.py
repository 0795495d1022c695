"""The log of a response that runs in the background, as those that follow it read it."""

import pytest

from gateway.memory_budget import MemoryBudget
from gateway.responses.exchange import EventLog

EVENT = b"event: response.output_text.delta\ndata: {}\n\n"
LARGE = b"event: response.completed\ndata: " + b"x" * 300_000 + b"\n\n"


@pytest.mark.parametrize("after", [-1, 0, 1500, 4999])
async def test_a_follower_gets_a_long_log_in_pieces(after: int) -> None:
    """The gateway copies one piece at a time for a client that does not read."""
    log = EventLog(60.0, MemoryBudget().hold("ann"), cancel=None)
    log.append(EVENT * 5000)
    log.append(LARGE)
    log.close()

    pieces = [piece async for piece in log.follow(after)]

    assert b"".join(pieces) == EVENT * (4999 - after) + LARGE + b"data: [DONE]\n\n"
    assert all(len(piece) <= 64 * 1024 for piece in pieces), "of a large event too"
