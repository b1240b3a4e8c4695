"""SpotCLI: a LightningCLI with ``--spot.*`` flags, and ``spot:`` in its configuration files."""

from __future__ import annotations

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lightning_spot.callbacks.spot_checkpoint import SpotCheckpoint
from lightning_spot.config import requested_run


class SpotCLI(LightningCLI):
    """Lightning's command line, with every argument of :class:`SpotCheckpoint` as a flag.

    With a command line of your own, inherit from both: ``class CLI(SpotCLI, YourCLI)``.

    Example::

        from lightning_spot import SpotCLI

        SpotCLI(Model, DataModule)  # python train.py fit --spot.dirpath s3://bucket/run-1
    """

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add ``--spot.*``; ``LIGHTNING_SPOT`` is the default of ``--spot.dirpath``."""
        super().add_arguments_to_parser(parser)
        parser.add_lightning_class_args(SpotCheckpoint, "spot")
        if (run := requested_run()) is not None:
            parser.set_defaults({"spot.dirpath": run[0], "spot.servers": run[1]})
