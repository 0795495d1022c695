"""The policy store: no invalid version is ever active, and no active version is ever lost.

Two gateways share one store here, and admins edit the policy at both.
"""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.config import policy_versions
from gateway.config.policy_store import POLICY_KIND, PolicyStore
from gateway.config.policy_versions import Attribution, PolicyVersion, Proposal, Reason, is_new
from gateway.errors import RecordsUnwritable, VersionConflict, VersionUnknown
from gateway.state.records import FileRecords
from policies.diff import merge_patch
from policies.document import (
    PolicyDocument,
    PolicyInvalid,
    default_policy,
    parse_policy,
    read_policy,
)
from tests.support.memory_records import MemoryRecords
from tests.support.policies import (
    AUTHOR_ANN,
    AUTHOR_BOB,
    make_policy_store,
    proposal,
    single_pool_policy,
    to_yaml,
)

BY_FILE = AUTHOR_ANN._replace(reason=Reason.FILE)
EXAMPLES = Path(__file__).parents[3] / "policies" / "examples"


def active(store: PolicyStore) -> tuple[int, str]:
    """Return the number of the active version, and its pool."""
    (pool,) = store.current.pools
    return store.version.number, pool


@pytest.mark.parametrize(
    ("before", "reason", "pool", "expected"),
    [
        ([], Reason.START, "a", True),
        ([], Reason.FILE, "a", True),
        # A file at a gateway that has read none before: new if no version has its content.
        ([(Reason.FILE, "a")], Reason.FILE, "a", False),
        ([(Reason.FILE, "a")], Reason.FILE, "b", True),
        ([(Reason.FILE, "a"), (Reason.EDIT, "b")], Reason.FILE, "a", False),
        ([(Reason.FILE, "a"), (Reason.EDIT, "b")], Reason.FILE, "b", False),
        ([(Reason.FILE, "a"), (Reason.EDIT, "b")], Reason.FILE, "c", True),
        ([(Reason.FILE, "a"), (Reason.FILE, "b")], Reason.FILE, "a", False),
        ([(Reason.FILE, "a"), (Reason.ROLLBACK, "a")], Reason.FILE, "a", False),
        ([(Reason.START, "a")], Reason.FILE, "a", False),
        # The shipped policy: new while no admin has changed anything, as after an upgrade.
        ([(Reason.START, "a")], Reason.START, "a", False),
        ([(Reason.START, "a")], Reason.START, "b", True),
        ([(Reason.START, "a"), (Reason.EDIT, "b")], Reason.START, "c", False),
        ([(Reason.START, "a"), (Reason.FILE, "b")], Reason.START, "a", False),
        ([(Reason.START, "a"), (Reason.START, "b")], Reason.START, "a", False),
    ],
)
def test_a_policy_read_at_the_start_becomes_a_version_only_if_it_is_new(
    before: list[tuple[Reason, str]], reason: Reason, pool: str, expected: bool
) -> None:
    assert is_new(versions_of(before), proposal(pool), reason) == expected


def test_f81_of_a_rolled_out_file_the_first_gateway_alone_applies_the_change() -> None:
    versions = versions_of([(Reason.FILE, "a"), (Reason.FILE, "b"), (Reason.EDIT, "c")])
    first_read, second_read, _ = versions
    assert not is_new(versions, proposal("b"), Reason.FILE, first_read), "rolled out before"
    assert is_new(versions, proposal("a"), Reason.FILE, second_read), "changed back here"
    assert not is_new(versions, proposal("a"), Reason.FILE), "a container without a state folder"


def versions_of(before: list[tuple[Reason, str]]) -> list[PolicyVersion]:
    return [
        PolicyVersion.following(
            number, single_pool_policy(earlier), AUTHOR_ANN._replace(reason=why), "then"
        )
        for number, (why, earlier) in enumerate(before)
    ]


