"""The list of the last errors: its bound, and which error it drops."""

from collections.abc import Iterable

from gateway.state.recent_errors import MAX_ERRORS, ErrorRecord, RecentErrors


def error(number: int, code: str = "invalid_value", key: str = "") -> ErrorRecord:
    fields = {"model": f"m{number}", "worker_id": "", "reason": "It fails.", "status": 400}
    names = {"request_id": f"req-{number}", "key": key, "code": code}
    return ErrorRecord.model_validate({"unix_s": 1_000_000 + number, **names, **fields})


def test_the_list_is_bounded_and_has_the_newest_error_first() -> None:
    errors = RecentErrors()
    for number in range(MAX_ERRORS + 10):
        errors.add(error(number))
    newest = [f"req-{number}" for number in range(MAX_ERRORS + 9, 9, -1)]
    assert ids(errors.newest_first()) == newest


def test_only_own_errors_are_pending_each_once() -> None:
    errors = RecentErrors()
    errors.merge(error(0))
    for number in range(MAX_ERRORS + 5):
        errors.add(error(number))
    assert ids(errors.take_pending()) == [f"req-{number}" for number in range(5, MAX_ERRORS + 5)]
    assert errors.take_pending() == []


def ids(errors: Iterable[ErrorRecord]) -> list[str]:
    return [one.request_id for one in errors]


def test_a_repeated_error_displaces_no_error_of_another_code_or_key() -> None:
    errors = RecentErrors()
    errors.add(error(0, "worker_lost", "key-1"))
    errors.add(error(1, key="key-2"))
    for number in range(2, 3 * MAX_ERRORS):
        errors.add(error(number, key="key-1"))
    assert ids(errors.newest_first())[-2:] == ["req-1", "req-0"]


def test_a_late_error_of_another_gateway_is_listed_by_its_time() -> None:
    errors = RecentErrors()
    errors.add(error(5))
    errors.merge(error(3))
    assert ids(errors.newest_first()) == ["req-5", "req-3"]
    for number in range(10, 9 + MAX_ERRORS):
        errors.add(error(number))
    assert errors.newest_first()[-1].request_id == "req-5", "the oldest one is dropped"


def test_errors_that_end_alike_are_one_with_their_count_and_the_newest_request() -> None:
    errors = RecentErrors()
    for number, address in ((2, "a"), (9, "a"), (4, "a"), (5, "b")):
        errors.add(error(number).model_copy(update={"model": "demo", "address": address}))
    pending = errors.take_pending()
    assert [(one.request_id, one.count) for one in errors.newest_first()] == [
        ("req-9", 3),
        ("req-5", 1),
    ]
    for one in pending:
        errors.merge(one)
    assert [one.count for one in errors.newest_first()] == [6, 2], "counts of gateways add up"
