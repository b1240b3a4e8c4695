"""The ``lightning-spot`` command. Imports neither torch nor Lightning."""

from lightning_spot.cli.command import main

__all__ = ["main"]
