"""`python -m tfdist`, the same as the console script `tfdist`."""

import sys

from tfdist._src.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
