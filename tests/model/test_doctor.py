"""`paceline doctor` on the demo checkpoint, as a user runs it."""

import signal
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from paceline.protocol import ExitCode
from workers.demo import CHECKPOINT
from workers.doctor.measure import Session, measure_all
from workers.doctor.report import Report
from workers.engine.engine import load_engine
from workers.engine.types import EngineSettings


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command; fail with the stacks of its threads if it hangs, as it was once seen to."""
    command = [sys.executable, "-X", "faulthandler", "-m", "gateway", "doctor", *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            output, problems = process.communicate(timeout=700)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)
            pytest.fail(process.communicate()[1])
    return subprocess.CompletedProcess(command, process.returncode, output, problems)


@pytest.fixture(scope="module")
def examined(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, str]:
    """Return the report of a whole run, read from its file, and the text on the terminal."""
    file = tmp_path_factory.mktemp("doctor") / "report.json"
    process = doctor("--seconds", "600", "--json", str(file))
    assert process.returncode == 0, process.stderr
    assert str(file) in process.stdout
    return Report.model_validate_json(file.read_text()), process.stdout


def test_the_report_has_machine_model_and_measurements(examined: tuple[Report, str]) -> None:
    report, text = examined
    assert report.model.name == "demo"
    assert report.model.shares_passes
    assert report.model.verifies_natively
    assert report.prefill_tokens_per_s > 0
    assert {(one.rows, one.k) for one in report.rounds} == {*product((1, 2, 4, 8), range(4))}
    assert all(one.round_s > 0 and one.samples > 0 for one in report.rounds)
    assert len(report.acceptance) == 3
    assert min(report.acceptance) > 0
    assert report.exact is not None
    assert report.exact.same_bits == report.exact.answers == 8
    assert report.with_drafts is not None
    assert report.in_company is not None
    assert {*map(len, (report.skipped, report.failures))} == {0}
    assert "What this machine should run" in text
    assert all(line in " ".join(text.split()) for line in report.advice)


def test_what_the_time_did_not_suffice_for_is_named_and_no_advice_rests_on_it() -> None:
    engine = load_engine(EngineSettings(model=CHECKPOINT, served_name="demo"))
    found = measure_all(Session(engine, until_s=0.0))
    assert {"reading a prompt", "answers alone", "rounds of 1 with k = 0"} <= set(found["skipped"])
    assert (found["rounds"], found["failures"]) == ((), ())


def test_the_report_names_neither_folder_nor_host(examined: tuple[Report, str]) -> None:
    report, _ = examined
    assert str(Path.home()) not in report.model_dump_json()
    assert str(CHECKPOINT.parent) not in report.model_dump_json()


def test_a_model_that_does_not_exist_is_one_sentence(tmp_path: Path) -> None:
    process = doctor("--model", str(tmp_path / "none"), "--json", str(tmp_path / "report.json"))
    assert process.returncode == ExitCode.MODEL
    assert process.stderr.count("\n") == 1
    assert "is neither a folder nor" in process.stderr
