"""One running line for the tests that only ask it; those that break one start their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from openai import AsyncOpenAI, OpenAI

from tests.support.paceline_process import Line, running_line


@pytest.fixture(scope="session")
def line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    """`paceline up` on the demo model."""
    with running_line(tmp_path_factory.mktemp("line")) as running:
        yield running


@pytest.fixture
def client(line: Line) -> Iterator[OpenAI]:
    """The `openai` package as it is, with a new base_url."""
    with OpenAI(base_url=f"{line.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


@pytest.fixture
async def async_client(line: Line) -> AsyncIterator[AsyncOpenAI]:
    """The same, for many requests at a time."""
    async with AsyncOpenAI(base_url=f"{line.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened
