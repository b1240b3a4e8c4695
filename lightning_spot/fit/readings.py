"""Reads the training loss without making the device wait, and logged metrics without changing what is logged."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    pass

READ_EVERY_S = 0.1


class LossReadings:
    """Means of the training loss over short times.

    On a GPU the sum stays there, and its copy to the host is looked at one reading later, when it has long arrived.
    """

    def __init__(self) -> None:
        self._sum: torch.Tensor | None = None
        self._count = 0
        self._read_s = time.monotonic()
        self._value: float | None = None
        self._arriving: tuple[int, torch.Tensor, torch.cuda.Event] | None = None

    def add(self, outputs: Any, step: int) -> tuple[int, float] | None:
        """The outputs of a training step; returns a step and the mean loss around it when there is a new one."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            return None
        loss = loss.detach()
        self._sum = loss.clone() if self._sum is None else self._sum + loss
        self._count += 1
        now_s = time.monotonic()
        if now_s - self._read_s < READ_EVERY_S:
            return None
        self._read_s = now_s
        mean, self._sum, count, self._count = self._sum, None, self._count, 0
        mean = mean.double() / count
        if mean.device.type != "cuda":
            return step, float(mean)
        arrived, self._arriving = self._arriving, None
        host = torch.empty((), dtype=mean.dtype, pin_memory=True)
        host.copy_(mean.reshape(()), non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._arriving = (step, host, event)
        if arrived is None or not arrived[2].query():  # type: ignore[no-untyped-call]
            return None
        return arrived[0], float(arrived[1])

    def read_at_times(self, read: Callable[[], float | None], step: int) -> tuple[int, float] | None:
        """A logged metric, looked at as often as the loss; a value that was read before is no new reading."""
        now_s = time.monotonic()
        if now_s - self._read_s < READ_EVERY_S:
            return None
        self._read_s = now_s
        value, before = read(), self._value
        if value is None or value == before:
            return None
        self._value = value
        return step, value
