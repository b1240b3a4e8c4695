"""Lays a checkpoint out by the best way that works here; what is given up for a slower one is said once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_spot.errors import LayoutUnsupported, NotSerialisable
from lightning_spot.image.layout import Layout, lay_out, lay_out_plain


class Outliner:
    """Makes layouts.

    Args:
        scratch: directory for outlines, best on tmpfs; ``None`` for the temporary directory.
        say_once: warns; called with a key, a message and its facts.
    """

    def __init__(self, scratch: Path | None, say_once: Callable[..., None]) -> None:
        self.scratch = scratch
        self._say_once = say_once

    def lay_out(self, checkpoint: Any) -> Layout:
        """Lay ``checkpoint`` out.

        Raises:
            NotSerialisable: if it holds what cannot be pickled.
        """
        try:
            return self._try(checkpoint)
        except Exception as error:  # pickling runs the user's code, which may raise anything
            raise NotSerialisable(
                f"the training state cannot be serialised ({type(error).__name__}: {error}); look at what"
                " on_save_checkpoint, state_dict and hyperparameters put into the checkpoint"
            ) from error

    def _try(self, checkpoint: Any) -> Layout:
        try:
            return lay_out(checkpoint, self.scratch)
        except LayoutUnsupported as error:
            self._say_once("layout", "%s; snapshots are serialised with plain torch.save (slower)", error)
        except OSError as error:
            self._say_once("scratch", "%s has no room for a file's outline (%s)", self.scratch, error)
            self.scratch = None
            try:
                return lay_out(checkpoint)
            except OSError as full:
                self._say_once("scratch-tmp", "nor has the temporary directory (%s); using plain torch.save", full)
        return lay_out_plain(checkpoint)
