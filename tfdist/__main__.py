"""Runs the command-line interface: `python -m tfdist` does the same as the command `tfdist`."""

import sys

from tfdist._src.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
