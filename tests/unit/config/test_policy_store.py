"""The book of the policy: nothing bad is ever in force, and nothing that was is ever lost.

Two gateways with one book of the policy: whatever admins do at both, no version is lost.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.config.policy_store import POLICY_KIND, PolicyStore, open_policy_store
from gateway.config.policy_versions import (
    Attribution,
    PolicyVersion,
    Proposal,
    Reason,
    is_new,
    propose,
    propose_yaml,
)
from gateway.config.static_workers import StaticWorker
from gateway.errors import RecordsUnwritable, VersionConflict, VersionUnknown
from gateway.storage.records import FileRecords
from policies.diff import merge_patch
from policies.document import PolicyInvalid, default_policy, parse_policy, read_policy
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
SHIPPED = AUTHOR_ANN._replace(reason=Reason.START)
EXAMPLES = Path(__file__).parents[3] / "policies" / "examples"


def version(number: int, reason: Reason, pool: str) -> PolicyVersion:
    attribution = AUTHOR_ANN._replace(reason=reason)
    made = PolicyVersion.following(0, single_pool_policy(pool), attribution, "2026-11-22T01:20:00Z")
    return made.model_copy(update={"number": number})


@pytest.mark.parametrize(
    ("before", "reason", "pool", "news"),
    [
        ([], Reason.START, "a", True),
        ([], Reason.FILE, "a", True),
        # A file: news where it says something else than when it was last read.
        ([(Reason.FILE, "a")], Reason.FILE, "a", False),
        ([(Reason.FILE, "a")], Reason.FILE, "b", True),
        ([(Reason.FILE, "a"), (Reason.EDIT, "b")], Reason.FILE, "a", False),
        ([(Reason.FILE, "a"), (Reason.EDIT, "b")], Reason.FILE, "b", True),
        ([(Reason.FILE, "a"), (Reason.EDIT, "b")], Reason.FILE, "c", True),
        ([(Reason.FILE, "a"), (Reason.FILE, "b")], Reason.FILE, "a", True),
        ([(Reason.FILE, "a"), (Reason.ROLLBACK, "a")], Reason.FILE, "a", False),
        ([(Reason.START, "a")], Reason.FILE, "a", True),
        # What is shipped: news while nobody has changed anything, as after an upgrade.
        ([(Reason.START, "a")], Reason.START, "a", False),
        ([(Reason.START, "a")], Reason.START, "b", True),
        ([(Reason.START, "a"), (Reason.EDIT, "b")], Reason.START, "c", False),
        ([(Reason.START, "a"), (Reason.FILE, "b")], Reason.START, "a", False),
    ],
)
def test_what_is_read_at_the_start_counts_where_it_is_news(
    before: list[tuple[Reason, str]], reason: Reason, pool: str, news: bool
) -> None:
    versions = [version(number, *made) for number, made in enumerate(before, start=1)]
    assert is_new(versions, single_pool_policy(pool), reason) == news


async def test_what_was_kept_comes_back_whole(tmp_path: Path) -> None:
    records = FileRecords(tmp_path / "state.json")
    book = await make_policy_store(records)
    signature = Attribution("Zoë", "50% mehr für „alle“", Reason.EDIT)
    made = await book.apply(proposal("b"), signature, onto=book.version)

    again = await make_policy_store(FileRecords(tmp_path / "state.json"))
    assert again.version == made == book.version
    assert again.current == proposal("b").policy
    assert [one.reason for one in await again.versions()] == [Reason.START, Reason.EDIT]


async def test_every_policy_is_the_same_after_it_was_kept() -> None:
    examples = [parse_policy(file.read_text(), file.stem) for file in EXAMPLES.glob("*.yaml")]
    assert len(examples) == 5
    for policy in (default_policy(), proposal().policy, *examples):
        kept = json.loads(json.dumps(Proposal.of(policy).document))
        assert read_policy(kept, "kept") == policy
        assert Proposal.of(read_policy(kept, "kept")).document == kept


async def test_a_version_is_named_by_its_tag_though_two_say_the_same() -> None:
    book = await make_policy_store()
    tags = {book.version.etag}
    for _ in range(3):
        await book.apply(proposal(), AUTHOR_ANN, onto=book.version)
        tags.add(book.version.etag)
    assert len(tags) == 4


async def test_of_two_who_edit_the_same_version_the_second_is_told() -> None:
    book = await make_policy_store()
    first = book.version
    await book.apply(proposal("b"), AUTHOR_ANN, onto=first)
    with pytest.raises(VersionConflict, match="version 2, by ann"):
        await book.apply(proposal("c"), AUTHOR_BOB, onto=first)
    assert book.current == proposal("b").policy


async def test_of_two_who_edit_at_two_gateways_the_second_is_told_and_follows() -> None:
    records = MemoryRecords()
    here, there = await make_policy_store(records), await make_policy_store(records)
    await there.apply(proposal("b"), AUTHOR_BOB, onto=there.version)
    with pytest.raises(VersionConflict, match="by bob"):
        await here.apply(proposal("c"), AUTHOR_ANN, onto=here.version)
    assert here.version == there.version
    assert here.current == proposal("b").policy


async def test_an_edit_of_what_another_gateway_has_already_is_no_lost_race() -> None:
    records = MemoryRecords()
    here, there = await make_policy_store(records), await make_policy_store(records)
    ahead = await there.apply(proposal("b"), AUTHOR_BOB, onto=there.version)
    assert await here.require_version({ahead.etag}) == ahead
    await here.apply(proposal("c"), AUTHOR_ANN, onto=ahead)
    with pytest.raises(VersionConflict):
        await there.apply(proposal("d"), AUTHOR_BOB, onto=await there.require_version({ahead.etag}))
    with pytest.raises(VersionConflict):
        await there.require_version({ahead.etag, "another"})


async def test_a_policy_that_listed_workers_do_not_fit_is_never_in_force() -> None:
    worker = StaticWorker(
        id="studio", kind="openai", url="http://mac:1", models=("m",), pools=("a",), slots=1
    )
    source = (proposal("a"), SHIPPED)
    book = await open_policy_store(MemoryRecords(), (worker,), source, lambda: 0.0)
    with pytest.raises(PolicyInvalid, match="'studio' is configured for the pool 'a'"):
        await book.apply(proposal("b"), AUTHOR_ANN, onto=book.version)
    assert book.current == proposal("a").policy
    assert len(await book.versions()) == 1
    with pytest.raises(PolicyInvalid, match="'studio' is configured for the pool 'a'"):
        await open_policy_store(
            MemoryRecords(),
            (worker,),
            (proposal("b"), SHIPPED),
            lambda: 0.0,
        )


async def test_a_kept_version_that_is_no_longer_good_stops_the_start_until_a_file_replaces_it() -> (
    None
):
    records = MemoryRecords()
    bad = PolicyVersion.following(0, {"version": 1, "pools": {}}, BY_FILE, "then")
    await records.add(POLICY_KIND, "1", bad.model_dump_json())
    with pytest.raises(PolicyInvalid):
        await make_policy_store(records)
    book = await open_policy_store(records, (), (proposal("b"), BY_FILE), lambda: 0.0)
    assert (book.version.number, book.current) == (2, proposal("b").policy)


async def test_a_version_of_another_gateway_that_is_not_good_here_is_not_followed() -> None:
    records = MemoryRecords()
    book = await make_policy_store(records)
    bad = PolicyVersion.following(book.version.number, {"version": 2}, AUTHOR_BOB, "then")
    await records.add(POLICY_KIND, str(bad.number), bad.model_dump_json())
    await book.refresh()
    assert book.current == proposal().policy
    await book.apply_source(proposal("b"), BY_FILE)
    assert (book.version.number, book.current) == (3, proposal("b").policy)


class _DeafRecords(MemoryRecords):
    """Keeps what it is told, and its answer is lost."""

    async def add(self, kind: str, name: str, text: str) -> bool:
        await super().add(kind, name, text)
        raise RecordsUnwritable


async def test_a_version_that_was_kept_though_nobody_heard_of_it_is_followed() -> None:
    records = MemoryRecords()
    book = await make_policy_store(records)
    book._records = deaf = _DeafRecords()
    deaf.shelves = records.shelves
    with pytest.raises(RecordsUnwritable):
        await book.apply(proposal("b"), AUTHOR_ANN, onto=book.version)
    assert book.current == proposal().policy
    await book.refresh()
    assert book.current == proposal("b").policy


async def test_what_is_in_force_survives_that_its_records_are_taken_away(tmp_path: Path) -> None:
    records = FileRecords(tmp_path / "state.json")
    book = await make_policy_store(records)
    await book.apply(proposal("b"), AUTHOR_ANN, onto=book.version)
    (tmp_path / "state.json").unlink()
    await book.refresh()
    assert (book.version.number, book.current) == (2, proposal("b").policy)
    await book.apply_source(proposal("c"), BY_FILE)
    assert (book.version.number, book.current) == (3, proposal("c").policy)


@pytest.mark.parametrize("damage", ["{}", '{"number": 2}', "[]"])
async def test_a_damaged_book_is_said_to_be_so_and_what_is_in_force_stays(damage: str) -> None:
    records = MemoryRecords()
    book = await make_policy_store(records)
    await records.add(POLICY_KIND, "7", damage)
    with pytest.raises(RecordsUnwritable):
        await book.versions()
    with pytest.raises(RecordsUnwritable):
        await book.apply_source(proposal("b"), BY_FILE)
    with pytest.raises(RecordsUnwritable):
        await book.require_version({"an etag of another gateway"})
    assert book.current == proposal().policy
    with pytest.raises(ValueError, match="PolicyVersion"):
        await make_policy_store(records)


def test_a_policy_in_yaml_says_the_same_as_in_json() -> None:
    assert propose_yaml(to_yaml(single_pool_policy("a"))) == propose(single_pool_policy("a"))


def test_a_book_is_changed_in_no_other_way() -> None:
    changing = {name for name in vars(PolicyStore) if not name.startswith("_")}
    assert changing == {
        "apply",
        "apply_source",
        "check",
        "read_version",
        "refresh",
        "require_version",
        "versions",
    }


POOLS = st.sampled_from("abcd")
BAD = st.sampled_from(
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


class BookMachine(RuleBasedStateMachine):
    """Two gateways share their records, and admins do whatever they like at both."""

    @initialize(pool=POOLS)
    def open(self, pool: str) -> None:
        self.runner = asyncio.Runner()
        self.records = MemoryRecords()
        self.books = [self.runner.run(make_policy_store(self.records, pool)) for _ in range(2)]
        self.kept = [self.text(1)]
        self.seen = [1, 1]

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.runner.close()

    def text(self, number: int) -> str:
        return self.records.shelves[POLICY_KIND][str(number)]

    def edit(self, at: int, offered: Any, reason: Reason, onto: PolicyVersion) -> None:
        """Do what an admin asks at one gateway, and say what must have become of it."""
        book, count = self.books[at], len(self.kept)
        behind = book.version.number < count or onto.number < count
        try:
            good = propose(offered)
            attribution = AUTHOR_ANN._replace(reason=reason)
            made = self.runner.run(book.apply(good, attribution, onto=onto))
        except PolicyInvalid:
            pass
        except VersionConflict:
            assert behind
        else:
            assert not behind
            assert (made.number, made.document) == (count + 1, good.document)
            self.kept.append(made.model_dump_json())

    def base(self, at: int, age: int) -> PolicyVersion:
        number = max(1, self.books[at].version.number - age)
        return PolicyVersion.model_validate_json(self.kept[number - 1])

    @rule(at=st.sampled_from((0, 1)), pool=POOLS, age=st.sampled_from((0, 0, 1)))
    def put(self, at: int, pool: str, age: int) -> None:
        self.edit(at, single_pool_policy(pool), Reason.EDIT, self.base(at, age))

    @rule(at=st.sampled_from((0, 1)), offered=BAD)
    def put_a_bad_one(self, at: int, offered: Any) -> None:
        self.edit(at, offered, Reason.EDIT, self.base(at, 0))

    @rule(at=st.sampled_from((0, 1)), patch=PATCHES, age=st.sampled_from((0, 0, 1)))
    def patch(self, at: int, patch: Any, age: int) -> None:
        base = self.base(at, age)
        self.edit(at, merge_patch(base.document, patch), Reason.EDIT, base)

    @rule(at=st.sampled_from((0, 1)), back=st.integers(0, 5))
    def roll_back(self, at: int, back: int) -> None:
        book, number = self.books[at], len(self.kept) - back
        if number < 1:
            with pytest.raises(VersionUnknown):
                self.runner.run(book.read_version(number))
        else:
            earlier = self.runner.run(book.read_version(number))
            self.edit(at, earlier.document, Reason.ROLLBACK, self.base(at, 0))

    @rule(at=st.sampled_from((0, 1)), pool=POOLS)
    def edit_the_file(self, at: int, pool: str) -> None:
        before = self.runner.run(self.books[at].versions())
        news = is_new(before, single_pool_policy(pool), Reason.FILE)
        self.runner.run(self.books[at].apply_source(proposal(pool), BY_FILE))
        if news:
            self.kept.append(self.text(len(self.kept) + 1))
            assert self.books[at].current == proposal(pool).policy

    @precondition(lambda self: len({book.version.number for book in self.books}) == 1)
    @rule(at=st.sampled_from(((0, 0), (0, 1))), pools=st.tuples(POOLS, POOLS))
    def race(self, at: tuple[int, int], pools: tuple[str, str]) -> None:
        """Of several edits of one version at the same moment just one is applied."""

        async def both() -> list[Any]:
            return await asyncio.gather(
                *(
                    self.books[one].apply(proposal(pool), AUTHOR_ANN, onto=self.books[one].version)
                    for one, pool in zip(at, pools, strict=True)
                ),
                return_exceptions=True,
            )

        current = self.books[0].version.number == len(self.kept)
        ends = self.runner.run(both())
        won = [end for end in ends if isinstance(end, PolicyVersion)]
        assert len(won) == current
        assert all(isinstance(end, PolicyVersion | VersionConflict) for end in ends)
        self.kept += [one.model_dump_json() for one in won]

    @rule(at=st.sampled_from((0, 1)))
    def catch_up(self, at: int) -> None:
        self.runner.run(self.books[at].refresh())
        assert self.books[at].version.number == len(self.kept)

    @invariant()
    def the_book_never_loses_or_changes_a_version(self) -> None:
        if hasattr(self, "kept"):
            numbers = map(str, range(1, len(self.kept) + 1))
            assert list(self.records.shelves[POLICY_KIND].items()) == list(
                zip(numbers, self.kept, strict=True)
            )

    @invariant()
    def what_is_in_force_is_good_is_kept_and_never_goes_back(self) -> None:
        for at, book in enumerate(getattr(self, "books", [])):
            assert book.version == PolicyVersion.model_validate_json(
                self.kept[book.version.number - 1]
            )
            assert book.current == read_policy(book.version.document, "in force")
            assert book.version.number >= self.seen[at]
            self.seen[at] = book.version.number


TestBook = BookMachine.TestCase
