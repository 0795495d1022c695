"""The hosts of a group: the file that MLX's launcher reads, its checks, and a rank's environment.

Ranks exchange requests as pickles over connections that ask nobody who he is: whoever reaches such
a port runs code. So every address of the file must be private, and the ranks listen only on these.
"""

import ipaddress
import socket
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from paceline.error_messages import message_of
from paceline.settings import InvalidSettings

MAX_RANKS = 64
_MAX_FILE_BYTES = 256 * 1024
_Device = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class Backend(StrEnum):
    """How the ranks talk to each other."""

    RING = "ring"
    """TCP, over Thunderbolt or Ethernet."""
    JACCL = "jaccl"
    """RDMA over Thunderbolt 5."""


def _check_private(address: str) -> str:
    """Reject an address that others than the owner's machines may reach."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        raise ValueError("must be an IP address") from None
    if parsed.version == 6:
        raise ValueError("must be an IPv4 address, as MLX takes no other")
    if parsed.is_unspecified or not parsed.is_private:
        raise ValueError(
            "must be a private address, since whoever reaches a rank's port can run code there"
        )
    return address


class Host(BaseModel):
    """One rank's machine, in the words of MLX's host file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ssh: str = Field("", pattern=r"^([A-Za-z0-9_][A-Za-z0-9@._-]{0,254})?$")
    """Name for ssh; not used for a rank on this machine."""
    ips: tuple[Annotated[str, AfterValidator(_check_private)], ...] = Field(
        min_length=1, max_length=16
    )
    rdma: tuple[_Device | tuple[_Device, ...] | None, ...] = Field((), max_length=MAX_RANKS)
    """RDMA devices to each rank; None to itself."""

    @property
    def is_local(self) -> bool:
        """Whether its first address is one of this machine."""
        try:
            free_port(self.ips[0])
        except OSError:
            return False
        return True


class Hosts(BaseModel):
    """The host file of a group; rank 0 is the first host."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: Backend = Backend.RING
    """As `mlx.distributed_config` writes it, and as MLX's own launcher reads it."""
    envs: tuple[Annotated[str, Field(pattern=r"^MLX_[A-Z0-9_]{1,64}=[ -~]{0,256}$")], ...] = Field(
        (), max_length=32
    )
    hosts: tuple[Host, ...] = Field(min_length=2, max_length=MAX_RANKS)

    @model_validator(mode="before")
    @classmethod
    def _wrap_list(cls, document: object) -> object:
        return {"hosts": document} if isinstance(document, list) else document

    @model_validator(mode="after")
    def _check(self) -> Self:
        loopback = [ipaddress.ip_address(one.ips[0]).is_loopback for one in self.hosts]
        if any(loopback) and not all(loopback):
            raise ValueError("either all hosts have loopback addresses or none has")
        return self

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the hosts of a file; raise `InvalidSettings` for a file that cannot work."""
        try:
            with path.open("rb") as file:
                hosts = cls.model_validate_json(file.read(_MAX_FILE_BYTES))
        except OSError as error:
            raise InvalidSettings(
                f"The host file {path} cannot be read: {error.strerror}."
            ) from None
        except ValidationError as invalid:
            first = invalid.errors()[0]
            where = ".".join(map(str, first["loc"])) or "hosts"
            raise InvalidSettings(f"The host file {path}: '{where}' {message_of(first)}.") from None
        hosts.check_start()
        return hosts

    def check_start(self) -> None:
        """Raise `InvalidSettings` if this machine cannot start the ranks."""
        if not self.hosts[0].is_local:
            raise InvalidSettings(
                f"The first host of a group is the machine that runs this command, and "
                f"{self.hosts[0].ips[0]} is no address of it."
            )
        for rank, host in enumerate(self.hosts):
            if not host.is_local and not host.ssh:
                raise InvalidSettings(
                    f"Rank {rank} ({host.ips[0]}) runs on another machine: name it for ssh in the "
                    'field "ssh" of its host.'
                )
            without = [device is None for device in host.rdma]
            itself = [peer == rank for peer in range(len(self.hosts))]
            if self.backend is Backend.JACCL and without != itself:
                raise InvalidSettings(
                    f"Rank {rank} ({host.ips[0]}) needs an RDMA device to every other rank in the "
                    'field "rdma" of its host, and null to itself. `mlx.distributed_config '
                    "--backend jaccl` writes such a file."
                )

    def name_of(self, rank: int) -> str:
        """Return a rank for people."""
        return f"Rank {rank} ({self.hosts[rank].ssh or self.hosts[rank].ips[0]})"

    def environment(self, ports: Sequence[Sequence[int]]) -> tuple[dict[str, str], dict[str, Any]]:
        """Return the variables of all ranks, and the variables that name a file with such content.

        `ports` are free ports of each rank, one for each of its addresses.
        """
        given = dict(one.split("=", 1) for one in self.envs)
        if self.backend is Backend.JACCL:
            coordinator = f"{self.hosts[0].ips[0]}:{ports[0][0]}"
            devices = [host.rdma for host in self.hosts]
            return {**given, "MLX_JACCL_COORDINATOR": coordinator}, {"MLX_IBV_DEVICES": devices}
        addresses = [
            [f"{ip}:{port}" for ip, port in zip(host.ips, free, strict=True)]
            for host, free in zip(self.hosts, ports, strict=True)
        ]
        return given, {"MLX_HOSTFILE": addresses}


def free_port(address: str) -> int:
    """Return a free port of an address; raise OSError for an address of another machine."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
