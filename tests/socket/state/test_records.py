"""Records: durable, atomic, and safe with concurrent writers."""

import asyncio
import json
import os
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.errors import RecordsUnwritable, StartupError
from gateway.state import disk_thread
from gateway.state.records import FileRecords, Records, RedisRecords
from gateway.state.redis import RedisClient
from paceline.private_files import replace_file
from tests.support.memory_records import MemoryRecords
from tests.support.redis_server import TEST_DEADLINE_S


@pytest.fixture(params=["memory", "file", "redis"])
async def records(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Records]:
    if request.param == "memory":
        yield MemoryRecords()
    elif request.param == "file":
        yield FileRecords(tmp_path / "state.json")
    else:
        client = RedisClient(request.getfixturevalue("redis").url, TEST_DEADLINE_S)
        yield RedisRecords(client, tmp_path)
        await client.close()


async def test_records_keep_the_order_of_their_addition_and_the_first_of_two_names(records) -> None:
    for name in ("b", "a", "c"):
        assert await records.add("keys", name, json.dumps({"name": name}))
    assert await records.add("versions", "7", '{"by": "ann"}')
    assert not await records.add("versions", "7", '{"by": "bob"}')
    assert json.loads((await records.all("versions"))["7"]) == {"by": "ann"}
    assert list(await records.all("keys")) == ["b", "a", "c"]
    assert json.loads((await records.all("keys"))["a"]) == {"name": "a"}
    assert await records.all("unknown kind") == {}
    await records.replace("keys", "b", "3")
    await records.remove("keys", "a")
    await records.remove("keys", "a")
    assert [*await records.all("keys")] == ["b", "c"]
    assert (await records.all("keys"))["b"] == "3"


def test_concurrent_writers_of_several_processes_lose_no_record(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    program = (
        "import asyncio, sys; from pathlib import Path\n"
        "from gateway.state.records import FileRecords\n"
        "async def add():\n"
        "    for i in range(60):\n"
        "        await FileRecords(Path(sys.argv[1])).add('keys', f'other-{i}', '1')\n"
        "        print(i, flush=True)\n"
        "asyncio.run(add())"
    )

    async def add() -> None:
        for number in range(60):
            await FileRecords(path).add("keys", str(number), "1")

    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, env=os.environ, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()  # from here on, both write
        asyncio.run(add())
        assert other.wait() == 0

    assert len(asyncio.run(FileRecords(path).all("keys"))) == 120


async def test_a_damaged_file_fails_the_start_and_rejects_changes_that_would_overwrite_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "state.json"
    records = FileRecords(path)
    records.check()
    await records.add("keys", "a", "1")
    path.write_text("half a fi")
    with pytest.raises(RecordsUnwritable):
        await records.add("keys", "b", "2")
    assert path.read_text() == "half a fi", "an operator may still repair the file"
    path.write_text("[]")
    with pytest.raises(StartupError, match=r"state\.json"):
        records.check()


async def test_a_write_of_another_process_is_in_the_next_read_and_its_file_is_private(
    tmp_path: Path,
) -> None:
    path = tmp_path / "deep" / "state.json"
    first, second = FileRecords(path), FileRecords(path)
    assert await first.all("keys") == {}
    await second.add("keys", "a", '{"team": "Prüfer"}')
    assert json.loads((await first.all("keys"))["a"]) == {"team": "Prüfer"}
    assert path.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in path.parent.iterdir() if one.suffix != ".lock"] == ["state.json"]
    await second.replace("keys", "a", "2")
    assert await first.all("keys") == {"a": "2"}
    (await first.all("keys")).clear()  # type: ignore[attr-defined]  # the store returns a copy
    assert await first.all("keys") == {"a": "2"}
    path.unlink()
    assert await first.all("keys") == {}


def test_l7_a_write_is_durable_before_it_is_confirmed(tmp_path, monkeypatch) -> None:
    path = tmp_path / "state.json"
    synced: list[tuple[str, bool]] = []

    def record_sync(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        synced.append(("folder" if is_folder else "file", path.exists()))

    monkeypatch.setattr(os, "fsync", record_sync)
    replace_file(path, "{}")
    assert synced == [("file", False), ("folder", True)], "after the file is in its place"


def test_l7_a_disk_that_hangs_stops_neither_other_threads_nor_the_end_of_the_process(
    tmp_path: Path,
) -> None:
    os.mkfifo(tmp_path / "state.json")  # to open it waits for a writer
    program = (
        "import asyncio, sys; from pathlib import Path\n"
        "from gateway.errors import RecordsUnwritable, WriteUnconfirmed\n"
        "from gateway.state import disk_thread; from gateway.state.records import FileRecords\n"
        "disk_thread.TIMEOUT_S = 0.01\n"
        "async def main():\n"
        "    records, failures = FileRecords(Path(sys.argv[1])), []\n"
        "    add, read = lambda: records.add('keys', 'a', '1'), lambda: records.all('keys')\n"
        "    for call in [add, read] * 50:\n"
        "        try:\n"
        "            await call()\n"
        "        except RecordsUnwritable as error:\n"
        "            failures.append(type(error).__name__)\n"
        "    print(len(failures), *sorted(set(failures)), await asyncio.to_thread(str, 'others'))\n"
        "asyncio.run(main())"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "state.json")]
    ended = subprocess.run(
        command, env=os.environ, stdout=subprocess.PIPE, text=True, check=True, timeout=60
    )
    assert ended.stdout.split() == ["100", "RecordsUnwritable", "WriteUnconfirmed", "others"]


async def test_l7_records_are_read_again_once_the_disk_answers(tmp_path, monkeypatch) -> None:
    path, hanging = tmp_path / "state.json", tmp_path / "hanging"
    os.mkfifo(path)
    records = FileRecords(path)
    with monkeypatch.context() as patch:
        patch.setattr(disk_thread, "TIMEOUT_S", 0.01)
        for _ in range(3):
            with pytest.raises(RecordsUnwritable):
                await records.all("keys")
    path.rename(hanging)
    path.write_text('{"keys": {"a": 1}}')
    hanging.write_text("")
    assert await records.all("keys") == {"a": "1"}
