"""The one connection to Redis: whoever shares something over it asks here.

No request waits for Redis. What is shared is read from a copy in memory, and the tasks that keep
the copies ask here, each question with its deadline. Whether that goes well is known by the part
that asks, so that a Redis that is full is not taken for a whole one because it can still be read.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisUnreachable
from redis.exceptions import TimeoutError as RedisTimeout
from redis.maint_notifications import MaintNotificationsConfig

from gateway.errors import RecordsUnwritable, StartupError, WriteUnconfirmed

log = logging.getLogger(__name__)

DEADLINE_S = 1.0
"""Of one question, which no request waits for."""
ADMIN_DEADLINE_S = 2.0
"""Of a call for which an admin waits."""
_CONNECTIONS = 16
# Of the event loop, in which an answer that has come is read.
_TURNS = 4
# The last is what uvloop says of a connection that was closed under a question.
_UNREACHABLE = (RedisUnreachable, RedisTimeout, OSError, RuntimeError)
_FAILURES = (RedisError, ValueError, *_UNREACHABLE)
Answer = TypeVar("Answer")


class RedisClient:
    """The client of one Redis, and how it is with it. Opens nothing before the first question."""

    def __init__(self, url: str) -> None:
        try:
            pool: ConnectionPool = ConnectionPool.from_url(
                url,
                decode_responses=True,
                # With one, every question is sent under `asyncio.wait_for`, which before Python
                # 3.12 may swallow that its task is cancelled. `call` and `edit` have the deadline.
                socket_timeout=None,
                socket_connect_timeout=DEADLINE_S,
                # Whoever asks asks again with its next turn; a retry here would only be late.
                retry=Retry(NoBackoff(), 0),
                max_connections=_CONNECTIONS,
                redis_connect_func=self._greet,
                maint_notifications_config=MaintNotificationsConfig(enabled=False),
            )
        except (ValueError, TypeError):
            raise StartupError(
                "PACELINE_REDIS_URL must be like redis://127.0.0.1:6379/0."
            ) from None
        self.redis: Redis = Redis(connection_pool=pool)
        self.gateway_id = secrets.token_hex(8)
        """Names this process to the other gateways."""
        self.connections = 0
        """How many were made so far. Behind a new one may be another Redis, or one that has lost
        what it held."""
        given = pool.connection_kwargs
        place = [str(given.get(name, "")) for name in ("host", "port", "path", "db")]
        self.address_digest = hashlib.sha256("|".join(place).encode()).hexdigest()[:12]
        """Names the place of this Redis, without any secret."""
        self._troubles: dict[str, str] = {}
        self._late: set[asyncio.Task[Any]] = set()
        self.unreachable = False
        """It did not answer the last question at all. The turns of sharing go on asking."""

    @property
    def problem(self) -> str:
        """Say in one sentence what was found wrong last; empty where nothing is."""
        return next(reversed(self._troubles.values()), "")

    @property
    def degraded(self) -> bool:
        """Say whether some part could not be shared when it was last tried."""
        return bool(self._troubles)

    def script(self, lua: str) -> AsyncScript:
        """Prepare a script; Redis is told of it where it does not know it (any more)."""
        return self.redis.register_script(lua)

    async def call(self, part: str, question: Callable[[], Awaitable[Answer]]) -> Answer:
        """Ask on behalf of a part; raise `RecordsUnwritable` where no good answer comes in time.

        A question reads its answer too, and raises `ValueError` for one that makes no sense.
        """
        try:
            async with asyncio.timeout(DEADLINE_S):
                answer = await question()
        except _FAILURES as error:
            self.unreachable = isinstance(error, _UNREACHABLE)
            self._note(part, _sentence(error))
            raise RecordsUnwritable from None
        self.unreachable = False
        self._note(part, "")
        return answer

    async def edit(self, question: Callable[[], Awaitable[Answer]]) -> Answer:
        """Ask while an admin waits: not at all where Redis did not answer the last question.

        What is not answered in that time may be kept all the same: raise `WriteUnconfirmed`.
        """
        if self.unreachable:
            raise RecordsUnwritable
        asking = asyncio.create_task(_answer(question), name="edit of records")
        try:
            answered = await self.waited(asking)
        finally:
            # From now on nobody waits. A deadline before that would end what this process only
            # could not read since it stood still.
            if not asking.done():
                asyncio.get_running_loop().call_later(DEADLINE_S, asking.cancel)
        if not answered:
            log.warning("redis.edit_late")
            raise WriteUnconfirmed
        try:
            return asking.result()
        except _FAILURES as error:
            log.warning("redis.edit_failed why=%s", _sentence(error))
            # A connection may break behind the question as well as before it.
            unanswered = isinstance(error, _UNREACHABLE)
            raise (WriteUnconfirmed if unanswered else RecordsUnwritable) from None

    async def waited(self, asking: asyncio.Task[Any]) -> bool:
        """Wait as long as a request may; say whether that was long enough.

        Where it was not the question goes on beside, and nobody waits again before Redis answers.
        """
        try:
            await asyncio.wait((asking,), timeout=ADMIN_DEADLINE_S)
            for _ in range(_TURNS):
                if asking.done():
                    return True
                # Perhaps the answer lies there, and it was this process that did not get on.
                await asyncio.sleep(0)
            self.unreachable = True
            return False
        finally:
            if not asking.done():
                self._late.add(asking)
                asking.add_done_callback(self._let_go)

    async def close(self) -> None:
        """Close the connections."""
        await self.redis.aclose()
        await self.redis.connection_pool.disconnect()

    async def _greet(self, connection: AbstractConnection) -> None:
        try:
            await connection.on_connect()
        except BaseException:
            # Half greeted, the next one to use it would read the answers to us.
            await connection.disconnect(nowait=True)
            raise
        self.connections += 1

    def _let_go(self, asking: asyncio.Task[Any]) -> None:
        """Take note of how a question ended that nobody waits for any more."""
        self._late.discard(asking)
        if not asking.cancelled() and (error := asking.exception()) is not None:
            log.warning("redis.late_failed why=%s", _sentence(error))

    def _note(self, part: str, why: str) -> None:
        """Log a change, not every question."""
        before = self._troubles.pop(part, "")
        if why:
            self._troubles[part] = why
        if why and not before:
            log.warning("redis.degraded part=%s why=%s", part, why)
        elif before and not why:
            log.info("redis.healed part=%s", part)


async def _answer(question: Callable[[], Awaitable[Answer]]) -> Answer:
    return await question()


# The first that fits; of Redis' own words none: they may hold names and addresses.
_SENTENCES: tuple[tuple[type[Exception], str], ...] = (
    (AuthenticationError, "Redis does not accept the user or password."),
    (AuthorizationError, "Redis does not accept the user or password."),
    (NoPermissionError, "Redis does not accept the user or password."),
    (BusyLoadingError, "Redis is still reading its data."),
    (OutOfMemoryError, "Redis is full."),
    (ReadOnlyError, "Redis is read-only."),
    (RedisTimeout, "Redis does not answer in time."),
    (TimeoutError, "Redis does not answer in time."),
    (RedisUnreachable, "Redis cannot be reached."),
    (OSError, "Redis cannot be reached."),
    (RuntimeError, "Redis cannot be reached."),
    (ValueError, "A key of Paceline holds in Redis what Paceline did not write."),
)


def _sentence(error: BaseException) -> str:
    """Say in one sentence what is wrong."""
    if isinstance(error, ResponseError) and "WRONGTYPE" in str(error):
        return "A key of Paceline holds something else in Redis."
    fitting = (sentence for kind, sentence in _SENTENCES if isinstance(error, kind))
    return next(fitting, "Redis refuses a command.")
