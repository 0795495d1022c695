"""`make bench`: the cost of the gateway compared with its peers."""

from __future__ import annotations

import sys

from bench.gateway import __main__ as gateway


def main() -> None:
    gateway.main()
    sys.stdout.write("`python -m bench.engine` measures the engine.\n")


if __name__ == "__main__":
    main()
