"""PDFs of clients, read in processes with limits: what is read counts, and nothing else happens."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.documents import pdf_process
from gateway.documents import reader as reading
from gateway.documents.reader import DocumentReader
from gateway.memory_budget import MemoryBudget
from gateway.protocols.documents import Document
from paceline.request.content import read_size
from tests.support.pdfs import base64_pdf, encrypted_pdf, endless_pdf, inflated_pdf, pdf

HURRIED = """
import sys
from gateway.documents import pdf_process
pdf_process._CPU_S = 2
pdf_process.main(int(sys.argv[1]))
"""


async def read(reader: DocumentReader, *contents: bytes, pictures: bool = False) -> list[Document]:
    texts = [*map(base64_pdf, contents)]
    found = await reader.read(MemoryBudget().hold("ann"), texts, pictures=pictures)
    return [found[text] for text in texts]


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.subprocess.Process]:
    started = []
    start = asyncio.create_subprocess_exec

    async def record(*command: str, **options: Any) -> asyncio.subprocess.Process:
        started.append(await start(*command, **options))
        return started[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", record)
    return started


async def test_a_document_is_read_once_with_its_pages_where_the_model_sees() -> None:
    """A history comes again with each turn, at the same time for its tokens to be counted."""
    reader = DocumentReader(MemoryBudget())
    content = pdf("Hello", "World")
    (told,), (again,) = await asyncio.gather(read(reader, content), read(reader, content))
    assert told == again == Document("[Page 1]\nHello\n\n[Page 2]\nWorld", 2)
    assert reader.started == 1
    ((seen,), (same,)) = [await read(reader, content, pictures=True) for _ in range(2)]
    assert (seen.text, reader.started) == (told.text, 2)
    assert [read_size(page) for page in seen.pages] == [(792, 1024)] * 2
    assert same is seen


def test_a_gateway_with_much_memory_reads_documents() -> None:
    """The usage of a process begins with that of the one from which it was forked."""
    program = (
        "import asyncio, sys; from gateway.documents.reader import DocumentReader\n"
        "from gateway.memory_budget import MemoryBudget\n"
        f"held = b'x' * {pdf_process.MEMORY_LIMIT_BYTES}\n"
        "memory = MemoryBudget()\n"
        "reading = DocumentReader(memory).read(memory.hold('ann'), [sys.argv[1]], pictures=False)\n"
        "found = asyncio.run(reading)\n"
        "print(found[sys.argv[1]].text)"
    )
    command = [sys.executable, "-c", program, base64_pdf(pdf("Hello"))]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b"[Page 1]\nHello\n"


async def test_the_pictures_of_a_request_are_bounded_and_its_first_documents_keep_theirs() -> None:
    """Else the beginning of the prompt would change with each document."""
    contents = [pdf(*(f"{name}{number}" for number in range(9))) for name in "abc"]
    found = await read(DocumentReader(MemoryBudget()), *contents, pictures=True)
    assert [len(one.pages) for one in found] == [8, 8, 0]
    assert all(one.page_count == 9 and "8" in one.text for one in found)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "damaged"),
        (b"%PDF-1.7\nnothing", "damaged"),
        (encrypted_pdf("Secret", "word"), "encrypted"),
        (inflated_pdf(), "too long"),
    ],
    ids=["empty", "damaged", "encrypted", "inflated"],
)
async def test_f65_a_document_that_cannot_be_read_has_a_problem_and_never_fails(
    content: bytes, problem: str, processes: list[asyncio.subprocess.Process]
) -> None:
    reader = DocumentReader(MemoryBudget())
    ((one,), (again,)) = [await read(reader, content, pictures=True) for _ in range(2)]
    assert problem in one.problem
    assert (one.text, one.pages) == ("", ())
    assert again is one, "nobody reads it twice"
    assert len(processes) == bool(content)


async def test_f65_what_was_read_before_a_limit_counts(monkeypatch, tmp_path) -> None:
    """One page of this document draws a trillion forms."""
    assert pdf_process._CPU_S == 15
    (tmp_path / "hurried.py").write_text(HURRIED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(pdf_process, "__name__", "hurried")
    (one,) = await read(DocumentReader(MemoryBudget()), endless_pdf("Begun"), pictures=True)
    assert (one.text, len(one.pages)) == ("[Page 1]\nBegun", 1)
    (opened,) = await read(DocumentReader(MemoryBudget()), encrypted_pdf("Open", ""))
    assert opened.text == "[Page 1]\nOpen", "a document without a password is no secret"


async def test_the_memory_of_documents_is_bounded_and_so_is_their_number(monkeypatch) -> None:
    monkeypatch.setattr(reading, "_CACHE_BYTES", 2500)
    reader = DocumentReader(MemoryBudget())
    first, second = pdf("first"), pdf("second")
    for content, started in ((first, 1), (second, 2), (first, 2), (pdf("third"), 3), (second, 4)):
        await read(reader, content)
        assert reader.started == started
    assert reading._NEW_LIMIT == 16
    monkeypatch.setattr(reading, "_NEW_LIMIT", 2)
    many = await read(
        DocumentReader(MemoryBudget()), *(b"%%PDF-%d" % number for number in range(3))
    )
    assert [one.problem for one in many[1:]] == ["it is damaged", "it was not read"]


async def test_a_client_that_leaves_ends_the_process_that_reads_for_it(processes) -> None:
    reader = DocumentReader(MemoryBudget())
    reading = asyncio.create_task(read(reader, endless_pdf(), pictures=True))
    while not reader.started:
        await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert [one.returncode for one in processes] == [-signal.SIGKILL]


async def test_f65_a_process_that_a_document_has_taken_sends_no_links_and_breaks_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reader = DocumentReader(MemoryBudget())
    for number, line in enumerate(('{"picture": "http://10.0.0.1/"}', "[1]", '{"text": 7}', "{")):
        (tmp_path / "taken.py").write_text(f"print({line!r})")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(pdf_process, "__name__", "taken")
        (one,) = await read(reader, b"%%PDF-%d" % number)
        assert one == Document(problem="it is damaged")


async def test_a_document_that_a_busy_machine_has_no_time_for_is_read_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert pdf_process.WALL_S >= 20 * pdf_process._CPU_S, "so that only CPU ends a good document"
    reader, content = DocumentReader(MemoryBudget()), pdf("Hello")
    with monkeypatch.context() as busy:
        busy.setattr(pdf_process, "WALL_S", 0)
        (one,) = await read(reader, content)
    assert one.problem == "it takes too long to read"
    assert await read(reader, content) == [Document("[Page 1]\nHello", 1)]
