"""`python -m autotune [VERB] +space=NAME [overrides]`: see autotune/cli/parser.py."""

import sys

from autotune.cli.parser import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