async def test_a_stored_version_is_read_back_unchanged_and_survives_the_loss_of_its_records(
    tmp_path: Path,
) -> None:
    file = tmp_path / "state.json"
    store = await make_policy_store(FileRecords(file))
    signature = Attribution("Zoë", "50% mehr für „alle“", Reason.EDIT)
    edited = await store.apply(proposal("b"), signature, onto=store.version)

    reopened = await make_policy_store(FileRecords(file))
    assert reopened.version == edited == store.version
    assert active(reopened) == (2, "b")
    assert [one.reason for one in await reopened.versions()] == [Reason.START, Reason.EDIT]

    file.unlink()
    await store.refresh()
    assert active(store) == (2, "b")
    await store.apply_source(proposal("c"), BY_FILE)
    assert active(store) == (3, "c")


async def test_f81_a_file_is_compared_with_a_long_history_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each version is read as a policy for that, which takes seconds for a thousand."""
    store, from_file, threads = await make_policy_store(), proposal("b"), set[int]()

    def read(*given: Any) -> PolicyDocument:
        threads.add(threading.get_ident())
        return read_policy(*given)

    monkeypatch.setattr(policy_versions, "read_policy", read)
    for _ in range(2):
        await store.apply_source(from_file, BY_FILE)
    assert active(store) == (2, "b")
    assert threads
    assert threading.get_ident() not in threads


async def test_every_policy_is_the_same_after_it_was_stored() -> None:
    examples = [parse_policy(file.read_text(), file.stem) for file in EXAMPLES.glob("*.yaml")]
    assert len(examples) == 5
    for policy in (default_policy(), proposal().policy, *examples):
        stored = json.loads(json.dumps(Proposal.of(policy).document))
        assert read_policy(stored, "stored") == policy
        assert Proposal.of(read_policy(stored, "stored")).document == stored


async def test_an_edit_of_a_version_from_another_gateway_succeeds() -> None:
    records = MemoryRecords()
    first_store, second_store = await make_policy_store(records), await make_policy_store(records)
    newer = await second_store.apply(proposal("b"), AUTHOR_BOB, onto=second_store.version)
    assert await first_store.require_version({newer.etag}) == newer
    await first_store.apply(proposal("c"), AUTHOR_ANN, onto=newer)
    outdated = await second_store.require_version({newer.etag})
    with pytest.raises(VersionConflict):
        await second_store.apply(proposal("d"), AUTHOR_BOB, onto=outdated)
    with pytest.raises(VersionConflict):
        await second_store.require_version({newer.etag, "another"})


async def test_c15_a_start_skips_a_version_with_an_unknown_field() -> None:
    records = MemoryRecords()
    store = await make_policy_store(records)
    await store.apply(proposal("b"), AUTHOR_ANN, onto=store.version)
    newer = {**single_pool_policy("c"), "field_of_a_newer_version": 1}
    unknown = PolicyVersion.following(2, newer, AUTHOR_BOB, "then")
    await records.add(POLICY_KIND, "3", unknown.model_dump_json())
    restarted = await make_policy_store(records)
    assert active(restarted) == (2, "b")
    assert [one.number for one in await restarted.versions()] == [1, 2, 3]
    store = await PolicyStore(records, (), (proposal("d"), BY_FILE), lambda: 0.0).open()
    assert active(store) == (4, "d")


class _UnconfirmedRecords(MemoryRecords):
    """Records that store a version and then fail to confirm it."""

    async def add(self, kind: str, name: str, text: str) -> bool:
        await super().add(kind, name, text)
        raise RecordsUnwritable


async def test_a_stored_version_without_confirmation_is_activated_on_refresh() -> None:
    records = MemoryRecords()
    store = await make_policy_store(records)
    store._records = unconfirmed = _UnconfirmedRecords()
    unconfirmed.texts = records.texts
    with pytest.raises(RecordsUnwritable):
        await store.apply(proposal("b"), AUTHOR_ANN, onto=store.version)
    assert active(store) == (1, "vlm")
    await store.refresh()
    assert active(store) == (2, "b")


INVALID_VERSION = PolicyVersion.following(1, {"version": 2}, AUTHOR_BOB, "then").model_dump_json()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("7", text) for text in ("{}", '{"number": 2}', "[]", "nothing")),
        *(("soon", "{}"), ("2", ""), ("2", INVALID_VERSION)),
    ],
)
async def test_c15_an_unreadable_version_is_skipped_and_logged_once(name, text, caplog) -> None:
    records = MemoryRecords()
    store = await make_policy_store(records)
    await records.add(POLICY_KIND, name, text)
    await store.refresh()
    assert active(store) == (1, "vlm")
    readable = text == INVALID_VERSION
    assert len(await store.versions()) == 1 + readable
    await store.apply_source(proposal("b"), BY_FILE)
    number = store.version.number
    assert active(store) == (int(name) + 1 if name.isdecimal() else 2, "b")
    await store.apply(proposal("c"), AUTHOR_ANN, onto=store.version)
    assert active(store) == active(await make_policy_store(records)) == (number + 1, "c")
    if name != "soon" and not readable:  # no other number is ever read again
        logged = f"record.skipped kind=policy name='{name}' "
        assert sum(message.startswith(logged) for message in caplog.messages) == 1


async def test_c15_an_edit_while_another_gateway_adds_an_unreadable_version_succeeds_next() -> None:
    records = MemoryRecords()
    store = await make_policy_store(records)
    await records.add(POLICY_KIND, "2", "{}")
    with pytest.raises(VersionConflict):
        await store.apply(proposal("b"), AUTHOR_ANN, onto=store.version)
    await store.apply(proposal("b"), AUTHOR_ANN, onto=store.version)
    assert store.version.number == 3


async def test_c15_a_start_with_unreadable_versions_alone_adds_its_own() -> None:
    records = MemoryRecords()
    await records.add(POLICY_KIND, "5", "{}")
    store = await make_policy_store(records)
    assert active(store) == (6, "vlm")


def test_a_policy_in_yaml_equals_the_same_policy_in_json() -> None:
    text = to_yaml(single_pool_policy("a"))
    from_document = Proposal.from_document(single_pool_policy("a"))
    assert Proposal.from_yaml(text) == from_document._replace(text=text)


POOLS = st.sampled_from("abcd")
INVALID = st.sampled_from(
    [
        None,
        [],
        {},
        {"version": 2},
        {**single_pool_policy("a"), "routes": [{"name": "all", "to": ["b"]}]},
        {**single_pool_policy("a"), "colour": 1},
    ]
)
PATCHES = st.sampled_from(
    [
        {},
        {"priorities": ["bulk"]},
        {"priorities": None},
        {"models": {"demo": {"aliases": ["default"]}}},
        {"models": {"demo": None}},
        {"pools": {"a": None}},
        {"version": 2},
    ]
)


class PolicyStoreMachine(RuleBasedStateMachine):
    """Two gateways that share their records, and any sequence of edits at both."""

    @initialize(pool=POOLS)
    def open(self, pool: str) -> None:
        self.runner = asyncio.Runner()
        self.records = MemoryRecords()
        self.stores = [self.runner.run(make_policy_store(self.records, pool)) for _ in range(2)]
        self.stored = [self.text(1)]
        self.latest_numbers = [1, 1]

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.runner.close()

    def text(self, number: int) -> str:
        return self.records.texts[POLICY_KIND][str(number)]

    def edit(self, at: int, document: Any, reason: Reason, onto: PolicyVersion) -> None:
        store, count = self.stores[at], len(self.stored)
        outdated = store.version.number < count or onto.number < count
        try:
            proposed = Proposal.from_document(document)
            attribution = AUTHOR_ANN._replace(reason=reason)
            edited = self.runner.run(store.apply(proposed, attribution, onto=onto))
        except PolicyInvalid:
            pass
        except VersionConflict:
            assert outdated
        else:
            assert not outdated
            assert (edited.number, edited.document) == (count + 1, proposed.document)
            self.stored.append(edited.model_dump_json())

    def base(self, at: int, age: int) -> PolicyVersion:
        number = max(1, self.stores[at].version.number - age)
        return PolicyVersion.model_validate_json(self.stored[number - 1])

    @rule(at=st.sampled_from((0, 1)), pool=POOLS, age=st.sampled_from((0, 0, 1)))
    def put(self, at: int, pool: str, age: int) -> None:
        self.edit(at, single_pool_policy(pool), Reason.EDIT, self.base(at, age))

    @rule(at=st.sampled_from((0, 1)), document=INVALID)
    def put_invalid(self, at: int, document: Any) -> None:
        self.edit(at, document, Reason.EDIT, self.base(at, 0))

    @rule(at=st.sampled_from((0, 1)), patch=PATCHES, age=st.sampled_from((0, 0, 1)))
    def patch(self, at: int, patch: Any, age: int) -> None:
        base = self.base(at, age)
        self.edit(at, merge_patch(base.document, patch), Reason.EDIT, base)

    @rule(at=st.sampled_from((0, 1)), back=st.integers(0, 5))
    def roll_back(self, at: int, back: int) -> None:
        store, number = self.stores[at], len(self.stored) - back
        if number < 1:
            with pytest.raises(VersionUnknown):
                self.runner.run(store.read_version(number))
        else:
            earlier = self.runner.run(store.read_version(number))
            self.edit(at, earlier.document, Reason.ROLLBACK, self.base(at, 0))

    @rule(at=st.sampled_from((0, 1)), pool=POOLS)
    def edit_file(self, at: int, pool: str) -> None:
        before = self.runner.run(self.stores[at].versions())
        changed = is_new(before, proposal(pool), Reason.FILE)
        self.runner.run(self.stores[at].apply_source(proposal(pool), BY_FILE))
        if changed:
            self.stored.append(self.text(len(self.stored) + 1))
            assert self.stores[at].current == proposal(pool).policy

    @precondition(lambda self: len({store.version.number for store in self.stores}) == 1)
    @rule(at=st.sampled_from(((0, 0), (0, 1))), pools=st.tuples(POOLS, POOLS))
    def concurrent_edits(self, at: tuple[int, int], pools: tuple[str, str]) -> None:
        """Of several edits of one version at the same time, exactly one is applied."""

        async def edit_all() -> list[Any]:
            stores = [self.stores[gateway] for gateway in at]
            edits = [
                store.apply(proposal(pool), AUTHOR_ANN, onto=store.version)
                for store, pool in zip(stores, pools, strict=True)
            ]
            return await asyncio.gather(*edits, return_exceptions=True)

        current = self.stores[0].version.number == len(self.stored)
        results = self.runner.run(edit_all())
        applied = [result for result in results if isinstance(result, PolicyVersion)]
        assert len(applied) == current
        assert all(isinstance(result, PolicyVersion | VersionConflict) for result in results)
        self.stored += [gateway.model_dump_json() for gateway in applied]

    @rule(at=st.sampled_from((0, 1)))
    def refresh(self, at: int) -> None:
        self.runner.run(self.stores[at].refresh())
        assert self.stores[at].version.number == len(self.stored)

    @invariant()
    def no_version_is_lost_or_changed(self) -> None:
        if hasattr(self, "stored"):
            numbered = [(str(number), text) for number, text in enumerate(self.stored, 1)]
            assert list(self.records.texts[POLICY_KIND].items()) == numbered

    @invariant()
    def the_active_version_is_valid_and_stored_and_never_older_than_before(self) -> None:
        for at, store in enumerate(getattr(self, "stores", [])):
            stored = self.stored[store.version.number - 1]
            assert store.version == PolicyVersion.model_validate_json(stored)
            assert store.current == read_policy(store.version.document, "in force")
            assert store.version.number >= self.latest_numbers[at]
            self.latest_numbers[at] = store.version.number


TestPolicyStore = PolicyStoreMachine.TestCase
TestPolicyStore.settings = settings(max_examples=25)
