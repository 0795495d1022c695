"""`paceline workers` as a user runs it, against a real gateway."""

import json

import pytest

from gateway.cli import main
from tests.support.running_gateway import begun
from tests.support.scripted_worker import Script


def test_a_worker_is_listed_cordoned_drained_and_uncordoned(
    gateway_with_worker, worker, capsys, monkeypatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    url = ("--url", gateway_with_worker.url)

    def listed() -> str:
        assert main(["workers", "list", *url]) == 0
        return " ".join(capsys.readouterr().out.split())

    assert "fake-a ready demo http://127.0.0.1" in listed()
    assert main(["workers", "cordon", "fake-a", *url]) == 0
    assert "gets no new requests" in capsys.readouterr().out
    assert "fake-a cordoned by admin since 20" in listed()
    assert gateway_with_worker.chat().status_code == 503
    assert main(["workers", "uncordon", "fake-a", *url]) == 0
    assert "cordoned" not in listed()
    worker.script = Script(hang_after=3)
    with begun(gateway_with_worker.stream()) as read:
        with pytest.raises(SystemExit, match="but 1 are still running"):
            main(["workers", "drain", "fake-a", "--timeout", "0", *url])
        worker.resume.set()
        read()
    assert main(["workers", "drain", "fake-a", *url]) == 0
    assert "has no running requests" in capsys.readouterr().out
    assert main(["workers", "list", "--json", *url]) == 0
    (shown,) = json.loads(capsys.readouterr().out)["workers"]
    assert (shown["state"], shown["cordoned_by"]) == ("cordoned", "admin")
    gateway_with_worker.remove_worker(worker)
    assert "gone (left) since 20" in listed()
    with pytest.raises(SystemExit, match="No worker with this id has joined"):
        main(["workers", "cordon", "nobody", *url])
