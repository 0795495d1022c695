"""The suite of Open Responses on the demo; `bench.clients.open_responses` writes its table."""

import pytest

from bench.clients.open_responses import MORE, SUITE, play

TESTS = {**SUITE, **MORE}
UNPASSABLE = {"a schema for the text": ".text.format: fits no schema"}
"""The published schema of a format lets its schema be null alone."""


@pytest.mark.parametrize("name", TESTS)
def test_the_demo_passes_the_suite_of_open_responses(demo, name: str) -> None:
    found = {*play(demo.gateway.client, TESTS[name])}
    assert found == ({f"ResponseResource{UNPASSABLE[name]}"} if name in UNPASSABLE else set())
