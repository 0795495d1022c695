"""The fair queue: equal shares for clients, weights for priorities, no starvation."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.fair_queue import WEIGHTS, FairQueue
from paceline.request.profile import Priority

INTERACTIVE, DEFAULT, BULK = Priority


def queue_of(*tickets: tuple[str, Priority]) -> FairQueue[str]:
    queue: FairQueue[str] = FairQueue()
    for number, (client, priority) in enumerate(tickets):
        queue.enqueue(f"{client}-{number}", priority, client)
    return queue


def dequeue_clients(queue: FairQueue[str], count: int) -> list[str]:
    """Dequeue the next tickets; return their clients in order."""
    order = []
    for _ in range(count):
        ticket = next(iter(queue))
        queue.dequeue(ticket)
        order.append(ticket.partition("-")[0])
    return order


def test_a_ticket_has_the_place_in_which_it_is_served() -> None:
    queue = queue_of(*[("a", DEFAULT)] * 3, ("b", DEFAULT), ("c", INTERACTIVE))
    assert list(queue) == ["c-4", "a-0", "b-3", "a-1", "a-2"]
    for ticket in queue:
        assert [queue.place(one) for one in queue] == list(range(1, len(queue) + 1))
        queue.dequeue(ticket)


def test_c7_a_request_waits_for_one_request_of_a_client_that_keeps_the_queue_full() -> None:
    queue = queue_of(*[("greedy", DEFAULT)] * 50)
    for number in range(10):
        dequeue_clients(queue, 1)  # with a single slot, this request runs
        queue.enqueue(f"greedy-{50 + number}", DEFAULT, "greedy")
        queue.enqueue(f"modest-{number}", DEFAULT, "modest")
        assert dequeue_clients(queue, 1) == ["modest"]


def test_a_new_client_gets_an_equal_share_and_no_precedence() -> None:
    queue = queue_of(*[("old", DEFAULT)] * 20)
    dequeue_clients(queue, 10)
    for number in range(10):
        queue.enqueue(f"new-{number}", DEFAULT, "new")
    assert Counter(dequeue_clients(queue, 10)) == {"old": 5, "new": 5}


def test_interactive_is_served_first_and_bulk_gets_its_share() -> None:
    queue = queue_of(("b", BULK), ("d", DEFAULT), ("i", INTERACTIVE))
    assert dequeue_clients(queue, 3) == ["i", "d", "b"]
    queue = queue_of(*[(p.value, p) for p in Priority] * 100)
    shares = Counter(dequeue_clients(queue, 42))
    assert shares == {"interactive": 32, "default": 8, "bulk": 2}


def test_removing_a_ticket_removes_no_other_ticket_and_gains_no_position() -> None:
    queue = queue_of(*[("a", DEFAULT)] * 3, ("b", DEFAULT))
    before = list(queue).index("b-3")
    queue.remove("b-3")
    queue.enqueue("b-4", DEFAULT, "b")
    assert list(queue).index("b-4") >= before
    for ticket in ("a-0", "a-1", "a-1", "unknown"):
        queue.remove(ticket)
    assert len(queue) == 2
    assert set(queue) == {"a-2", "b-4"}


def test_a_client_whose_requests_have_all_left_starts_again_like_a_new_client() -> None:
    queue = queue_of(("a", DEFAULT), ("a", DEFAULT), ("b", DEFAULT))
    for ticket in ("a-0", "a-1"):
        queue.remove(ticket)
    queue.enqueue("a-3", DEFAULT, "a")
    queue.enqueue("b-4", DEFAULT, "b")
    assert list(queue) == ["b-2", "a-3", "b-4"]


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["enter", "serve", "leave"]),
        st.sampled_from("abc"),
        st.sampled_from(Priority),
    ),
    max_size=60,
)


@given(MOVES, st.randoms())
def test_no_ticket_is_lost_duplicated_or_reordered_within_its_flow(moves, rng) -> None:
    queue: FairQueue[tuple[int, str, Priority]] = FairQueue()
    queued: list[tuple[int, str, Priority]] = []
    for number, (move, client, priority) in enumerate(moves):
        if move == "enter":
            queued.append((number, client, priority))
            queue.enqueue(queued[-1], priority, client)
        elif queued and move == "serve":
            ticket = next(iter(queue))
            queued.remove(ticket)
            queue.dequeue(ticket)
        elif queued:
            queue.remove(queued.pop(rng.randrange(len(queued))))
        assert sorted(queue) == sorted(queued)
    for flow in {(client, priority) for _, client, priority in queued}:
        flow_tickets = [ticket for ticket in queue if ticket[1:] == flow]
        assert flow_tickets == sorted(flow_tickets), "tickets of one flow stay in order of arrival"


@given(st.integers(1, 8), st.sampled_from(Priority))
def test_a_ticket_waits_for_at_most_its_weighted_share(clients: int, priority: Priority) -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(200):
        for client in range(clients):
            queue.enqueue(f"{client}-{number}", INTERACTIVE, str(client))
    queue.enqueue("late-0", priority, "late")
    before = clients * WEIGHTS[INTERACTIVE] // WEIGHTS[priority]
    assert "late" in dequeue_clients(queue, before + clients + 1)
