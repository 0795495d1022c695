"""The connection to Redis, and whether it works.

Only a generating request that continues or stores a response waits for Redis. All other
requests read copies in memory, which periodic exchanges refresh, each call with a deadline.
Problems are stored by the part that calls, so that a full Redis, which can still be read, does not
count as working.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar
from urllib.parse import urlsplit
from weakref import WeakSet

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection, ConnectionPool, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.commands.core import AsyncScript
from redis.maint_notifications import MaintNotificationsConfig

from gateway.errors import RecordsUnwritable, StartupError, WriteUnconfirmed

log = logging.getLogger(__name__)

DEADLINE_S = 1.0
"""Of a call in a periodic exchange."""
ADMIN_DEADLINE_S = 2.0
"""Of a call that an admin waits for."""
_MAX_CONNECTIONS = 16
# redis+sentinel://USER:PASSWORD@HOST:PORT,HOST:PORT/SERVICE/DB
_SENTINEL_URL = re.compile(r"(rediss?)\+sentinel://(.*@)?([^/@?]+)/([^/?]+)(.*)")
_SENTINEL_PORT = 26379
_SENTINEL_TIMEOUT_S = 0.3
"""Of a connection to a Sentinel: the next one may answer before the deadline of the call."""
# A reply that has arrived is parsed within so many iterations of the event loop.
_PARSE_ITERATIONS = 4


class OtherJoinToken(ValueError):
    """The digest in Redis is that of another join token."""


# uvloop raises RuntimeError for a connection that is closed during a call.
_UNREACHABLE = (exceptions.ConnectionError, exceptions.TimeoutError, OSError, RuntimeError)
_FAILURES = (exceptions.RedisError, ValueError, *_UNREACHABLE)
_REFUSALS = (exceptions.AuthenticationError, exceptions.AuthorizationError)
# Redis' own messages may hold names and addresses. The first that fits:
_PROBLEMS = (
    (_REFUSALS, "Redis does not accept the user or password."),
    (exceptions.NoPermissionError, "Redis denies its user a command or key of Paceline."),
    (exceptions.BusyLoadingError, "Redis is still loading its data."),
    (exceptions.OutOfMemoryError, "Redis is full."),
    (exceptions.ReadOnlyError, "Redis is a read-only replica."),
    ((exceptions.TimeoutError, TimeoutError), "Redis does not answer in time."),
    (_UNREACHABLE, "Redis cannot be reached."),
    (OtherJoinToken, "Other gateways on this Redis have another join token."),
    (ValueError, "A Redis key of Paceline holds data that Paceline did not write."),
)
_DENIED_IN_SCRIPT = re.compile("user executing the script|ACL failure in script")
UNWRITTEN = "The gateway cannot write its stored state now."
Reply = TypeVar("Reply")


class RedisClient:
    """The client of one Redis, and its state. Connects with the first call.

    `deadline_s` is that of a call in a periodic exchange.
    """

    def __init__(
        self,
        url: str,
        deadline_s: float = DEADLINE_S,
        admin_deadline_s: float = ADMIN_DEADLINE_S,
    ) -> None:
        self._deadline_s = deadline_s
        self._admin_deadline_s = admin_deadline_s
        try:
            pool = _connection_pool(
                url,
                decode_responses=True,
                # With a timeout, the library uses `asyncio.wait_for`, which before Python 3.12 may
                # swallow the cancellation of its task. `call` and `write` have deadlines.
                socket_timeout=None,
                socket_connect_timeout=deadline_s,
                # The next exchange is the retry; one here would only be late.
                retry=Retry(NoBackoff(), 0),
                max_connections=_MAX_CONNECTIONS,
                redis_connect_func=self._on_connect,
                maint_notifications_config=MaintNotificationsConfig(enabled=False),
            )
        except (ValueError, TypeError):
            raise StartupError(
                "PACELINE_REDIS_URL must be like redis://127.0.0.1:6379/0, or like "
                "redis+sentinel://sentinel-1,sentinel-2/SERVICE."
            ) from None
        self.redis: Redis = Redis(connection_pool=pool)
        self.gateway_id = secrets.token_hex(8)
        """Identifies this process to other gateways."""
        self.reconnections = 0
        """The count of connections made in place of lost ones. They may lead to another Redis, or
        to an empty one."""
        self._made: WeakSet[AbstractConnection] = WeakSet()
        options = {"host": getattr(pool, "service_name", ""), **pool.connection_kwargs}
        address = [str(options.get(name, "")) for name in ("host", "port", "path", "db")]
        self.address_digest = hashlib.sha256("|".join(address).encode()).hexdigest()[:12]
        """Identifies this Redis, without any secret."""
        self._problems: dict[str, str] = {}
        self._late: set[asyncio.Task[Any]] = set()
        self.unreachable = False
        """The last call got no reply. Exchanges continue to call; admins' edits fail at once."""

    @property
    def problem(self) -> str:
        """Return the latest problem as a sentence; empty if the last call of each part worked."""
        return next(reversed(self._problems.values()), "")

    def script(self, lua: str) -> AsyncScript:
        """Return a script, which is loaded into Redis when it is missing there."""
        return self.redis.register_script(lua)

    async def call(self, part: str, command: Callable[[], Awaitable[Reply]]) -> Reply:
        """Run a command for a part; raise `RecordsUnwritable` without a good reply in time.

        The command parses its reply too, and raises `ValueError` for a malformed one.
        """
        try:
            reply = await _call(command, self._deadline_s)
        except _FAILURES as error:
            self.unreachable = isinstance(error, _UNREACHABLE)
            self._set_problem(part, _problem_of(error))
            await self._leave_replica(error)
            raise RecordsUnwritable from None
        self.unreachable = False
        self._set_problem(part, "")
        return reply

    async def write(self, command: Callable[[], Coroutine[Any, Any, Reply]]) -> Reply:
        """Run an admin's edit; raise `RecordsUnwritable`.

        An edit without a reply in time may be stored all the same: raise `WriteUnconfirmed`.
        """
        if self.unreachable:
            raise RecordsUnwritable(f"{UNWRITTEN} {self.problem}")
        writing = asyncio.create_task(command(), name="write records")
        try:
            replied = await self.wait_for_admin(writing)
        finally:
            # Cancelled late: until now the reply may have arrived while this process stood still.
            if not writing.done():
                asyncio.get_running_loop().call_later(self._deadline_s, writing.cancel)
        if not replied:
            log.warning("redis.write_unconfirmed")
            raise WriteUnconfirmed
        try:
            return writing.result()
        except _FAILURES as error:
            problem = _problem_of(error)
            log.warning("redis.write_failed problem=%s", problem)
            await self._leave_replica(error)
            if isinstance(error, _UNREACHABLE):
                raise WriteUnconfirmed from None  # a connection may break before or after the write
            raise RecordsUnwritable(f"{UNWRITTEN} {problem}") from None

    async def wait_for_admin(self, task: asyncio.Task[Any]) -> bool:
        """Wait for a task until the deadline of admins; return whether it is done.

        A late task continues, and Redis counts as unreachable until the next reply.
        """
        try:
            replied = await _wait(task, self._admin_deadline_s)
            self.unreachable |= not replied
            return replied
        finally:
            if not task.done():
                self._late.add(task)
                task.add_done_callback(self._log_late)

    async def close(self) -> None:
        """Close the connections."""
        await self.redis.aclose()
        pool = self.redis.connection_pool
        await pool.disconnect()
        if isinstance(pool, SentinelConnectionPool):
            await pool.sentinel_manager.aclose()

    async def _on_connect(self, connection: AbstractConnection) -> None:
        try:
            await connection.on_connect()
        except BaseException:
            # After half a handshake, the next call would read the replies to it.
            await connection.disconnect(nowait=True)
            raise
        if connection in self._made or not all(made.is_connected for made in self._made):
            self.reconnections += 1
        self._made.add(connection)

    async def _leave_replica(self, error: BaseException) -> None:
        """Reconnect with the next call: by now the address may lead to the new primary."""
        if isinstance(error, exceptions.ReadOnlyError):
            pool = self.redis.connection_pool
            with contextlib.suppress(*_FAILURES):
                await pool.update_active_connections_for_reconnect()  # type: ignore[no-untyped-call]
                await pool.disconnect(inuse_connections=False)

    def _log_late(self, task: asyncio.Task[Any]) -> None:
        self._late.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("redis.late_write_failed problem=%s", _problem_of(error))

    def _set_problem(self, part: str, problem: str) -> None:
        """Store the problem of a part; log when it begins for any part, and when all have ended."""
        before = self._problems.pop(part, "")
        told = before or problem in self._problems.values()
        if problem:
            self._problems[part] = problem
        if problem and not told:
            log.warning("redis.degraded part=%s problem=%s", part, problem)
        elif before and not self._problems:
            log.info("redis.recovered part=%s", part)


