"""A gateway and a worker as two machines: network namespaces of Linux, which need root."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]

# The namespaces have no name outside of this process tree, and end with it, however it ends.
_ISOLATED = "unshare --net --mount --pid --fork --kill-child --mount-proc".split()
_SCRIPT = r"""
set -e
mount -t tmpfs none /run && mkdir /run/netns && ip link set lo up && ip netns add mac
mac="ip netns exec mac"
ip link add here type veth peer name there netns mac
ip addr add 10.9.0.1/24 dev here && ip link set here up
$mac ip link set lo up && $mac ip addr add 10.9.0.2/24 dev there && $mac ip link set there up
"$PYTHON" -m gateway gateway --host 0.0.0.0 > /run/gateway.log 2>&1 &
$mac "$PYTHON" -m tests.support.networked_worker "$PACELINE_JOIN_TOKEN" http://10.9.0.1:8000 9200 \
  > /run/worker.log 2>&1 &
wait_for() {  # the state, the URL and the problem of the worker, as admins see them
  "$PYTHON" -c "$WAIT" "$1" && echo "$1" && return
  cat /run/gateway.log /run/worker.log && exit 1
}
move() {
  $mac ip addr add "10.9.0.$2/24" dev there
  $mac ip addr del "10.9.0.$1/24" dev there
  $mac ip addr replace "10.9.0.$2/24" dev there
}
wait_for "ready http://10.9.0.2:9200"
"""
_MOVE = r"""
move 2 3
wait_for "ready http://10.9.0.3:9200"
"""
_MORE = r"""
# A cable that is pulled, and plugged in again.
$mac ip link set there down
wait_for "gone"
$mac ip link set there up
wait_for "ready http://10.9.0.3:9200"
# A firewall that drops what comes to the port.
$mac ip rule add pref 100 lookup local && $mac ip rule del pref 0
$mac ip rule add pref 10 iif there ipproto tcp dport 9200 blackhole
move 3 4
wait_for "unreachable http://10.9.0.4:9200 No answer came from"
until grep -q "No answer came from" /run/worker.log; do sleep 0.1; done
echo "its owner is told"
$mac ip rule del pref 10
wait_for "ready http://10.9.0.4:9200"
"""
_WAIT = """
import http.client, json, sys, time
end_s = time.monotonic() + 60
while time.monotonic() < end_s:
    connection = http.client.HTTPConnection("127.0.0.1", 8000, timeout=10)
    try:
        headers = {"authorization": "Bearer admin-key-of-two-networks"}
        connection.request("GET", "/admin/v1/workers", headers=headers)
        workers = json.load(connection.getresponse())["workers"]
        if sys.argv[1] == "gone" and not workers:
            sys.exit()
        for worker in workers:
            shown = [worker["state"], worker.get("url", ""), worker.get("problem", "")]
            if " ".join(shown).startswith(sys.argv[1]):
                sys.exit()
    except OSError:
        pass
    time.sleep(0.1)
sys.exit(1)
"""


@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("unshare"),
    reason="network namespaces need root on Linux",
)
@pytest.mark.parametrize("more", [False, pytest.param(True, marks=pytest.mark.proof)])
def test_a_mac_with_another_address_without_link_or_behind_a_firewall_is_used_again(
    *, more: bool
) -> None:
    """The proof goes on after the first change."""
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "PYTHONPATH": str(_ROOT),
        "WAIT": _WAIT,
        "PACELINE_STATE_DIR": "/run/state",
        "PACELINE_API_KEY": "api-key-of-two-networks",
        "PACELINE_ADMIN_KEY": "admin-key-of-two-networks",
        "PACELINE_JOIN_TOKEN": "join-token-of-two-networks",
    }
    if subprocess.run([*_ISOLATED, "ip", "netns"], capture_output=True, check=False).returncode:
        pytest.skip("this system allows no network namespaces")
    ended = subprocess.run(
        [*_ISOLATED, "bash", "-c", _SCRIPT + _MOVE + _MORE * more],
        capture_output=True,
        text=True,
        env=environment,
        cwd=_ROOT,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    moved = ["ready http://10.9.0.2:9200", "ready http://10.9.0.3:9200"]
    afterwards = [
        "gone",
        "ready http://10.9.0.3:9200",
        "unreachable http://10.9.0.4:9200 No answer came from",
        "its owner is told",
        "ready http://10.9.0.4:9200",
    ]
    assert ended.stdout.splitlines() == moved + afterwards * more
