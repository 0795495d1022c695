"""Facts of this machine: chip, memory, limits, versions, and whether it may use its network."""

import errno
import os
import platform
import re
import socket
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from workers.doctor.report import Machine, NetworkAccess

_PACKAGES = ("paceline", "mlx", "mlx-metal", "mlx-lm", "mlx-vlm")
_KEYS = ("machdep.cpu.brand_string", "hw.model", "hw.perflevel0.physicalcpu",
         "hw.perflevel1.physicalcpu", "iogpu.wired_limit_mb")  # fmt: skip
_COMMAND_TIMEOUT_S = 5.0
_MDNS = ("224.0.0.251", 5353)
# A question of multicast DNS that any Mac sends: which services are there?
_QUESTION = (
    bytes(5) + b"\x01" + bytes(6) + b"\x09_services\x07_dns-sd\x04_udp\x05local\x00\x00\x0c\x00\x01"
)


def inspect_machine(device: Mapping[str, Any], *, metal: bool) -> Machine:
    """Return the facts of this machine; `device` has MLX's facts of its device.

    Neither its name nor its addresses nor those of its user are part of it.
    """
    system = _sysctl()
    architecture = str(device.get("architecture", ""))
    return Machine(
        chip=system.get("machdep.cpu.brand_string") or _cpu_name(),
        model=system.get("hw.model", ""),
        system=f"{platform.system()} {platform.mac_ver()[0] or platform.release()}",
        python=platform.python_version(),
        versions={name: found for name in _PACKAGES if (found := _version(name))},
        cores=os.cpu_count() or 1,
        performance_cores=_number(system.get("hw.perflevel0.physicalcpu")),
        efficiency_cores=_number(system.get("hw.perflevel1.physicalcpu")),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        metal=metal,
        architecture=architecture,
        generation=_number(_part(r"applegpu_g(\d+)", architecture)),
        working_set_bytes=int(device.get("max_recommended_working_set_size") or 0),
        largest_buffer_bytes=int(device.get("max_buffer_length") or 0),
        wired_limit_bytes=_number(system.get("iogpu.wired_limit_mb")) << 20,
        network=network_access(platform.system()),
    )


def network_access(system: str) -> NetworkAccess:
    """Return whether this process may reach other machines of the local network.

    macOS 15 asks the user; until the user allows it, no datagram reaches the network.
    """
    if system != "Darwin":
        return NetworkAccess.NOT_NEEDED
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.settimeout(1.0)
            sender.sendto(_QUESTION, _MDNS)
    except OSError as error:
        denied = error.errno in (errno.EHOSTUNREACH, errno.EPERM)
        return NetworkAccess.DENIED if denied else NetworkAccess.UNKNOWN
    return NetworkAccess.ALLOWED


def _sysctl() -> dict[str, str]:
    """Return the values of macOS by name; empty on other systems."""
    if platform.system() != "Darwin":
        return {}
    values = {}
    for key in _KEYS:
        try:
            process = subprocess.run(  # noqa: S603
                ["/usr/sbin/sysctl", "-n", key],
                capture_output=True,
                text=True,
                timeout=_COMMAND_TIMEOUT_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            continue  # an older system or a chip with cores of one kind lacks some
        values[key] = process.stdout.strip()[:200]
    return values


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123  # no regular file
            return _part(r"model name\s*:\s*(.+)", file.read(65_536)) or platform.machine()
    except OSError:
        return platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _number(text: str | None) -> int:
    return int(text) if text and re.fullmatch(r"\d{1,12}", text) else 0


def _part(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1].strip() if match else ""
