"""`paceline doctor` on the demo checkpoint, as a user runs it."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.protocol import ExitCode
from workers.demo import CHECKPOINT
from workers.doctor.report import Report


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command; fail with the stacks of its threads if it hangs, as it was once seen to."""
    command = [sys.executable, "-X", "faulthandler", "-m", "gateway", "doctor", *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            output, problems = process.communicate(timeout=200)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)
            pytest.fail(process.communicate()[1])
    return subprocess.CompletedProcess(command, process.returncode, output, problems)


@pytest.fixture(scope="module")
def examined(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, str]:
    """Return the report of a short run, read from its file, and the text on the terminal."""
    file = tmp_path_factory.mktemp("doctor") / "report.json"
    process = doctor("--seconds", "1", "--json", str(file))
    assert process.returncode == 0, process.stderr
    assert str(file) in process.stdout
    return Report.model_validate_json(file.read_text()), process.stdout


def test_the_report_has_machine_model_and_measurements(examined: tuple[Report, str]) -> None:
    report, text = examined
    assert report.model.name == "demo"
    assert report.model.shares_passes
    assert report.model.verifies_natively
    assert report.prefill_tokens_per_s > 0
    assert (1, 0) in {(one.rows, one.k) for one in report.rounds}
    assert all(one.round_s > 0 and one.samples > 0 for one in report.rounds)
    assert "What this machine should run" in text or not report.advice
    assert report.failures == ()


def test_what_the_time_did_not_suffice_for_is_named(examined: tuple[Report, str]) -> None:
    report, text = examined
    measured = {f"rounds of {one.rows} with k = {one.k}" for one in report.rounds}
    assert not measured & set(report.skipped)
    assert all(f"- {name}" in text for name in report.skipped)


def test_the_report_names_neither_folder_nor_host(examined: tuple[Report, str]) -> None:
    report, _ = examined
    assert str(Path.home()) not in report.model_dump_json()
    assert str(CHECKPOINT.parent) not in report.model_dump_json()


def test_a_model_that_does_not_exist_is_one_sentence(tmp_path: Path) -> None:
    process = doctor("--model", str(tmp_path / "none"), "--json", str(tmp_path / "report.json"))
    assert process.returncode == ExitCode.MODEL
    assert process.stderr.count("\n") == 1
    assert "is neither a folder nor" in process.stderr
