"""No file that nobody changed undoes an edit of an admin, whatever restarts, and in which order."""

import asyncio
import itertools
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from gateway.config import policy_file
from gateway.config.policy_file import LastReads, PolicyFileWatcher, read_source
from gateway.config.policy_store import POLICY_KIND, PolicyStore
from gateway.config.policy_versions import PolicyVersion, Proposal, Reason
from gateway.state.records import RedisRecords
from gateway.state.redis import RedisClient
from tests.support.memory_records import MemoryRecords
from tests.support.policies import (
    AUTHOR_ANN,
    PolicyAdmin,
    make_policy_store,
    proposal,
    single_pool_policy,
    to_yaml,
)
from tests.support.redis_server import TEST_DEADLINE_S, RedisServer
from tests.support.running_gateway import RunningGateway, make_settings, wait_until

GATEWAYS = st.integers(0, 2)
CONTENTS = st.sampled_from("abc")
CHANGES = st.one_of(st.none(), CONTENTS)


def text_of(content: str) -> str:
    return to_yaml(single_pool_policy(content))


def newer_from_yaml(text: str, from_yaml: Any = Proposal.from_yaml) -> Proposal:
    """Read YAML as a version of Paceline that writes each default into the document."""
    read: Proposal = from_yaml(text)
    return read._replace(document=read.policy.model_dump(mode="json"))


class Crash(Exception):
    """The process of a gateway has ended."""


class _Gateway:
    """What a gateway does with policies: its start, and a look at its file."""

    def __init__(self, folder: Path, redis: RedisServer, *, listed: bool) -> None:
        self.folder = folder
        """Of its state."""
        self.file = folder.with_suffix(".yaml") if listed else None
        self.redis = redis
        self.newer = False
        """It is of the newer one of two versions of Paceline."""
        self.changed = listed
        """Somebody has changed the file since the gateway last looked at it."""
        self.content = ""
        self.change("a")
        self.watcher: PolicyFileWatcher | None = None
        self.client: RedisClient | None = None

    def change(self, content: str | None) -> None:
        """Let somebody write this into the file; None: nobody does."""
        if self.file is not None and content is not None:
            self.changed |= content != self.content
            self.content = content
            self.file.write_text(text_of(content))

    async def start(self) -> None:
        await self.stop()
        self.client = RedisClient(self.redis.url, TEST_DEADLINE_S, TEST_DEADLINE_S)
        records = RedisRecords(self.client, self.folder)
        source, reads = read_source(self.file), LastReads(self.folder, self.file)
        await reads.open()
        store = await PolicyStore(records, (), source, lambda: 0.0).open(reads.last)
        self.store = store
        self.watcher = PolicyFileWatcher(store, self.file, reads)
        if self.file is not None:
            await self.watcher.apply(source[0])

    async def stop(self) -> None:
        self.watcher = None
        if self.client is not None:
            await self.client.close()


