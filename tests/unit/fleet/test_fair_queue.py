"""Who is next: fair between clients, weighted between priorities, nobody starves."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.fair_queue import WEIGHTS, FairQueue
from policies.document import Priority

INTERACTIVE, DEFAULT, BULK = Priority


def line_of(*tickets: tuple[str, Priority]) -> FairQueue[str]:
    """A line in which tickets named "client-number" stand."""
    line: FairQueue[str] = FairQueue()
    for number, (client, priority) in enumerate(tickets):
        line.enqueue(f"{client}-{number}", priority, client)
    return line


def served(line: FairQueue[str], count: int) -> list[str]:
    """Serve so many; return their clients in order."""
    order = []
    for _ in range(count):
        ticket = next(iter(line))
        line.dequeue(ticket)
        order.append(ticket.partition("-")[0])
    return order


def test_one_client_is_served_in_the_order_of_arrival() -> None:
    line = line_of(*[("a", DEFAULT)] * 5)
    assert list(line) == [f"a-{number}" for number in range(5)]


def test_a_client_with_a_hundred_requests_delays_its_own() -> None:
    line = line_of(*[("greedy", DEFAULT)] * 100, ("modest", DEFAULT))
    assert "modest" in served(line, 2)


def test_a_newcomer_is_not_ahead_of_everything_that_waits() -> None:
    line = line_of(*[("old", DEFAULT)] * 20)
    served(line, 10)
    for number in range(10):
        line.enqueue(f"new-{number}", DEFAULT, "new")
    assert Counter(served(line, 10)) == {"old": 5, "new": 5}


def test_interactive_comes_first_and_bulk_comes_too() -> None:
    line = line_of(("b", BULK), ("d", DEFAULT), ("i", INTERACTIVE))
    assert served(line, 3) == ["i", "d", "b"]
    line = line_of(*[(p.value, p) for p in Priority] * 100)
    shares = Counter(served(line, 42))
    assert shares == {"interactive": 32, "default": 8, "bulk": 2}


def test_who_leaves_takes_its_place_along() -> None:
    line = line_of(*[("a", DEFAULT)] * 3, ("b", DEFAULT))
    for ticket in ("a-0", "a-1", "a-1", "nobody"):
        line.remove(ticket)
    assert len(line) == 2
    assert set(line) == {"a-2", "b-3"}


def test_leaving_and_coming_again_wins_nothing() -> None:
    line = line_of(*[("a", DEFAULT)] * 3, ("b", DEFAULT))
    before = list(line).index("b-3")
    line.remove("b-3")
    line.enqueue("b-4", DEFAULT, "b")
    assert list(line).index("b-4") >= before


MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("enter"), st.sampled_from("abc"), st.sampled_from(Priority)),
        st.tuples(st.just("serve"), st.just(""), st.just(DEFAULT)),
        st.tuples(st.just("leave"), st.just(""), st.just(DEFAULT)),
    ),
    max_size=60,
)


@given(MOVES, st.randoms())
def test_nobody_is_lost_doubled_or_starved(moves: list[tuple[str, str, Priority]], rng) -> None:
    line: FairQueue[tuple[int, str, Priority]] = FairQueue()
    inside: list[tuple[int, str, Priority]] = []
    for number, (move, client, priority) in enumerate(moves):
        if move == "enter":
            inside.append((number, client, priority))
            line.enqueue(inside[-1], priority, client)
        elif inside and move == "serve":
            ticket = next(iter(line))
            inside.remove(ticket)
            line.dequeue(ticket)
        elif inside:
            line.remove(inside.pop(rng.randrange(len(inside))))
        assert sorted(line) == sorted(inside)
    for flow in {(client, priority) for _, client, priority in inside}:
        own = [ticket for ticket in line if ticket[1:] == flow]
        assert own == sorted(own), "within a flow first come, first served"


@given(st.integers(1, 8), st.sampled_from(Priority))
def test_a_ticket_is_served_after_at_most_its_share_of_others(
    clients: int, priority: Priority
) -> None:
    line: FairQueue[str] = FairQueue()
    for number in range(200):
        for client in range(clients):
            line.enqueue(f"{client}-{number}", INTERACTIVE, str(client))
    line.enqueue("late-0", priority, "late")
    before = clients * WEIGHTS[INTERACTIVE] // WEIGHTS[priority]
    assert "late" in served(line, before + clients + 1)
