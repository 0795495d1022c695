"""The command `promtool` of Prometheus, as it is installed here."""

import shutil

from bench.clients import cases


@cases.once("check metrics")
def metrics() -> str:
    if shutil.which("promtool") is None:
        raise cases.Failed("is not installed (Debian: prometheus)")
    # It exits with 3 for style warnings.
    warnings = cases.command(
        "promtool", "check", "metrics", stdin=cases.get("/metrics"), expected_codes=(0, 3)
    ).splitlines()
    unexpected = [line for line in warnings if not (line.startswith("vllm:") and "':'" in line)]
    cases.check(not unexpected, "; ".join(unexpected))
    return f"only warns about the ':' in the {len(warnings)} names of vLLM"


if __name__ == "__main__":
    cases.main()
