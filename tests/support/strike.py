"""An error that comes up in a function of ours, in the middle of training, as if it were its own."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

import lightning_spot

PACKAGE = str(Path(lightning_spot.__file__).parent) + "/"

# As if it came up in a function of ours: the module says whose code is at work.
_INJECTED = types.ModuleType("lightning_spot.injected")
exec(
    """
import sys

def striking(is_there, error, left):
    def strike(frame, event, _):
        if event == "call" and left and is_there(frame.f_code):
            left.pop()
            raise error
    return strike
""",
    _INJECTED.__dict__,
)


class Strike(pl.Callback):
    """Has functions of ours raise an error when they are called in the middle of training, so many times."""

    def __init__(self, where: str, error: Exception, times: int = 1, step: int = 5) -> None:
        self.left, self.step = [None] * times, step
        file, _, name = where.partition(":")
        path = f"{PACKAGE}{file}.py"

        def is_there(code: types.CodeType) -> bool:
            return code.co_filename == path and code.co_qualname == name

        self.strike = _INJECTED.striking(is_there, error, self.left)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step >= self.step and self.left:
            sys.setprofile(self.strike)  # Python takes it away when it raises

    def on_train_epoch_end(self, *_: Any) -> None:
        sys.setprofile(None)
