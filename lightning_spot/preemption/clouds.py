"""The clouds: what the metadata service of each says of preemptions, and which one this machine is on.

- AWS EC2: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
- Google Compute Engine: https://cloud.google.com/compute/docs/instances/preemptible and
  https://cloud.google.com/compute/docs/metadata/querying-metadata
- Azure: https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
- Alibaba Cloud: https://www.alibabacloud.com/help/en/ecs/user-guide/query-the-interruption-events-of-preemptible-instances
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import http.client
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lightning_spot.config import read_environment
from lightning_spot.errors import MalformedError, NoticeUnavailableError, SettingsError
from lightning_spot.preemption.notice import Notice, NoticeSource
from lightning_spot.say import say
from lightning_spot.untrusted import plain, read_object

ASK_S = 2.0
_MOST_BYTES = 1024 * 1024
_LINK_LOCAL = "http://169.254.169.254"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a metadata service said.

    Attributes:
        status: of HTTP.
        text: body, without surrounding blanks.
        headers: by lower-case name.
    """

    status: int
    text: str
    headers: Mapping[str, str]


def ask(
    url: str, headers: Mapping[str, str], *, source: str, method: str = "GET", wait_s: float | None = None
) -> Answer:
    """Ask a metadata service once.

    ``http.client`` is used because it knows nothing of proxies: those of the environment must not see these addresses.

    Args:
        url: with its query.
        headers: to send.
        source: which service it is, for messages.
        method: of HTTP.
        wait_s: for each step of the exchange; default :data:`ASK_S`.

    Raises:
        NoticeUnavailableError: if there is no answer in time, or the service itself failed.
    """
    parts, wait_s = urlsplit(url), ASK_S if wait_s is None else wait_s
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=wait_s)
    try:
        with contextlib.closing(connection):
            connection.request(method, parts._replace(scheme="", netloc="").geturl(), headers=dict(headers))
            response = connection.getresponse()
            text = response.read(_MOST_BYTES).decode(errors="replace").strip()
            found = {name.lower(): value for name, value in response.getheaders()}
    except (OSError, http.client.HTTPException) as error:
        raise NoticeUnavailableError(f"{source} does not answer at {url} ({error or type(error).__name__})") from error
    if response.status >= 500 or response.status == 429:
        raise NoticeUnavailableError(f"{source} answers {response.status} at {url}")
    return Answer(response.status, text, found)


def seconds_until(text: str, answer: Answer) -> float:
    """Seconds from now until a time such as ``2026-01-01T12:00:00Z`` or ``Mon, 19 Sep 2026 18:29:47 GMT``; at least 0.

    Args:
        text: the time.
        answer: that names it, and when it was given: the clock of this machine may be hours off after its start.

    Raises:
        NoticeUnavailableError: if it is no time.
    """
    now = datetime.datetime.now(datetime.UTC)
    with contextlib.suppress(NoticeUnavailableError):
        now = _time_in(answer.headers.get("date", ""))
    return max(0.0, (_time_in(text) - now).total_seconds())


def _time_in(text: str) -> datetime.datetime:
    try:
        when = datetime.datetime.fromisoformat(text)
    except ValueError:
        try:
            when = parsedate_to_datetime(text)
        except (TypeError, ValueError) as error:
            raise NoticeUnavailableError(f"{text!r} is no time") from error
    return when if when.tzinfo is not None else when.replace(tzinfo=datetime.UTC)


class CloudSource(NoticeSource):
    """Asks the metadata service of a cloud.

    Args:
        endpoint: of the service; default the address that it has on each machine of the cloud.

    Attributes:
        address: see above.
        firmware: patterns of how the firmware names the cloud.
        headers: of each request.
    """

    every_s = 5.0
    grace_period_s: float | None = None
    address = _LINK_LOCAL
    firmware: tuple[str, ...]
    headers: Mapping[str, str] = {}

    def __init__(self, endpoint: str | None = None) -> None:
        self._endpoint = (endpoint or self.address).rstrip("/")

    def _is_good(self, answer: Answer) -> bool:
        return answer.status == 200

    def _get(self, path: str, *, wait_s: float | None = None, besides: Sequence[int] = ()) -> Answer:
        """Ask for something; another status than 200, and those named, is an error."""
        answer = ask(self._endpoint + path, self.headers, source=self.name, wait_s=wait_s)
        if not (self._is_good(answer) or answer.status in besides):
            raise NoticeUnavailableError(f"{self.name}: the metadata service answers {answer.status} for {path}")
        return answer

    def _json(self, answer: Answer) -> dict[str, Any]:
        try:
            return read_object(answer.text)
        except MalformedError as error:
            raise NoticeUnavailableError(
                f"{self.name} answered with something else than JSON: {plain(answer.text, 80)}"
            ) from error

    def _stop(self, text: str, grace_period_s: float | None) -> Notice:
        return Notice(source=self.name, text=text, grace_period_s=grace_period_s)


