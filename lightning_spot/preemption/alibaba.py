"""Alibaba Cloud ECS: the termination time of a preemptible instance, five minutes ahead.

https://www.alibabacloud.com/help/en/ecs/user-guide/query-the-interruption-events-of-preemptible-instances
"""

from __future__ import annotations

import time

from lightning_spot.errors import NoticeUnavailableError
from lightning_spot.preemption.metadata_service import ask, seconds_until
from lightning_spot.preemption.notice import Notice

_PATH = "/latest/meta-data/instance/spot/termination-time"


class AlibabaSource:
    """Asks the metadata server.

    Args:
        endpoint: of the server; default its address in every region.
    """

    name = "alibaba"
    every_s = 5.0
    grace_period_s: float | None = 300.0

    def __init__(self, endpoint: str = "http://100.100.100.200") -> None:
        self._endpoint = endpoint.rstrip("/")

    def poll(self) -> Notice | None:
        """Ask for the time."""
        answer = ask(self._endpoint, _PATH, source=self.name, headers={})
        if answer.status == 404 or (answer.status == 200 and not answer.text):
            return None
        if answer.status != 200:
            raise NoticeUnavailableError(f"alibaba: the metadata server answers {answer.status}")
        return Notice(
            source=self.name,
            kind="stop",
            text=f"Alibaba Cloud releases this instance at {answer.text[:40]}",
            seen_s=time.monotonic(),
            grace_period_s=seconds_until(answer.text),
        )

    def close(self) -> None:
        """See :meth:`NoticeSource.close`."""
