"""Finds out on which cloud this machine is: from files that cost nothing, else by asking all of them at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from concurrent.futures import TimeoutError as NotInTime
from pathlib import Path

from lightning_spot.config import read_environment
from lightning_spot.errors import NoticeUnavailableError, SettingsError
from lightning_spot.preemption.alibaba import AlibabaSource
from lightning_spot.preemption.aws import AwsSource
from lightning_spot.preemption.azure import AzureSource
from lightning_spot.preemption.gcp import GcpSource
from lightning_spot.preemption.metadata_service import ask
from lightning_spot.preemption.notice import Notice, NoticeSource

ASK_ALL_S = 1.0
CLOUDS: dict[str, Callable[[], NoticeSource]] = {
    "aws": AwsSource,
    "gcp": GcpSource,
    "azure": AzureSource,
    "alibaba": AlibabaSource,
}

_DMI = Path("/sys/class/dmi/id")
_AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"
_VENDORS = {"Amazon EC2": "aws", "Google": "gcp", "Alibaba Cloud": "alibaba"}

Probe = tuple[str, str, str, dict[str, str]]
_PROBES: dict[str, Probe] = {
    "aws": ("http://169.254.169.254", "/latest/api/token", "PUT", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}),
    "gcp": ("http://169.254.169.254", "/computeMetadata/v1/instance/id", "GET", {"Metadata-Flavor": "Google"}),
    "azure": ("http://169.254.169.254", "/metadata/instance?api-version=2021-02-01", "GET", {"Metadata": "true"}),
    "alibaba": ("http://100.100.100.200", "/latest/meta-data/instance-id", "GET", {}),
}


def detect_cloud(dmi: Path = _DMI, probes: dict[str, Probe] | None = None) -> str | None:
    """The cloud this machine is on, or ``None``. Takes about a second at most, and none where the firmware tells.

    ``LIGHTNING_SPOT_CLOUD`` (a cloud's name, or ``none``) answers without a question.

    Args:
        dmi: directory of the firmware's identification.
        probes: what to ask, by cloud: endpoint, path, method, headers.
    """
    if given := _given():
        return given if given != "none" else None
    if _read(dmi, "chassis_asset_tag") == _AZURE_TAG:
        return "azure"
    for file in ("sys_vendor", "product_name", "board_vendor", "bios_vendor"):
        firmware = _read(dmi, file)
        for vendor, cloud in _VENDORS.items():
            if firmware.startswith(vendor):
                return cloud
    if _read(dmi, "sys_vendor"):
        return None  # it names a vendor, and that is no cloud
    return _ask_all(probes if probes is not None else _PROBES)


class AutoSource:
    """The cloud's source, found out when it is first asked, so that nothing waits for it.

    Args:
        detect: finds the cloud.

    Raises:
        SettingsError: if ``LIGHTNING_SPOT_CLOUD`` names none.
    """

    name = "auto"
    every_s = 1.0
    grace_period_s: float | None = None

    def __init__(self, detect: Callable[[], str | None] = detect_cloud) -> None:
        _given()  # what cannot be used is an error here, and not on the thread that asks
        self._detect = detect
        self._source: NoticeSource | None = None
        self._asked = False

    def poll(self) -> Notice | None:
        """Ask the cloud, if there is one."""
        if not self._asked:
            self._asked = True
            cloud = self._detect()
            if cloud is not None:
                self._source = source = CLOUDS[cloud]()
                self.name, self.every_s, self.grace_period_s = source.name, source.every_s, source.grace_period_s
            else:
                self.every_s = 3600.0
        return self._source.poll() if self._source is not None else None

    def close(self) -> None:
        """See :meth:`NoticeSource.close`."""
        if self._source is not None:
            self._source.close()


def _given() -> str | None:
    """What ``LIGHTNING_SPOT_CLOUD`` says; ``None`` if it is not set."""
    name = read_environment().cloud
    if name is not None and name not in (*CLOUDS, "none"):
        raise SettingsError(f"LIGHTNING_SPOT_CLOUD={name!r}: it is {', '.join(CLOUDS)} or none")
    return name


def _read(dmi: Path, file: str) -> str:
    try:
        return (dmi / file).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _ask_all(probes: dict[str, Probe]) -> str | None:
    pool = ThreadPoolExecutor(len(probes), thread_name_prefix="spot-detect")
    try:
        asked = {pool.submit(_answers, cloud, probe): cloud for cloud, probe in probes.items()}
        try:
            for done in as_completed(asked, timeout=ASK_ALL_S):
                if done.result():
                    return asked[done]
        except NotInTime:
            return None
    finally:
        pool.shutdown(wait=False)
    return None


def _answers(cloud: str, probe: Probe) -> bool:
    endpoint, path, method, headers = probe
    try:
        answer = ask(endpoint, path, source=cloud, headers=headers, method=method, wait_s=ASK_ALL_S / 2)
    except NoticeUnavailableError:
        return False
    return answer.status == 200 and (cloud != "gcp" or answer.headers.get("metadata-flavor") == "Google")
