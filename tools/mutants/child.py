"""The process that runs pytest: `python -m tools.mutants.child PLAN.json RESULT.json`.

It runs in a copy of the tree, either to measure which lines each test runs or to try one mutant.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

_FIXTURE = "fixture "


class MeasurementPlugin:
    """Plugin that records which lines each test runs, and how long it takes.

    A fixture that several tests share runs only within the first of them; its lines and its time
    count for every test that uses it.
    """

    def __init__(self, sources: list[str]) -> None:
        from coverage import Coverage  # noqa: PLC0415 - a trial does not need it

        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: list[str] = []
        self._shared: dict[str, float] = {}
        """Setup seconds of each shared fixture."""
        self._fixtures_by_test: dict[str, list[str]] = {}
        """The fixtures of each test."""
        self._context = ""
        self._coverage = Coverage(
            data_file=None, config_file=False, source=sources, messages=False, branch=False
        )
        self._coverage.start()

    def _switch(self, context: str) -> None:
        self._context = context
        self._coverage.switch_context(context)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Measure lines in the context of the test."""
        self._fixtures_by_test[item.nodeid] = list(getattr(item, "fixturenames", ()))
        self._switch(item.nodeid)
        try:
            return (yield)
        finally:
            self._switch("")

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, Any, Any]:
        """Measure the lines of a shared fixture in its own context."""
        del request
        if fixturedef.scope == "function":
            return (yield)
        outer_context, started_s = self._context, time.perf_counter()
        self._switch(_FIXTURE + fixturedef.argname)
        try:
            return (yield)
        finally:
            self._switch(outer_context)
            duration_s = time.perf_counter() - started_s
            self._shared[fixturedef.argname] = duration_s
            if not outer_context.startswith(_FIXTURE):
                self.seconds[outer_context] -= duration_s

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up setup, call and teardown."""
        self.seconds[report.nodeid] += report.duration
        if not report.passed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)

    def result(self) -> dict[str, Any]:
        """Return the seconds of each test, and for each file the lines that each test runs."""
        self._coverage.stop()
        data = self._coverage.get_data()
        root = Path.cwd()
        files: dict[str, dict[str, list[int]]] = {}
        for name in sorted(data.measured_files()):
            by_context: dict[str, set[int]] = defaultdict(set)
            for line, contexts in data.contexts_by_lineno(name).items():
                for context in contexts:
                    by_context[context].add(line)
            shared = {
                context.removeprefix(_FIXTURE): lines
                for context, lines in by_context.items()
                if context.startswith(_FIXTURE)
            }
            tests = {}
            for test, fixtures in self._fixtures_by_test.items():
                lines = by_context[test].union(*(shared.get(fixture, ()) for fixture in fixtures))
                if lines:
                    tests[test] = sorted(lines)
            files[Path(name).relative_to(root).as_posix()] = tests
        seconds = {
            test: max(self.seconds[test], 0.0)
            + sum(self._shared.get(fixture, 0.0) for fixture in fixtures)
            for test, fixtures in self._fixtures_by_test.items()
        }
        return {"seconds": seconds, "failed": self.failed, "files": files}


class TrialPlugin:
    """Plugin that runs chosen tests in a given order, each with a time limit."""

    def __init__(self, limits_s: dict[str, float]) -> None:
        self._limits_s = limits_s
        self._ran: set[str] = set()
        self._failed = ""
        self._timed_out = False
        self._seconds = 0.0

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """Disable the search of Hypothesis for a smallest example.

        The project's `conftest.py` has loaded its profile by now, and no test is collected yet.
        """
        # An earlier import causes a warning of its pytest plugin.
        from hypothesis import Phase, settings  # noqa: PLC0415

        no_shrinking = settings(phases=(Phase.explicit, Phase.generate))
        settings.register_profile("mutants", no_shrinking)
        settings.load_profile("mutants")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Select the chosen tests, in the order of the plan.

        A mutant may change the values that parametrise a test, and so its name: then all tests of
        that function are selected.
        """
        items_by_id = {item.nodeid: item for item in items}
        chosen: dict[pytest.Item, float] = {}
        for test, limit_s in self._limits_s.items():
            if test in items_by_id:
                chosen[items_by_id[test]] = limit_s
            else:
                start = test.partition("[")[0] + "["
                renamed = (item for item in items if item.nodeid.startswith(start))
                chosen |= {item: limit_s for item in renamed if item not in chosen}
        for item, limit_s in chosen.items():
            item.add_marker(pytest.mark.timeout(limit_s), append=False)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = list(chosen)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the first failure; an expected one is none."""
        self._ran.add(report.nodeid)
        self._seconds += report.duration
        if report.failed and not self._failed:
            self._failed = report.nodeid
            self._timed_out = "Failed: Timeout" in str(report.longrepr)

    def result(self) -> dict[str, Any]:
        """Return which test failed, whether for its time, and how many ran."""
        return {"failed": self._failed, "timed_out": self._timed_out, "ran": len(self._ran)}


def main(plan_file: str, result_file: str) -> int:
    """Run pytest with the plan, and write the result."""
    plan: dict[str, Any] = json.loads(Path(plan_file).read_text())
    if sys.platform == "linux" and plan["memory_gib"]:
        limit_bytes = int(plan["memory_gib"] * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    plugin: MeasurementPlugin | TrialPlugin
    plugin = (
        MeasurementPlugin(plan["sources"]) if "sources" in plan else TrialPlugin(plan["limits_s"])
    )
    status = pytest.main(plan["arguments"], plugins=[plugin])
    Path(result_file).write_text(json.dumps({"status": int(status), **plugin.result()}))
    return int(status)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
