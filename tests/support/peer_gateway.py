"""Another gateway over one Redis, as far as a test needs one."""

import asyncio

from gateway.state.redis import RedisClient
from gateway.state.worker_reports import SharedWorkerReports
from paceline.protocol import WorkerReport
from tests.support.redis_server import TEST_DEADLINE_S, RedisServer


def share_heartbeat(redis: RedisServer, report: WorkerReport) -> None:
    """Share a heartbeat as a gateway that has confirmed the worker, which may be gone since."""

    async def share() -> None:
        client = RedisClient(redis.url, TEST_DEADLINE_S)
        await SharedWorkerReports(client).exchange([(report, 0.0)], [])
        await client.close()

    asyncio.run(share())
