"""`scripts/pin-images`: the digests of public images, looked up by docker."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FILES = ("docker-compose.yml", "Dockerfile")
# The digest of each call differs, so that a second call must replace the first one's.
DOCKER = """#!/bin/sh
echo "$6" >>looked-up
[ "$6" != "$FAILING" ] || exit 1
printf 'sha256:%064d' "$(wc -l <looked-up)"
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a copy of what the script reads and writes, with a scripted docker."""
    for name in (*FILES, "scripts/pin-images", "bin/docker"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
    for name in (*FILES, "scripts/pin-images"):
        shutil.copy(ROOT / name, tmp_path / name)
    docker = tmp_path / "bin" / "docker"
    docker.write_text(DOCKER)
    docker.chmod(0o755)
    return tmp_path


def pin(project: Path, failing: str = "", path: str | None = None) -> tuple[int, str]:
    """Return the exit code and the last line of the output."""
    environment = {"PATH": path or f"{project}/bin:/usr/bin:/bin", "FAILING": failing}
    ended = subprocess.run(
        ["/bin/sh", "scripts/pin-images"],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return ended.returncode, (ended.stdout + ended.stderr).splitlines()[-1]


def read(project: Path) -> list[str]:
    return [line for name in FILES for line in (project / name).read_text().splitlines()]


def test_each_public_image_gets_the_digest_of_its_tag_and_a_second_call_a_new_one(
    project: Path,
) -> None:
    before, previous = read(project), {""}
    for _ in range(2):
        assert pin(project)[0] == 0
        pinned = read(project)
        assert [re.sub("@sha256:[0-9]{64}", "", line) for line in pinned] == before
        digests = set(re.findall("@(sha256:[0-9]{64})", "\n".join(pinned)))
        public = [line for line in before if re.match(r"( *image: (?!paceline-)|FROM \S+:)", line)]
        assert len(digests) == len({line.split()[1] for line in public}) == 5
        assert not digests & previous
        previous = digests
    assert "paceline-" not in (project / "looked-up").read_text()


def test_a_failed_look_up_changes_no_file(project: Path) -> None:
    before = read(project)
    (image,) = re.findall(r"image: (redis:\S+)", "\n".join(before))
    code, message = pin(project, failing=image)
    assert code == 1
    assert message == f"paceline: docker cannot look up the digest of {image}; see above."
    assert read(project) == before


def test_without_docker_one_sentence_says_so(project: Path) -> None:
    tools = project / "tools"
    tools.mkdir()
    for name in ("dirname", "sed", "grep", "sort"):
        (tools / name).symlink_to(shutil.which(name) or "")
    assert pin(project, path=str(tools)) == (
        1,
        "paceline: scripts/pin-images needs docker, which is not installed.",
    )
