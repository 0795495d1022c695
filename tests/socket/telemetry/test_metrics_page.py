"""The reference page of metrics lists all exposed metrics and no others."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.support.running_gateway import RunningGateway

PAGE = Path(__file__).parents[3] / "docs/reference/metrics.md"


def test_the_metrics_page_lists_exactly_the_exposed_metrics(
    gateway_with_traffic: RunningGateway,
) -> None:
    text = gateway_with_traffic.client.get("/metrics").text
    exposed = {
        family.name + "_total" * (family.type == "counter"): family.type
        for family in text_string_to_metric_families(text)
    }
    rows = re.findall(r"^\| `((?:paceline_|vllm:)\w+)` \| (\w+) \|", PAGE.read_text(), re.MULTILINE)
    assert dict(rows) == exposed
