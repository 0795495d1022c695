"""`python -m workers`, which is `paceline worker`."""

import sys

from workers.blas import restart_with_blas

if __name__ == "__main__":
    restart_with_blas("workers")
    from workers.server.main import main  # takes a while: not for a process that is replaced

    sys.exit(main(sys.argv[1:]))
