"""Two gateways with one book of the policy: whatever admins do at both, no version is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.config.policy_store import KIND
from gateway.config.policy_versions import Reason, Version, brings_news, propose
from gateway.errors import EditOvertaken, VersionUnknown
from policies.diff import merge_patch
from policies.document import PolicyInvalid, read_policy
from tests.support.memory_records import MemoryRecords
from tests.support.policies import BY_ANN, BY_BOB, book_of, document, proposal

POOLS = st.sampled_from("abcd")
BAD = st.sampled_from(
    [
        None,
        [],
        {},
        {"version": 2},
        {**document("a"), "routes": [{"name": "all", "to": ["b"]}]},
        {**document("a"), "colour": 1},
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
        self.books = [self.runner.run(book_of(self.records, pool)) for _ in range(2)]
        self.kept = [self.text(1)]
        self.seen = [1, 1]

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.runner.close()

    def text(self, number: int) -> str:
        return self.records.shelves[KIND][str(number)]

    def edit(self, at: int, offered: Any, reason: Reason, onto: Version) -> None:
        """Do what an admin asks at one gateway, and say what must have become of it."""
        book, count = self.books[at], len(self.kept)
        behind = book.version.number < count or onto.number < count
        try:
            good = propose(offered)
            made = self.runner.run(book.apply(good, reason, BY_ANN, onto=onto))
        except PolicyInvalid:
            pass
        except EditOvertaken:
            assert behind
        else:
            assert not behind
            assert (made.number, made.document) == (count + 1, good.document)
            self.kept.append(made.written())

    def base(self, at: int, age: int) -> Version:
        number = max(1, self.books[at].version.number - age)
        return Version.read(self.kept[number - 1])

    @rule(at=st.sampled_from((0, 1)), pool=POOLS, age=st.sampled_from((0, 0, 1)))
    def put(self, at: int, pool: str, age: int) -> None:
        self.edit(at, document(pool), Reason.EDIT, self.base(at, age))

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
                self.runner.run(book.find(number))
        else:
            earlier = self.runner.run(book.find(number))
            self.edit(at, earlier.document, Reason.ROLLBACK, self.base(at, 0))

    @rule(at=st.sampled_from((0, 1)), pool=POOLS)
    def edit_the_file(self, at: int, pool: str) -> None:
        before = self.runner.run(self.books[at].versions())
        news = brings_news(before, document(pool), Reason.FILE)
        self.runner.run(self.books[at].take(proposal(pool), Reason.FILE, BY_BOB))
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
                    self.books[one].apply(
                        proposal(pool), Reason.EDIT, BY_ANN, onto=self.books[one].version
                    )
                    for one, pool in zip(at, pools, strict=True)
                ),
                return_exceptions=True,
            )

        current = self.books[0].version.number == len(self.kept)
        ends = self.runner.run(both())
        won = [end for end in ends if isinstance(end, Version)]
        assert len(won) == current
        assert all(isinstance(end, Version | EditOvertaken) for end in ends)
        self.kept += [one.written() for one in won]

    @rule(at=st.sampled_from((0, 1)))
    def catch_up(self, at: int) -> None:
        self.runner.run(self.books[at].catch_up())
        assert self.books[at].version.number == len(self.kept)

    @invariant()
    def the_book_never_loses_or_changes_a_version(self) -> None:
        if hasattr(self, "kept"):
            numbers = map(str, range(1, len(self.kept) + 1))
            assert list(self.records.shelves[KIND].items()) == list(
                zip(numbers, self.kept, strict=True)
            )

    @invariant()
    def what_is_in_force_is_good_is_kept_and_never_goes_back(self) -> None:
        for at, book in enumerate(getattr(self, "books", [])):
            assert book.version == Version.read(self.kept[book.version.number - 1])
            assert book.current == read_policy(book.version.document, "in force")
            assert book.version.number >= self.seen[at]
            self.seen[at] = book.version.number


TestBook = BookMachine.TestCase