class AwsSource(CloudSource):
    """AWS EC2: interruptions, two minutes ahead, and rebalance recommendations, through IMDSv2.

    The endpoint may stand in ``AWS_EC2_METADATA_SERVICE_ENDPOINT``, too.
    """

    name = "aws"
    grace_period_s = 120.0
    firmware = ("Amazon EC2*", "*.amazon")  # the second on Xen, as p3

    def __init__(self, endpoint: str | None = None) -> None:
        super().__init__(endpoint or read_environment().aws_endpoint)

    def poll(self) -> Notice | None:
        """Ask for an interruption, then for a recommendation."""
        answer = self._get_with_token("/latest/meta-data/spot/instance-action")
        if answer.status == 200:
            facts = self._json(answer)
            action, at = facts.get("action"), facts.get("time")
            if not isinstance(action, str) or not isinstance(at, str):
                raise NoticeUnavailableError(f"aws: this is no instance action: {answer.text[:80]!r}")
            return self._stop(f"EC2 spot interruption: {action} at {at}", seconds_until(at, answer))
        answer = self._get_with_token("/latest/meta-data/events/recommendations/rebalance")
        if answer.status == 200 and "noticeTime" in self._json(answer):
            text = "EC2 recommends to rebalance: this instance is more likely than before to be interrupted"
            return Notice(source=self.name, kind="advice", text=text)
        return None

    def _get_with_token(self, path: str) -> Answer:
        if self.headers:
            answer = self._get(path, besides=(401, 404))
            if answer.status != 401:
                return answer
        # There is no token yet; or it has expired, or the service was restarted.
        lives = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
        token = ask(f"{self._endpoint}/latest/api/token", lives, source=self.name, method="PUT")
        if token.status != 200 or not token.text:
            raise NoticeUnavailableError(f"aws: the metadata service gives no token ({token.status})")
        self.headers = {"X-aws-ec2-metadata-token": token.text}
        return self._get(path, besides=(404,))


class GcpSource(CloudSource):
    """Google Compute Engine: preemption, as little as 0 to 30 seconds ahead, and host maintenance.

    The server holds its answer back until something changes. Its address may stand in ``GCE_METADATA_HOST``, too.

    Args:
        endpoint: of the server.
        hold_s: how long it may hold an answer back.
    """

    name = "gcp"
    every_s = 1.0
    grace_period_s = 30.0
    firmware = ("Google*",)
    headers: Mapping[str, str] = {"Metadata-Flavor": "Google"}

    def __init__(self, endpoint: str | None = None, hold_s: float = 10.0) -> None:
        host = read_environment().gcp_host
        super().__init__(endpoint or (f"http://{host}" if host else None))
        self._hold_s = hold_s
        self._etag = ""

    def poll(self) -> Notice | None:
        """Ask for maintenance, then wait for a preemption."""
        path = "/computeMetadata/v1/instance"
        if self._get(f"{path}/maintenance-event").text == "TERMINATE_ON_HOST_MAINTENANCE":
            return self._stop("GCE host maintenance will terminate this instance", 60.0)
        query = f"?wait_for_change=true&timeout_sec={self._hold_s:.0f}&last_etag={self._etag}" if self._etag else ""
        preempted = self._get(f"{path}/preempted{query}", wait_s=self._hold_s + ASK_S)
        self._etag = preempted.headers.get("etag", "")
        if preempted.text not in ("TRUE", "FALSE"):
            raise NoticeUnavailableError(f"gcp: {preempted.text[:40]!r} is neither TRUE nor FALSE")
        return self._stop("GCE preempts this instance", self.grace_period_s) if preempted.text == "TRUE" else None

    def _is_good(self, answer: Answer) -> bool:
        return super()._is_good(answer) and answer.headers.get("metadata-flavor") == "Google"


