"""The host file of a group, and what its machines must have in common."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from workers.config_file import InvalidSettings
from workers.group.checks import check_facts
from workers.group.hosts import Backend, Hosts
from workers.group.rank import RankFacts
from workers.group.ranks import RankRefused

LOCAL = [{"ips": ["127.0.0.1"]}] * 2


def read(folder: Path, document: object, backend: Backend = Backend.RING) -> Hosts:
    path = folder / "hosts.json"
    path.write_text(json.dumps(document))
    return Hosts.read(path, backend)


def facts(**fields: Any) -> RankFacts:
    known: dict[str, Any] = {
        "pid": 1,
        "versions": {"mlx": "0.32.4"},
        "ports": (5000,),
        "fingerprint": "a",
        "limit_bytes": 100,
        "free_bytes": 100,
    }
    return RankFacts(**known | fields)


def test_ranks_listen_on_the_addresses_of_the_file_alone(tmp_path: Path) -> None:
    hosts = read(tmp_path, {"hosts": LOCAL, "envs": ["MLX_METAL_FAST_SYNCH=1"]})
    variables, files = hosts.environment(Backend.RING, [(5000,), (5001,)])
    assert variables == {"MLX_METAL_FAST_SYNCH": "1"}
    assert files == {"MLX_HOSTFILE": [["127.0.0.1:5000"], ["127.0.0.1:5001"]]}


def test_jaccl_gets_the_devices_and_a_coordinator(tmp_path: Path) -> None:
    document = [
        {"ips": ["127.0.0.1"], "rdma": [None, "rdma_en3"]},
        {"ips": ["127.0.0.1"], "rdma": ["rdma_en3", None]},
    ]
    hosts = read(tmp_path, document, Backend.JACCL)
    variables, files = hosts.environment(Backend.JACCL, [(5000,), (5001,)])
    assert variables == {"MLX_JACCL_COORDINATOR": "127.0.0.1:5000"}
    assert files == {"MLX_IBV_DEVICES": [(None, "rdma_en3"), ("rdma_en3", None)]}


@dataclass(frozen=True)
class Refused:
    document: object
    reason: str
    backend: Backend = Backend.RING


@pytest.mark.parametrize(
    "refused",
    [
        Refused(LOCAL[:1], "hosts"),
        Refused([{"ips": ["8.8.8.8"]}] * 2, "must be a private address"),
        Refused([{"ips": ["0.0.0.0"]}] * 2, "must be a private address"),
        Refused([{"ips": ["fe80::1"]}] * 2, "must be an IPv4 address"),
        Refused([{"ips": ["mac.local"]}] * 2, "must be an IP address"),
        Refused([{"ips": ["127.0.0.1"], "ssh": "-oProxyCommand=x"}] * 2, "ssh"),
        Refused([*LOCAL[:1], {"ips": ["10.9.9.9"]}], "loopback"),
        Refused([{"ips": ["192.0.2.1"]}] * 2, "is no address of it"),
        Refused({"hosts": LOCAL, "envs": ["PATH=/x"]}, "envs"),
        Refused(LOCAL, "needs an RDMA device", Backend.JACCL),
    ],
    ids=lambda refused: refused.reason,
)
def test_file_that_cannot_work_is_refused(tmp_path: Path, refused: Refused) -> None:
    with pytest.raises(InvalidSettings, match=refused.reason):
        read(tmp_path, refused.document, refused.backend)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"versions": {"mlx": "0.31.0"}}, r"Rank 1 \(127.0.0.1\) has mlx 0.31.0 and rank 0"),
        ({"fingerprint": "b"}, "other weights"),
        ({"free_bytes": 10}, "needs"),
    ],
)
def test_machine_that_differs_or_is_too_small_is_refused(
    tmp_path: Path, other: dict[str, Any], reason: str
) -> None:
    hosts = read(tmp_path, LOCAL)
    check_facts(hosts, [facts(), facts()], 80)
    with pytest.raises(RankRefused, match=reason):
        check_facts(hosts, [facts(), facts(**other)], 80)
