"""The host file of a group, and what its machines must have in common."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.settings import InvalidSettings
from workers.group.checks import check_facts
from workers.group.hosts import Hosts
from workers.group.rank import RankFacts
from workers.group.ranks import RankRefused

LOCAL = [{"ips": ["127.0.0.1"]}] * 2


def read(folder: Path, document: object) -> Hosts:
    path = folder / "hosts.json"
    path.write_text(json.dumps(document))
    return Hosts.read(path)


def facts(**fields: Any) -> RankFacts:
    known = {"pid": 1, "versions": {"mlx": "0.32.4"}, "ports": (5000,), "fingerprint": "a"}
    return RankFacts(**{**known, "limit_bytes": 100, "free_bytes": 100, **fields})


def test_ranks_listen_on_the_addresses_of_the_file_alone(tmp_path: Path) -> None:
    hosts = read(tmp_path, {"hosts": LOCAL, "envs": ["MLX_METAL_FAST_SYNCH=1"]})
    variables, files = hosts.environment([(5000,), (5001,)])
    assert variables == {"MLX_METAL_FAST_SYNCH": "1"}
    assert files == {"MLX_HOSTFILE": [["127.0.0.1:5000"], ["127.0.0.1:5001"]]}


def test_jaccl_gets_the_devices_and_a_coordinator(tmp_path: Path) -> None:
    devices = [[None, "rdma_en3"], ["rdma_en3", None]]
    ranks = [{"ips": ["127.0.0.1"], "rdma": rdma} for rdma in devices]
    hosts = read(tmp_path, {"backend": "jaccl", "hosts": ranks})
    variables, files = hosts.environment([(5000,), (5001,)])
    assert variables == {"MLX_JACCL_COORDINATOR": "127.0.0.1:5000"}
    assert files == {"MLX_IBV_DEVICES": [*map(tuple, devices)]}


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (LOCAL[:1], "hosts"),
        *(
            ([{"ips": [address]}] * 2, reason)
            for address, reason in (
                ("8.8.8.8", "must be a private address"),
                ("0.0.0.0", "must be a private address"),
                ("fe80::1", "must be an IPv4 address"),
                ("mac.local", "must be an IP address"),
                ("192.0.2.1", "is no address of it"),
            )
        ),
        ([{"ips": ["127.0.0.1"], "ssh": "-oProxyCommand=x"}] * 2, "ssh"),
        ([*LOCAL[:1], {"ips": ["10.9.9.9"]}], "loopback"),
        ({"hosts": LOCAL, "envs": ["PATH=/x"]}, "envs"),
        ({"hosts": LOCAL, "backend": "nccl"}, "backend"),
        ({"hosts": LOCAL, "backend": "jaccl"}, "needs an RDMA device"),
    ],
)
def test_file_that_cannot_work_is_refused(tmp_path, document, reason) -> None:
    with pytest.raises(InvalidSettings, match=reason):
        read(tmp_path, document)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"versions": {"mlx": "0.31.0"}}, r"Rank 1 \(127.0.0.1\) has mlx 0.31.0 and rank 0"),
        ({"fingerprint": "b"}, "other weights"),
        ({"free_bytes": 10}, "needs"),
    ],
)
def test_machine_that_differs_or_is_too_small_is_refused(tmp_path, other, reason) -> None:
    hosts = read(tmp_path, LOCAL)
    check_facts(hosts, [facts(), facts()], 80)
    with pytest.raises(RankRefused, match=reason):
        check_facts(hosts, [facts(), facts(**other)], 80)
