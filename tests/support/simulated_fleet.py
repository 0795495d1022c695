"""A simulated fleet over the real parts of gateways, with the expected counts."""

import itertools
import random
from collections import Counter
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from gateway.auth.usage_store import UsageStore
from gateway.routing.select import Candidate, Decision
from gateway.state.counters import MemoryCounters
from gateway.state.recent_errors import RecentErrors
from gateway.state.redis import RedisClient
from gateway.state.shared_counters import CounterStore, SharedCounters
from gateway.state.worker_reports import SharedWorkerReports
from gateway.status.render import mtp_status
from gateway.telemetry.accounting import Accounting
from gateway.telemetry.prometheus import WorkerMetrics, exposition
from gateway.telemetry.request_record import RequestRecord
from gateway.types import Drafts, Outcome, Usage
from paceline.protocol import LaneReport, PrefixCounts, Speculation, WorkerReport
from paceline.request.profile import Endpoint, RequestProfile
from tests.support.memory_records import MemoryRecords
from tests.support.redis_server import TEST_DEADLINE_S, RedisServer
from tests.support.scripted_worker import lane_report

K = 2
"""Draft tokens per step."""
MODELS = {"a": "demo", "b": "demo", "c": "other"}
PROFILES = {model: RequestProfile(Endpoint.CHAT, model) for model in ("demo", "other")}


