"""`python -m gateway`, which is `paceline`."""

import sys

from gateway.cli import main

if __name__ == "__main__":
    sys.exit(main())
