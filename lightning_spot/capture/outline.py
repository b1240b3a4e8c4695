"""Lays checkpoints out by the best way that works here; what is given up for a slower one is said once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_spot.errors import NotSerialisable
from lightning_spot.image.layout import Layout, Layouter, lay_out_plain


class Outliner:
    """Makes layouts.

    Args:
        say_once: warns; called with a key, a message and its facts.
    """

    def __init__(self, say_once: Callable[..., None]) -> None:
        self._say_once = say_once
        self._layouter = Layouter()

    def lay_out(self, checkpoint: Any) -> Layout:
        """Lay ``checkpoint`` out.

        Raises:
            NotSerialisable: if it holds what cannot be pickled.
            MemoryError: if there is not the memory for it now; the next one may be laid out.
        """
        try:
            return self._layouter.lay_out(checkpoint)
        except MemoryError:
            raise
        except Exception as error:  # pickling runs the user's code, which may raise anything
            problem = f"{type(error).__name__}: {error}"
        try:
            layout = lay_out_plain(checkpoint)
        except MemoryError:
            raise
        except Exception as error:
            raise NotSerialisable(
                f"the training state cannot be serialised ({type(error).__name__}: {error}); look at what"
                " on_save_checkpoint, state_dict and hyperparameters put into the checkpoint"
            ) from error
        self._say_once("layout", "%s; snapshots are serialised with plain torch.save (slower)", problem)
        return layout