class AzureSource(CloudSource):
    """Azure: Scheduled Events, which announce a preemption 30 seconds ahead, and may be withdrawn.

    They list the VMs that they concern. The first question switches them on, and may take two minutes.
    """

    name = "azure"
    every_s = 1.0
    grace_period_s = 30.0
    firmware = ("7783-7084-3265-9085-8269-3286-77",)
    headers: Mapping[str, str] = {"Metadata": "true"}

    def __init__(self, endpoint: str | None = None) -> None:
        super().__init__(endpoint)
        self._vm = ""
        self._wait_s = 130.0

    def poll(self) -> Notice | None:
        """Ask for events that concern this VM. ``None`` after a notice means that the event was withdrawn."""
        if not self._vm:
            path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            self._vm = self._get(path, wait_s=10.0).text
        answer = self._get("/metadata/scheduledevents?api-version=2020-07-01", wait_s=self._wait_s)
        self._wait_s = 10.0
        events = self._json(answer).get("Events")
        if not isinstance(events, list):
            raise NoticeUnavailableError(f"azure: this is no list of events: {answer.text[:80]!r}")
        for event in events:
            kind, at = event.get("EventType"), event.get("NotBefore")
            if kind not in ("Preempt", "Terminate", "Reboot", "Redeploy") or self._vm not in event.get("Resources", ()):
                continue
            if at:
                return self._stop(f"Azure scheduled event: {kind} of {self._vm} at {at}", seconds_until(at, answer))
            has_started = event.get("EventStatus") == "Started"  # then there is no time in it any more
            return self._stop(
                f"Azure scheduled event: {kind} of {self._vm}", 0.0 if has_started else self.grace_period_s
            )
        return None


class AlibabaSource(CloudSource):
    """Alibaba Cloud ECS: the time at which a preemptible instance is released, five minutes ahead."""

    name = "alibaba"
    grace_period_s = 300.0
    address = "http://100.100.100.200"
    firmware = ("Alibaba Cloud*",)

    def poll(self) -> Notice | None:
        """Ask for the time."""
        at = self._get("/latest/meta-data/instance/spot/termination-time", besides=(404,))
        if at.status == 404 or not at.text:
            return None
        return self._stop(f"Alibaba Cloud releases this instance at {at.text[:40]}", seconds_until(at.text, at))


CLOUDS: dict[str, type[CloudSource]] = {kind.name: kind for kind in (AwsSource, GcpSource, AzureSource, AlibabaSource)}

_DMI = Path("/sys/class/dmi/id")
_FIRMWARE = ("chassis_asset_tag", "sys_vendor", "product_name", "board_vendor", "bios_vendor", "bios_version")


def detect_cloud(dmi: Path = _DMI) -> str | None:
    """The cloud this machine is on, by its environment or firmware; ``None`` for none, or where neither tells.

    Args:
        dmi: directory of the firmware's identification.

    Raises:
        SettingsError: if ``LIGHTNING_SPOT_CLOUD`` names none.
    """
    environment = read_environment()
    if (name := environment.cloud) is not None:
        if name not in (*CLOUDS, "none"):
            raise SettingsError(f"LIGHTNING_SPOT_CLOUD={name!r}: it is {', '.join(CLOUDS)} or none")
        return name if name != "none" else None
    if environment.aws_endpoint:
        return AwsSource.name
    if environment.gcp_host:
        return GcpSource.name
    found = [text for file in _FIRMWARE if (text := _read(dmi / file))]
    if not found:
        text = (
            "{about} cannot be read, so the cloud of this machine is not known. A preemption notice may go unnoticed."
            " Set LIGHTNING_SPOT_CLOUD to {clouds} or none"
        )
        say(logging.WARNING, "cloud-unknown", text, about=dmi, only_rank_zero=True, clouds=", ".join(CLOUDS))
    for cloud, kind in CLOUDS.items():
        if any(fnmatchcase(text, pattern) for text in found for pattern in kind.firmware):
            return cloud
    return None


@functools.cache  # a callback is checked when it is made, and opens its sources in each fit
def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
