"""Reads the training loss, or a logged metric, without making the device wait, and without changing what is logged."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from lightning_spot.exact.private import writes_of
from lightning_spot.staging.device import Cuda, Device

READ_EVERY_S = 0.1
_MOST_ARRIVING = 64  # so many readings a host may be ahead of its GPU; where it is further, some are left out

Reading = tuple[int, float]
"""A step, and the value around it."""


class Readings:
    """Means of the training loss over short times, or the values of a logged metric.

    On a GPU a value stays there, and its copy to the host is looked at when it has arrived: some steps later.

    Args:
        device: calls the GPUs.
    """

    def __init__(self, device: Device | None = None) -> None:
        self._device: Device = device if device is not None else Cuda()
        self._sum: torch.Tensor | None = None
        self._count = 0
        self._read_s = time.monotonic()
        self._value: float | None = None
        self._arriving: deque[tuple[int, torch.Tensor, Any]] = deque()
        self._sent: tuple[torch.Tensor, int] | None = None

    def add(self, outputs: Any, step: int) -> Reading | None:
        """The outputs of a training step; returns a step and the mean loss around it when there is a new one."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            return None
        loss = loss.detach()
        self._sum = loss.clone() if self._sum is None else self._sum + loss
        self._count += 1
        if not self._is_time():
            return None
        mean, self._sum, count, self._count = self._sum, None, self._count, 0
        mean = mean.double() / count
        if not _is_on_gpu(mean):
            return step, float(mean)
        arrived = self._arrived()
        self._send(mean, step)
        return arrived

    def read_at_times(self, read: Callable[[], torch.Tensor | float | None], step: int) -> Reading | None:
        """A logged metric, looked at as often as the loss; a value that was read before is no new reading."""
        if not self._is_time():
            return None
        value = read()
        if not isinstance(value, torch.Tensor) or not _is_on_gpu(value):
            return self._new(None if value is None else (step, float(value)))
        arrived = self._arrived()
        if self._sent is None or self._sent[0] is not value or self._sent[1] != writes_of(value):
            self._sent = value, writes_of(value)
            self._send(value, step)
        return self._new(arrived)

    def _is_time(self) -> bool:
        now_s = time.monotonic()
        if now_s - self._read_s < READ_EVERY_S:
            return False
        self._read_s = now_s
        return True

    def _send(self, value: torch.Tensor, step: int) -> None:
        if len(self._arriving) < _MOST_ARRIVING:
            self._arriving.append((step, *self._device.to_host(value.detach())))

    def _arrived(self) -> Reading | None:
        """The next one of those that were sent, if it is there."""
        if not self._arriving or not self._device.is_over(self._arriving[0][2]):
            return None
        step, host, _ = self._arriving.popleft()
        return step, float(host)

    def _new(self, reading: Reading | None) -> Reading | None:
        if reading is None or reading[1] == self._value:
            return None
        self._value = reading[1]
        return reading


def _is_on_gpu(value: torch.Tensor) -> bool:
    return value.device.type == "cuda"
