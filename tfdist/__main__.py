"""`python -m tfdist`, the same as the console script `tfdist`."""

from __future__ import annotations

import sys

from tfdist._src.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
