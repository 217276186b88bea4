"""``python -m plait``."""

import sys

from plait._cli import main

if __name__ == "__main__":
    sys.exit(main())
