"""``python -m nvalchemi_lightning`` is the command ``nvalchemi-lightning``."""

from __future__ import annotations

import sys

from nvalchemi_lightning.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