async def _call(command: Callable[[], Awaitable[Reply]], deadline_s: float) -> Reply:
    """Return the reply to a command; raise `TimeoutError` and cancel a late one."""
    calling = asyncio.ensure_future(command())
    try:
        if await _wait(calling, deadline_s):
            return calling.result()
        raise TimeoutError
    finally:
        if not calling.done():
            calling.cancel()
            await asyncio.wait((calling,))


async def _wait(task: asyncio.Future[Any], timeout_s: float) -> bool:
    """Wait for a reply at most so long; return whether it is there."""
    await asyncio.wait((task,), timeout=timeout_s)
    for _ in range(_PARSE_ITERATIONS):
        if task.done():
            return True
        # The reply may have arrived while this process stood still.
        await asyncio.sleep(0)
    return False


def _connection_pool(url: str, **options: Any) -> ConnectionPool:
    """Return the connections to the Redis of a URL, or to the primary that Sentinels name."""
    if (match := _SENTINEL_URL.fullmatch(url)) is None:
        return ConnectionPool.from_url(url, **options)
    scheme, user, hosts, service, rest = match.groups(default="")
    sentinels = [urlsplit(f"//{host}") for host in hosts.split(",")]
    options |= dict(parse_url(f"{scheme}://{user}{sentinels[0].netloc}{rest}"))
    for name in ("host", "port", "connection_class"):
        options.pop(name, None)
    tls = {"ssl": scheme == "rediss"}
    of_sentinels = {name: options[name] for name in options if name.startswith("ssl_")}
    manager = Sentinel(  # type: ignore[no-untyped-call]
        [(one.hostname, one.port or _SENTINEL_PORT) for one in sentinels],
        sentinel_kwargs={
            **of_sentinels,
            **tls,
            "decode_responses": True,
            "retry": options["retry"],
            "socket_timeout": None,
            "socket_connect_timeout": _SENTINEL_TIMEOUT_S,
        },
    )
    pool: ConnectionPool = SentinelConnectionPool(  # type: ignore[no-untyped-call]
        service, manager, **options, **tls
    )
    return pool


def _problem_of(error: BaseException) -> str:
    if isinstance(error, exceptions.ResponseError) and "WRONGTYPE" in str(error):
        return "A Redis key of Paceline has another type."
    if isinstance(error, exceptions.ResponseError) and _DENIED_IN_SCRIPT.search(str(error)):
        error = exceptions.NoPermissionError()
    fitting = (problem for kind, problem in _PROBLEMS if isinstance(error, kind))
    return next(fitting, "Redis rejects a command.")
