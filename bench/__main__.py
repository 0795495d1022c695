"""`make bench`: the cost of the gateway compared with its peers."""

from __future__ import annotations

from bench.gateway.__main__ import main

if __name__ == "__main__":
    main()
    print("`python -m bench.engine` measures the engine.")
