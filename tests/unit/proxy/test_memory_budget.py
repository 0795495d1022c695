"""The budget of memory: charged before, by client, given back."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.errors import Overloaded
from gateway.memory_budget import MEMORY_LIMIT_BYTES, MemoryBudget, MemoryHold

LIMIT = 1000
PICK = st.integers(0, 1000)


def held_by(memory: MemoryBudget) -> dict[str, int]:
    return {client: size for client, size in memory.by_client.items() if size}


class AnyOrder(RuleBasedStateMachine):
    """Clients that take and give back memory in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = MemoryBudget(LIMIT)
        self.holds: list[MemoryHold] = []
        self.forced = False

    @rule(client=st.sampled_from("abc"), parent=PICK)
    def begin(self, client: str, parent: int) -> None:
        if self.holds and parent % 2:
            self.holds.append(self.holds[parent % len(self.holds)].another())
        else:
            self.holds.append(self.memory.hold(client))

    @rule(pick=PICK, size=st.integers(1, LIMIT))
    def take(self, pick: int, size: int) -> None:
        if self.holds:
            hold = self.holds[pick % len(self.holds)]
            before = held_by(self.memory), hold.size_bytes
            of_client = before[0].get(hold.client, 0) + size
            rest = LIMIT - self.memory.held_bytes - size
            try:
                hold.add(size)
            except Overloaded:
                assert of_client > 4 * rest
                assert (held_by(self.memory), hold.size_bytes) == before
            else:
                assert of_client <= 4 * rest

    @rule(pick=PICK, size=st.integers(0, LIMIT))
    def take_in_any_case(self, pick: int, size: int) -> None:
        if self.holds:
            hold = self.holds[pick % len(self.holds)]
            before = hold.size_bytes
            hold.count(size)
            assert hold.size_bytes == before + size
            self.forced = True

    @rule(pick=PICK, share=st.floats(0, 1))
    def give_back(self, pick: int, share: float) -> None:
        if self.holds:
            hold = self.holds[pick % len(self.holds)]
            hold.add(-int(hold.size_bytes * share))

    @rule(pick=PICK)
    def end(self, pick: int) -> None:
        if self.holds:
            with self.holds.pop(pick % len(self.holds)):
                pass

    @invariant()
    def the_sums_are_those_of_the_holds(self) -> None:
        by_client: dict[str, int] = {}
        for hold in self.holds:
            if hold.size_bytes:
                by_client[hold.client] = by_client.get(hold.client, 0) + hold.size_bytes
        assert held_by(self.memory) == by_client
        assert self.memory.held_bytes == sum(by_client.values())

    @invariant()
    def another_client_has_room(self) -> None:
        if not self.forced:
            with self.memory.hold("new") as hold:
                hold.add((LIMIT - self.memory.held_bytes) // 2)

    def teardown(self) -> None:
        for hold in self.holds:
            hold.release()
        assert (self.memory.held_bytes, self.memory.by_client) == (0, {})


def test_one_client_gets_four_fifths_and_the_next_one_four_fifths_of_the_rest() -> None:
    memory = MemoryBudget(LIMIT)
    for client, size in (("a", 800), ("b", 160), ("c", 32)):
        with pytest.raises(Overloaded):
            memory.hold(client).add(size + 1)
        memory.hold(client).add(size)
    assert MEMORY_LIMIT_BYTES == 1 << 30, "docs/architecture.md and docs/reference/metrics.md"


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
