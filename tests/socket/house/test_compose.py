"""docker-compose.yml and the images: complete, pinned, isolated, and without default secrets."""

import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from tests.support.compose_file import (
    FILE,
    ROOT,
    SECRETS,
    SERVICES,
    read_compose,
    required_variables,
)

DOCKERFILE = (ROOT / "Dockerfile").read_text()
OWN_IMAGES = {"paceline-gateway:0.1.0", "paceline-worker:0.1.0"}


@pytest.fixture(scope="module")
def compose() -> tuple[str, ...]:
    """Return the command of Docker Compose, new or old; neither needs a daemon to check a file."""
    for command in (("docker", "compose"), ("docker-compose",)):
        if shutil.which(command[0]):
            version = subprocess.run([*command, "version"], capture_output=True, check=False)
            if version.returncode == 0:
                return command
    pytest.skip("neither `docker compose` nor `docker-compose` is installed")


def run_config(
    compose: tuple[str, ...], folder: Path, variables: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run `config` with these variables only, without the clone's own .env."""
    file = folder / "env"
    file.write_text("".join(f"{name}={value}\n" for name, value in variables.items()))
    return subprocess.run(
        [*compose, "--env-file", file, "-f", FILE, "config", "-q"],
        env={name: value for name, value in os.environ.items() if name not in SECRETS},
        capture_output=True,
        text=True,
        check=False,
    )


def test_compose_accepts_the_file_and_names_a_missing_secret_and_the_script_that_creates_it(
    compose: tuple[str, ...], tmp_path: Path
) -> None:
    accepted = run_config(compose, tmp_path, SECRETS)
    assert (accepted.returncode, accepted.stderr) == (0, "")
    message = "{0} is not set, scripts/make-env writes an .env file with it"
    *others, last = SECRETS.items()
    result = run_config(compose, tmp_path, dict(others))
    assert result.returncode != 0
    assert message.format(last[0]) in result.stderr
    for name in SECRETS:
        assert f"${{{name}:?{message.format(name)}}}" in FILE.read_text()


def test_make_env_writes_the_required_secrets_and_never_overwrites_them(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    script = shutil.copy(ROOT / "scripts" / "make-env", tmp_path / "scripts")
    subprocess.run([script], check=True, capture_output=True)
    file = tmp_path / ".env"
    written = dict(line.split("=") for line in file.read_text().splitlines())
    assert written.keys() == required_variables() == SECRETS.keys()
    assert len(set(written.values())) == len(written)
    assert all(len(value) >= 64 for value in written.values())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    repeated = subprocess.run([script], check=False, capture_output=True, text=True)
    assert repeated.returncode == 1
    assert repeated.stderr == "paceline: .env is there already; delete it to make new secrets.\n"
    assert dict(line.split("=") for line in file.read_text().splitlines()) == written


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_pinned_and_isolated(name: str) -> None:
    service = SERVICES[name]
    assert service["image"] in OWN_IMAGES or re.search(r":v?\d+\.\d+\.\d+(-|@|$)", service["image"])
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "privileged" not in service
    for port in service.get("ports", ()):
        assert port.startswith("127.0.0.1:"), "ports are published on loopback only"
    for volume in service.get("volumes", ()):
        source = volume.split(":")[0]
        assert not source.startswith("./") or (ROOT / source).is_file(), volume


def test_redis_is_durable_and_reachable_by_the_gateways_only() -> None:
    redis = SERVICES["redis"]
    assert "ports" not in redis
    command = redis["command"]
    assert command[command.index("--appendonly") + 1] == "yes"
    assert [volume.split(":")[1] for volume in redis["volumes"]] == ["/data"]
    (network,) = redis["networks"]
    assert {name for name, service in SERVICES.items() if network in service["networks"]} == {
        *("redis", "gateway")
    }
    assert read_compose(SECRETS)["networks"][network]["internal"] is True


def test_c20_images_have_the_fixes_of_known_holes_and_what_their_configuration_needs() -> None:
    """CVE-2025-49844, CVE-2026-23479, CVE-2026-12087, and the release of September 2026.

    The configuration uses `resolve` of servers, which open-source nginx has since 1.27.3.
    """
    for service, image, lowest in (("redis", "redis", (8, 10, 2)), ("front", "nginx", (1, 27, 3))):
        found = re.match(rf"{image}:(\d+)\.(\d+)\.(\d+)-", SERVICES[service]["image"])
        assert found is not None
        assert tuple(map(int, found.groups())) >= lowest
    configuration = (ROOT / "deploy" / "nginx.conf").read_text()
    servers = re.findall(r"^\s+server (gateway.*);$", configuration, re.MULTILINE)
    assert servers
    assert all(" resolve" in server for server in servers)


def test_images_install_locked_hashes_and_run_as_an_unprivileged_user() -> None:
    base, *stages = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
    assert re.match(r"python:\d+\.\d+\.\d+-slim-\w+(@\S+)? AS base\n", base)
    (installer,) = (stage for stage in stages if stage.startswith("base AS installer\n"))
    assert "RUN pip install --require-hashes --requirement /src/locks/setup.txt" in installer
    assert "python -m venv --without-pip /opt/paceline" in installer
    assert "UV_COMPILE_BYTECODE=1" in installer, "a container cannot write what it compiles"
    for kind in ("gateway", "worker"):
        (built,) = (stage for stage in stages if stage.startswith(f"installer AS built-{kind}\n"))
        assert f"uv pip install --require-hashes --requirement /src/locks/{kind}.txt" in built
        if kind == "worker":
            assert " g++ " in built, "not every package has a wheel for linux/arm64"
        (final,) = (stage for stage in stages if stage.startswith(f"base AS {kind}\n"))
        assert re.findall("--from=.*", final) == [
            f"--from=built-{kind} /opt/paceline /opt/paceline"
        ], "uv stays behind in /usr/local"
        assert "\nUSER paceline\n" in final
        assert "/livez" in final[final.index("HEALTHCHECK") :]
        (start,) = re.findall(r"^CMD \[(.*)\]$", final, re.MULTILINE)
        service = SERVICES[kind]
        assert re.findall(r'"([^"]+)"', start) == service["command"]


def test_files_that_the_images_copy_exist_and_are_not_ignored_and_secrets_are() -> None:
    assert ".env" in (ROOT / ".gitignore").read_text().split()
    assert (ROOT / ".dockerignore").read_text().splitlines()[1] == "*"
    assert not set(SECRETS) & set(re.findall(r"\w+", DOCKERFILE))
    included = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"}
    copied = [
        source
        for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
        for source in sources.split()
    ]
    assert copied
    for source in copied:
        assert (ROOT / source).exists(), source
        assert {source, source.split("/")[0]} & included, source
