"""What `paceline doctor` tells of a machine."""

import errno
import socket

import pytest

from workers.doctor.machine import inspect_machine, network_access
from workers.doctor.report import NetworkAccess


def test_a_machine_is_told_without_its_name_and_its_addresses() -> None:
    device = {"architecture": "applegpu_g16s", "max_buffer_length": 36 * 10**9}
    device |= {"max_recommended_working_set_size": 48 * 10**9}
    machine = inspect_machine(device, metal=True)
    assert (machine.generation, machine.working_set_bytes) == (16, 48 * 10**9)
    assert machine.chip
    assert machine.memory_bytes > 1 << 28
    assert {"paceline", "mlx"} <= machine.versions.keys()
    assert socket.gethostname() not in machine.model_dump_json()
    cpu = inspect_machine({"architecture": "x86_64"}, metal=False)
    assert (cpu.generation, cpu.working_set_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("number", "access"),
    [
        (0, NetworkAccess.ALLOWED),
        (errno.EHOSTUNREACH, NetworkAccess.DENIED),
        (errno.ENETDOWN, NetworkAccess.UNKNOWN),
    ],
)
def test_a_datagram_without_a_route_means_that_macos_denies_the_network(
    monkeypatch: pytest.MonkeyPatch, number: int, access: NetworkAccess
) -> None:
    class Sender(socket.socket):
        def sendto(self, *_: object) -> int:
            if number:
                raise OSError(number, "no")
            return 0

    monkeypatch.setattr(socket, "socket", Sender)
    assert network_access("Darwin") is access
    monkeypatch.setattr(socket, "socket", None)
    assert network_access("Linux") is NetworkAccess.NOT_NEEDED, "other systems ask nobody"
