"""The tokens of a prompt: counted by a worker of Paceline that serves the model, or estimated."""

from __future__ import annotations

import asyncio
import functools
import logging

from pydantic_core import from_json
from starlette.responses import Response

from gateway import errors
from gateway.assembly import Gateway
from gateway.fleet.worker import WorkerState
from gateway.http.upstream import ConnectionLost, ConnectionPool, StaleConnection, refusal
from gateway.protocols.openai import WireFormat
from gateway.proxy.billing import estimate
from gateway.strict_json import Pieces
from gateway.types import Inspected
from paceline.protocol import MAX_COUNT, TOKENIZE_PATH

log = logging.getLogger(__name__)

_ESTIMATE_HEADER = "x-paceline-estimate"
"""Of an answer whose number no worker has counted."""
_TIMEOUT_S = 5.0
_RESPONSE_LIMIT_BYTES = 4096


class TokenCounter:
    """Counts the tokens of chats by the worker with the fewest requests, over `connections`."""

    def __init__(self, gateway: Gateway, connections: ConnectionPool) -> None:
        self._fleet = gateway.fleet
        self._connections = connections

    async def count(
        self, inspected: Inspected, body: Pieces, wire_format: WireFormat, response: Response
    ) -> int:
        """Return the tokens of a chat's prompt; a header of the response marks an estimate.

        An estimate tends to be too large. Raise `RefusedByWorker` as a request would.
        """
        model = inspected.profile.model
        workers = [
            one
            for one in self._fleet.workers()
            if one.backend.sends_reports and one.accepting and model in one.models
        ]
        worker = min(workers, key=lambda one: one.in_flight.total(), default=None)
        if worker is not None:
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    return await self._ask(worker, inspected, body)
            except errors.RefusedByWorker as error:
                raise wire_format.named(error) from None
            except (errors.WorkerError, TimeoutError, ValueError) as error:
                worker_id, why = worker.report.worker_id, type(error).__name__
                log.warning("tokens.uncounted worker=%s error=%s", worker_id, why)
        response.headers[_ESTIMATE_HEADER] = "true"
        return estimate(inspected.profile._replace(max_tokens=0))

    async def _ask(self, worker: WorkerState, inspected: Inspected, body: Pieces) -> int:
        """Return the count of one worker; raise `ValueError` for an answer without one."""
        backend, worker_id = worker.backend, worker.report.worker_id
        authorization = backend.authorization_of(worker_id)
        headers = {"content-type": "application/json", **authorization}
        url = worker.report.url + TOKENIZE_PATH
        send = functools.partial(self._connections.send, url, body, headers, lambda: None)
        send = functools.partial(send, server_name=backend.server_name(worker_id))
        try:
            response = await send()
        except StaleConnection:
            response = await send(fresh=True)
        try:
            if response.status != 200:
                raise await refusal(response, _TIMEOUT_S, backend.refusal, inspected.body)
            answer = from_json(await response.read(_RESPONSE_LIMIT_BYTES))
        except ConnectionLost as error:
            raise errors.WorkerLost from error
        finally:
            response.release()
        tokens = answer.get("count") if isinstance(answer, dict) else None
        if not isinstance(tokens, int) or not 0 <= tokens <= MAX_COUNT:
            raise ValueError("The answer contains no count.")
        return tokens
