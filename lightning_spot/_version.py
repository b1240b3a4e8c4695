"""The version of lightning_spot."""

__version__ = "0.1.0"
