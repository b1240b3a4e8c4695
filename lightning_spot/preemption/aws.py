"""AWS EC2: spot interruption notices (two minutes ahead) and rebalance recommendations, through IMDSv2.

https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
"""

from __future__ import annotations

import time

from lightning_spot.config import read_environment
from lightning_spot.errors import NoticeUnavailableError
from lightning_spot.preemption.metadata_service import Answer, ask, seconds_until
from lightning_spot.preemption.notice import Notice

_TOKEN_S = 21600
_HEADER = "X-aws-ec2-metadata-token"


class AwsSource:
    """Asks IMDSv2.

    Args:
        endpoint: of the service; default ``AWS_EC2_METADATA_SERVICE_ENDPOINT`` or the link-local address.
    """

    name = "aws"
    every_s = 5.0
    grace_period_s: float | None = 120.0

    def __init__(self, endpoint: str | None = None) -> None:
        given = endpoint or read_environment().aws_endpoint
        self._endpoint = (given or "http://169.254.169.254").rstrip("/")
        self._token = ""

    def poll(self) -> Notice | None:
        """Ask for an interruption, then for a recommendation."""
        answer = self._get("/latest/meta-data/spot/instance-action")
        if answer.status == 200:
            return self._interruption(answer)
        answer = self._get("/latest/meta-data/events/recommendations/rebalance")
        if answer.status == 200 and "noticeTime" in answer.json(self.name):
            text = "EC2 recommends to rebalance: this instance is more likely than before to be interrupted"
            return Notice(source=self.name, kind="advice", text=text, seen_s=time.monotonic())
        return None

    def close(self) -> None:
        """See :meth:`NoticeSource.close`."""

    def _interruption(self, answer: Answer) -> Notice:
        facts = answer.json(self.name)
        action, at = facts.get("action"), facts.get("time")
        if not isinstance(action, str) or not isinstance(at, str):
            raise NoticeUnavailableError(f"aws: this is no instance action: {answer.text[:80]!r}")
        return Notice(
            source=self.name,
            kind="stop",
            text=f"EC2 spot interruption: {action} at {at}",
            seen_s=time.monotonic(),
            grace_period_s=seconds_until(at),
        )

    def _get(self, path: str) -> Answer:
        for _ in range(2):
            if not self._token:
                self._token = self._new_token()
            answer = ask(self._endpoint, path, source=self.name, headers={_HEADER: self._token})
            if answer.status != 401:
                break
            self._token = ""  # it has expired, or the service was restarted
        if answer.status not in (200, 404):
            raise NoticeUnavailableError(f"aws: the metadata service answers {answer.status} for {path}")
        return answer

    def _new_token(self) -> str:
        headers = {f"{_HEADER}-ttl-seconds": str(_TOKEN_S)}
        answer = ask(self._endpoint, "/latest/api/token", source=self.name, headers=headers, method="PUT")
        if answer.status != 200 or not answer.text:
            raise NoticeUnavailableError(f"aws: the metadata service gives no token ({answer.status})")
        return answer.text
