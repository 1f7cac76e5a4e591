"""`python -m halfmatch` is `halfmatch`."""

import sys

from halfmatch.cli import main

if __name__ == "__main__":
    sys.exit(main())
