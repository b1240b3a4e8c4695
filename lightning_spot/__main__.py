"""``python -m lightning_spot`` is ``lightning-spot``."""

import sys

from lightning_spot.cli import main

sys.exit(main())