class SimulatedWorker:
    """A worker that counts as the engine does; each boot starts at zero."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.model = MODELS[worker_id]
        self._boots = itertools.count()
        self.restart()

    def restart(self) -> None:
        self.boot_id = f"boot-{next(self._boots)}"
        self.lane = lane_report("text-mtp")

    def answer(self, dice: random.Random) -> tuple[Usage, Drafts]:
        """Answer one request and count it."""
        accepted = [dice.randint(0, K) for _ in range(dice.randint(0, 5))]
        histogram = tuple(accepted.count(count) for count in range(K + 1))
        speculation = Speculation(
            num_spec_tokens=K,
            steps=len(accepted),
            drafted=K * len(accepted),
            accepted=sum(accepted),
            histogram=histogram,
        )
        usage = Usage(dice.randint(1, 90), 1 + len(accepted) + sum(accepted), dice.randint(0, 40))
        changes = {
            "requests": self.lane.requests + 1,
            "prompt_tokens": self.lane.prompt_tokens + usage.prompt_tokens,
            "completion_tokens": self.lane.completion_tokens + usage.completion_tokens,
            "speculation": self.lane.speculation + speculation,
            "prefix": self.lane.prefix + PrefixCounts(hits=1, cached_tokens=usage.cached_tokens),
            "bypass_counts": Counter(self.lane.bypass_counts) + Counter(media=1),
        }
        self.lane = LaneReport.model_validate({**dict(self.lane), **changes})
        return usage, Drafts(
            speculation.steps, speculation.drafted, speculation.accepted, histogram
        )

    def report(self) -> WorkerReport:
        return WorkerReport(
            worker_id=self.worker_id,
            boot_id=self.boot_id,
            url=f"http://127.0.0.1/{self.worker_id}",
            model=self.model,
            context_tokens=4096,
            lanes=(self.lane,),
        )


class SimulatedGateway:
    """The accounting of one run of a gateway, and its store."""

    def __init__(self, wall: Any) -> None:
        self.accounting = Accounting(
            UsageStore(MemoryRecords(), wall, "life"), RecentErrors(), None, wall
        )
        self.store = self._make_store()

    def _make_store(self) -> CounterStore:
        return MemoryCounters(self.accounting.take_pending)

    async def sync(self) -> None:
        """Exchange with other gateways."""

    async def close(self) -> None:
        """Close the connections."""


class SimulatedRedisGateway(SimulatedGateway):
    """One gateway process that shares a Redis."""

    def __init__(self, server: RedisServer, wall: Any) -> None:
        self._link = RedisClient(server.url, TEST_DEADLINE_S)
        self._boots = SharedWorkerReports(self._link)
        super().__init__(wall)

    def _make_store(self) -> CounterStore:
        self._store = SharedCounters(self._link, self._boots, self.accounting.take_pending)
        return self._store

    async def sync(self) -> None:
        await self._store.exchange()
        await self._boots.exchange((), ())

    async def close(self) -> None:
        await self._link.close()


class Simulation:
    """A fleet, its pending reports, and the expected counts."""

    def __init__(self, gateways: list[SimulatedGateway], seed: int) -> None:
        self.dice = random.Random(seed)
        self.unix_s = 1.0e9
        self.gateways = gateways
        self.workers = [SimulatedWorker(worker_id) for worker_id in MODELS]
        self.pending_reports: list[WorkerReport] = []
        self.expected_counts: Counter[tuple[str, ...]] = Counter()

    async def play(self, event: str) -> None:
        """Play one event of the workers or of the clock, by its name."""
        match event:
            case "answer":
                self.answer()
            case "beat":
                self.queue_report()
            case "deliver":
                await self.deliver()
            case "restart worker":
                self.restart_worker()
            case "jump":
                self.set_clock()
            case _:
                raise ValueError(event)

    def answer(self) -> None:
        """Let a worker answer through a gateway, and add the answer to the expected counts."""
        worker, gateway = self.dice.choice(self.workers), self.dice.choice(self.gateways)
        usage, drafts = worker.answer(self.dice)
        candidate = Candidate("text-mtp", "text-mtp", worker.worker_id, "eligible", 0.5)
        gateway.accounting.account(
            RequestRecord(
                f"req-{self.dice.random()}",
                Outcome.COMPLETED,
                200,
                self.dice.random(),
                profile=PROFILES[worker.model],
                decision=Decision("greedy", (), (candidate,)),
                candidate=candidate,
                attempts=1,
                usage=usage,
                prefix="hit" if usage.cached_tokens else "miss",
                drafts=drafts,
            )
        )
        for group in (("fleet",), ("worker", worker.worker_id), ("model", worker.model)):
            self.expected_counts[*group, "drafts"] += drafts.steps
            self.expected_counts[*group, "attempted"] += drafts.drafted
            self.expected_counts[*group, "accepted"] += drafts.accepted
            self.expected_counts[*group, "bypass"] += 1
            self.expected_counts[*group, "requests"] += 1
            self.expected_counts[*group, "prompt"] += usage.prompt_tokens
            self.expected_counts[*group, "completion"] += usage.completion_tokens
            self.expected_counts[*group, "cached"] += usage.cached_tokens
            for position in range(K):
                above = sum(drafts.histogram[position + 1 :])
                self.expected_counts[*group, f"position {position}"] += above

    def queue_report(self) -> None:
        self.pending_reports.append(self.dice.choice(self.workers).report())

    async def deliver(self) -> None:
        """Deliver any queued report, perhaps once more later."""
        if self.pending_reports:
            report = self.pending_reports[self.dice.randrange(len(self.pending_reports))]
            if self.dice.random() < 0.6:
                self.pending_reports.remove(report)
            await self.dice.choice(self.gateways).store.store_report(report)

    def restart_worker(self) -> None:
        worker = self.dice.choice(self.workers)
        self.pending_reports.append(worker.report())
        worker.restart()

    def set_clock(self) -> None:
        self.unix_s = self.dice.choice([0.0, 1e9, 4e9, self.unix_s - 3600])

    async def settle(self) -> None:
        """Deliver every report twice and in any order, and synchronise all gateways."""
        deliveries = 2 * [*self.pending_reports, *(worker.report() for worker in self.workers)]
        self.dice.shuffle(deliveries)
        for report in deliveries:
            await self.dice.choice(self.gateways).store.store_report(report)
        for _ in range(3):
            for gateway in self.gateways:
                await gateway.sync()

    async def check(self) -> None:
        """Compare the expected counts with those of every gateway."""
        for gateway in self.gateways:
            reports, counts = (await gateway.store.reports(), await gateway.store.counts())
            text = exposition(WorkerMetrics(reports)).decode()
            assert self._status_counts(reports) == self._expected(), "status"
            assert self._prometheus_counts(text) == self._expected(prometheus=True)
            for model in ("demo", "other"):
                for kind in ("prompt", "completion", "cached"):
                    expected = self.expected_counts["model", model, kind]
                    assert counts.get(("tokens", model, kind), 0) == expected, "counts"
            assert (
                counts.get(("outcomes", "completed"), 0)
                == self.expected_counts["fleet", "requests"]
            )

    def _expected(self, *, prometheus: bool = False) -> Counter[tuple[str, ...]]:
        names = {"drafts", "attempted", "accepted", *(f"position {i}" for i in range(K))}
        names |= set() if prometheus else {"requests", "prompt", "completion", "cached", "bypass"}
        groups = {"worker"} if prometheus else {"worker", "model", "fleet"}
        return +Counter(
            {
                key: count
                for key, count in self.expected_counts.items()
                if key[-1] in names and key[0] in groups
            }
        )

    def _status_counts(self, reports: tuple[WorkerReport, ...]) -> Counter[tuple[str, ...]]:
        counts: Counter[tuple[str, ...]] = Counter()
        lanes_by_group: dict[tuple[str, ...], list[LaneReport]] = {}
        for report in reports:
            lanes_by_group.setdefault(("fleet",), []).extend(report.lanes)
            lanes_by_group.setdefault(("worker", report.worker_id), []).extend(report.lanes)
            lanes_by_group.setdefault(("model", report.model), []).extend(report.lanes)
        for group, lanes in lanes_by_group.items():
            mtp = mtp_status(tuple(lanes))
            assert mtp.enabled
            assert mtp.attempted == mtp.accepted + mtp.rejected + mtp.errors
            counts[*group, "drafts"] = mtp.drafts
            counts[*group, "attempted"] = mtp.attempted
            counts[*group, "accepted"] = mtp.accepted
            counts[*group, "bypass"] = mtp.bypass_counts.get("media", 0)
            for position, share in enumerate(mtp.acceptance_rate_per_position):
                counts[*group, f"position {position}"] = round(share * mtp.drafts)
            counts[*group, "requests"] = sum(lane.requests for lane in lanes)
            counts[*group, "prompt"] = sum(lane.prompt_tokens for lane in lanes)
            counts[*group, "completion"] = sum(lane.completion_tokens for lane in lanes)
            counts[*group, "cached"] = sum(lane.prefix.cached_tokens for lane in lanes)
        return +counts

    def _prometheus_counts(self, text: str) -> Counter[tuple[str, ...]]:
        names = {
            "vllm:spec_decode_num_drafts_total": "drafts",
            "vllm:spec_decode_num_draft_tokens_total": "attempted",
            "vllm:spec_decode_num_accepted_tokens_total": "accepted",
        }
        counts: Counter[tuple[str, ...]] = Counter()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                worker = ("worker", sample.labels["worker"])
                if sample.name in names:
                    counts[*worker, names[sample.name]] += int(sample.value)
                elif "per_pos" in sample.name:
                    counts[*worker, f"position {sample.labels['position']}"] += int(sample.value)
        return +counts
