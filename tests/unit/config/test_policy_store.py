"""The book of the policy: nothing bad is ever in force, and nothing that was is ever lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.config.policy_store import KIND, PolicyBook, Source, open_book
from gateway.config.policy_versions import (
    Proposal,
    Reason,
    Signature,
    Version,
    brings_news,
    propose,
    propose_yaml,
)
from gateway.config.static_workers import ListedWorker
from gateway.errors import EditOvertaken, RecordsUnwritable
from gateway.storage.records import FileRecords
from policies.document import PolicyInvalid, parse_policy, read_policy, shipped_policy
from tests.support.memory_records import MemoryRecords
from tests.support.policies import BY_ANN, BY_BOB, as_yaml, book_of, document, proposal

EXAMPLES = Path(__file__).parents[3] / "policies" / "examples"


def version(number: int, reason: Reason, pool: str) -> Version:
    made = Version.after(None, document(pool), reason, BY_ANN, "2026-11-22T01:20:00Z")
    return Version(**{**_fields(made), "number": number})


def _fields(made: Version) -> dict[str, Any]:
    return {**made.told(), "document": made.document}


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
    assert brings_news(versions, document(pool), reason) == news


async def test_what_was_kept_comes_back_whole(tmp_path: Path) -> None:
    records = FileRecords(tmp_path / "state.json")
    book = await book_of(records)
    signature = Signature("Zoë", "50% mehr für „alle“")
    made = await book.apply(proposal("b"), Reason.EDIT, signature, onto=book.version)

    again = await book_of(FileRecords(tmp_path / "state.json"))
    assert again.version == made == book.version
    assert again.current == proposal("b").policy
    assert [one.reason for one in await again.versions()] == [Reason.START, Reason.EDIT]


async def test_every_policy_is_the_same_after_it_was_kept() -> None:
    examples = [parse_policy(file.read_text(), file.stem) for file in EXAMPLES.glob("*.yaml")]
    assert len(examples) == 5
    for policy in (shipped_policy(), proposal().policy, *examples):
        kept = json.loads(json.dumps(Proposal.of(policy).document))
        assert read_policy(kept, "kept") == policy
        assert Proposal.of(read_policy(kept, "kept")).document == kept


async def test_a_version_is_named_by_its_tag_though_two_say_the_same() -> None:
    book = await book_of()
    tags = {book.version.etag}
    for _ in range(3):
        await book.apply(proposal(), Reason.EDIT, BY_ANN, onto=book.version)
        tags.add(book.version.etag)
    assert len(tags) == 4


async def test_of_two_who_edit_the_same_version_the_second_is_told() -> None:
    book = await book_of()
    first = book.version
    await book.apply(proposal("b"), Reason.EDIT, BY_ANN, onto=first)
    with pytest.raises(EditOvertaken, match="version 2 of the policy, by ann"):
        await book.apply(proposal("c"), Reason.EDIT, BY_BOB, onto=first)
    assert book.current == proposal("b").policy


async def test_of_two_who_edit_at_two_gateways_the_second_is_told_and_follows() -> None:
    records = MemoryRecords()
    here, there = await book_of(records), await book_of(records)
    await there.apply(proposal("b"), Reason.EDIT, BY_BOB, onto=there.version)
    with pytest.raises(EditOvertaken, match="by bob"):
        await here.apply(proposal("c"), Reason.EDIT, BY_ANN, onto=here.version)
    assert here.version == there.version
    assert here.current == proposal("b").policy


async def test_an_edit_of_what_another_gateway_has_already_is_no_lost_race() -> None:
    records = MemoryRecords()
    here, there = await book_of(records), await book_of(records)
    ahead = await there.apply(proposal("b"), Reason.EDIT, BY_BOB, onto=there.version)
    assert await here.expect({ahead.etag}) == ahead
    await here.apply(proposal("c"), Reason.EDIT, BY_ANN, onto=ahead)
    with pytest.raises(EditOvertaken):
        await there.apply(proposal("d"), Reason.EDIT, BY_BOB, onto=await there.expect({ahead.etag}))
    with pytest.raises(EditOvertaken):
        await there.expect({ahead.etag, "another"})


async def test_a_policy_that_listed_workers_do_not_fit_is_never_in_force() -> None:
    worker = ListedWorker(
        id="studio", kind="openai", url="http://mac:1", models=("m",), pools=("a",), slots=1
    )
    source = Source(proposal("a"), Reason.START, BY_ANN)
    book = await open_book(MemoryRecords(), (worker,), source, lambda: 0.0)
    with pytest.raises(PolicyInvalid, match="'studio' is listed for the pool 'a'"):
        await book.apply(proposal("b"), Reason.EDIT, BY_ANN, onto=book.version)
    assert book.current == proposal("a").policy
    assert len(await book.versions()) == 1
    with pytest.raises(PolicyInvalid, match="'studio' is listed for the pool 'a'"):
        await open_book(
            MemoryRecords(),
            (worker,),
            Source(proposal("b"), Reason.START, BY_ANN),
            lambda: 0.0,
        )


async def test_a_kept_version_that_is_no_longer_good_stops_the_start_until_a_file_replaces_it() -> (
    None
):
    records = MemoryRecords()
    bad = Version.after(None, {"version": 1, "pools": {}}, Reason.FILE, BY_ANN, "then")
    await records.add(KIND, "1", bad.written())
    with pytest.raises(PolicyInvalid):
        await book_of(records)
    book = await open_book(records, (), Source(proposal("b"), Reason.FILE, BY_ANN), lambda: 0.0)
    assert (book.version.number, book.current) == (2, proposal("b").policy)


async def test_a_version_of_another_gateway_that_is_not_good_here_is_not_followed() -> None:
    records = MemoryRecords()
    book = await book_of(records)
    bad = Version.after(book.version, {"version": 2}, Reason.EDIT, BY_BOB, "then")
    await records.add(KIND, str(bad.number), bad.written())
    await book.catch_up()
    assert book.current == proposal().policy
    await book.take(proposal("b"), Reason.FILE, BY_ANN)
    assert (book.version.number, book.current) == (3, proposal("b").policy)


class _DeafRecords(MemoryRecords):
    """Keeps what it is told, and its answer is lost."""

    async def add(self, kind: str, name: str, text: str) -> bool:
        await super().add(kind, name, text)
        raise RecordsUnwritable


async def test_a_version_that_was_kept_though_nobody_heard_of_it_is_followed() -> None:
    records = MemoryRecords()
    book = await book_of(records)
    book._records = deaf = _DeafRecords()
    deaf.shelves = records.shelves
    with pytest.raises(RecordsUnwritable):
        await book.apply(proposal("b"), Reason.EDIT, BY_ANN, onto=book.version)
    assert book.current == proposal().policy
    await book.catch_up()
    assert book.current == proposal("b").policy


async def test_what_is_in_force_survives_that_its_records_are_taken_away(tmp_path: Path) -> None:
    records = FileRecords(tmp_path / "state.json")
    book = await book_of(records)
    await book.apply(proposal("b"), Reason.EDIT, BY_ANN, onto=book.version)
    (tmp_path / "state.json").unlink()
    await book.catch_up()
    assert (book.version.number, book.current) == (2, proposal("b").policy)
    await book.take(proposal("c"), Reason.FILE, BY_ANN)
    assert (book.version.number, book.current) == (3, proposal("c").policy)


@pytest.mark.parametrize("damage", ["{}", '{"number": 2}', "[]"])
async def test_a_damaged_book_is_said_to_be_so_and_what_is_in_force_stays(damage: str) -> None:
    records = MemoryRecords()
    book = await book_of(records)
    await records.add(KIND, "7", damage)
    with pytest.raises(RecordsUnwritable):
        await book.versions()
    with pytest.raises(RecordsUnwritable):
        await book.take(proposal("b"), Reason.FILE, BY_ANN)
    with pytest.raises(RecordsUnwritable):
        await book.expect({"an etag of another gateway"})
    assert book.current == proposal().policy
    with pytest.raises(ValueError, match="version"):
        await book_of(records)


def test_a_policy_in_yaml_says_the_same_as_in_json() -> None:
    assert propose_yaml(as_yaml(document("a"))) == propose(document("a"))


def test_a_book_is_changed_in_no_other_way() -> None:
    changing = {name for name in vars(PolicyBook) if not name.startswith("_")}
    assert changing == {"apply", "catch_up", "check", "expect", "find", "take", "versions"}