class Fleet(RuleBasedStateMachine):
    """Two gateways with a policy file and one without, two versions of Paceline, and one Redis."""

    def __init__(self, redis: RedisServer, folder: Path) -> None:
        super().__init__()
        self.redis = redis
        redis.client.flushall()
        self.runner = asyncio.Runner()
        self.gateways = []
        for at in range(3):
            state = folder / f"gateway-{at}"
            state.mkdir(parents=True)
            self.gateways.append(_Gateway(state, redis, listed=at < 2))

    def teardown(self) -> None:
        for gateway in self.gateways:
            self.runner.run(gateway.stop())
        self.runner.close()

    def versions(self) -> list[PolicyVersion]:
        texts: Any = self.redis.client.hgetall(f"paceline:{{{POLICY_KIND}}}:records")
        found = [text.partition(",")[2][:-1] for name, text in texts.items() if name]
        versions = map(PolicyVersion.model_validate_json, found)
        return sorted(versions, key=lambda one: one.number)

    def look(self, gateway: _Gateway, looked: Any, *, crash: bool = False) -> None:
        """Let a gateway start or look at its file, and check what came of that."""
        before = self.versions()
        with pytest.MonkeyPatch.context() as patched:
            shipped = text_of("newer" if gateway.newer else "older")
            patched.setattr(policy_file, "default_text", lambda: shipped)
            if gateway.newer:
                patched.setattr(Proposal, "from_yaml", newer_from_yaml)

            async def die(*_: object) -> None:
                raise Crash

            if crash:
                patched.setattr(LastReads, "keep", die)
            try:
                self.runner.run(looked())
            except Crash:
                self.runner.run(gateway.stop())
        added = self.versions()[len(before) :]
        if gateway.file is None:
            assert not added or all(one.reason is Reason.START for one in before)
            assert not {one.text for one in added} & {one.text for one in before}
        elif not gateway.changed:
            assert added == [], "a file that nobody changed was applied"
        else:
            text = gateway.file.read_text()
            known = [name for one in before for name in one.document["pools"]]
            assert gateway.content in known or text in [one.text for one in added]
        gateway.changed = False

    @rule(at=GATEWAYS, content=CHANGES, newer=st.booleans(), crash=st.booleans())
    def restart(self, at: int, content: str | None, newer: bool, crash: bool) -> None:
        gateway = self.gateways[at]
        gateway.change(content)
        gateway.newer = newer
        self.look(gateway, gateway.start, crash=crash)

    @rule(at=st.integers(0, 1))
    def lose_the_state_folder(self, at: int) -> None:
        """A container without a volume: what the file was before is known by the history alone."""
        gateway = self.gateways[at]
        self.runner.run(gateway.stop())
        gateway.folder = gateway.folder / "next"
        gateway.folder.mkdir()

    @rule(at=st.integers(0, 1), content=CHANGES, crash=st.booleans())
    def look_at_the_file(self, at: int, content: str | None, crash: bool) -> None:
        gateway = self.gateways[at]
        gateway.change(content)
        watcher = gateway.watcher
        if watcher is not None:

            async def looked() -> None:
                await watcher.check()
                await watcher.check()

            self.look(gateway, looked, crash=crash)

    @precondition(lambda self: any(one.watcher for one in self.gateways))
    @rule(at=GATEWAYS, content=CONTENTS)
    def edit(self, at: int, content: str) -> None:
        gateway = self.gateways[at]
        if gateway.watcher is None:
            return
        self.runner.run(gateway.store.refresh())
        onto = gateway.store.version
        self.runner.run(gateway.store.apply(proposal(content), AUTHOR_ANN, onto=onto))


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.proof)])
def test_f81_no_edit_is_undone_by_a_file_that_nobody_changed(redis, tmp_path, count) -> None:
    numbers = itertools.count()
    run_state_machine_as_test(
        cast("Any", lambda: Fleet(redis, tmp_path / str(next(numbers)))),
        settings=settings(
            max_examples=count, stateful_step_count=20, suppress_health_check=list(HealthCheck)
        ),
    )


async def test_f81_a_start_beside_a_newer_paceline_adds_nothing_that_nobody_changed() -> None:
    """All versions have fields that this one does not know: its own policy acts here alone."""
    records = MemoryRecords()
    unknown = {**single_pool_policy("b"), "field_of_a_newer_version": 1}
    edit = PolicyVersion.following(0, unknown, AUTHOR_ANN, "then")
    await records.add(POLICY_KIND, "1", edit.model_dump_json())
    store = await make_policy_store(records, "a")
    assert (store.version.number, store.current) == (0, proposal("a").policy)
    assert list(await records.all(POLICY_KIND)) == ["1"]


def test_f81_a_restart_with_an_older_file_is_told_and_changes_nothing(tmp_path: Path) -> None:
    """Two gateways share the history; one was down while an admin and a new file changed it."""
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text(text_of("a"))
    new.write_text(text_of("b"))
    with RunningGateway(make_settings(tmp_path, policy=old)):
        pass
    with (
        RunningGateway(make_settings(tmp_path, policy=new)) as gateway,
        PolicyAdmin(gateway.url, gateway.admin_key) as admin,
    ):
        admin.put(single_pool_policy("c"))
        with RunningGateway(make_settings(tmp_path, policy=old)) as restarted:
            for one in (gateway, restarted):
                wait_until(lambda one=one: one.status()["policy"]["version"] == 3)  # type: ignore[misc]
                assert list(one.status()["pools"]) == ["c"]
            problem = restarted.status()["policy"]["file_problem"]
            assert problem.startswith("version 3 of the policy, by admin, differs")
            assert "roll back to version 1" in problem
            assert "paceline_policy_file_refused 0.0" in restarted.client.get("/metrics").text
