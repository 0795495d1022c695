"""`python -m workers`, which is `paceline worker`."""

import sys

from workers.server.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
