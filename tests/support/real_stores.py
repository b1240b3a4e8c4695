"""Servers that are no AWS, started on loopback from where ``make stores`` has installed them, each with its library.

As a program (``python -m tests.support.real_stores URL NBYTES``) it puts one snapshot, for tests that kill it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from datetime import UTC
from pathlib import Path
from typing import Any

import fsspec
import psutil
import pytest

from lightning_spot.client.stores import open_store
from lightning_spot.snapshot.manifest import Manifest, snapshot_name
from tests.support.oracle import HOME, claim_of
from tests.support.waiting import kept_port, until

INSTALLED = Path(os.environ.get("STORES") or HOME / ".stores")
CLIENTS = INSTALLED / "clients"


class Server:
    """A server, which keeps what it has from one start to the next.

    Each has a ``program()``, the ``command(read_only=)`` that starts it, and the ``environment(wrong=)`` of its
    clients: where it is, and credentials, right or wrong ones.

    Args:
        folder: of its own.
        port: of loopback.

    Attributes:
        endpoint: where its clients connect.
    """

    name = scheme = ""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port
        self.endpoint = f"http://127.0.0.1:{port}"
        self.process: subprocess.Popen[bytes] | None = None
        self._log = folder / "server.log"
        folder.mkdir()

    def read_only(self) -> dict[str, str] | None:
        """Credentials that may read only; ``None`` if it has none."""
        return None

    def start(self, *, read_only: bool = False) -> None:
        self.process = self.begin(self.command(read_only=read_only))

        def answers() -> bool:
            assert self.process.poll() is None, self._log.read_text()[-2000:]
            with socket.socket() as connection:
                return connection.connect_ex(("127.0.0.1", self.port)) == 0

        until(answers, f"{self.name} to listen", 120)

    def begin(self, command: list[str]) -> subprocess.Popen[bytes]:
        """Start one of its programs."""
        with open(self._log, "ab") as log:
            environment = {**os.environ, **self.own_environment()}
            return subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=self.folder)

    def own_environment(self) -> dict[str, str]:
        """What its programs need."""
        return {}

    def end(self) -> None:
        """Stop for good, with what stands behind it."""
        self.stop()

    def nbytes(self) -> int:
        """How much it holds by now, also of what is not complete."""
        total = 0
        for home, _, names in os.walk(self.folder):
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # it was renamed
                    total += os.stat(os.path.join(home, name)).st_blocks * 512
        return total

    def stop(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()

    def bucket(self, name: str) -> str:
        """Make a bucket; its URL."""
        fsspec.filesystem(self.scheme, use_listings_cache=False, skip_instance_cache=True).mkdir(name)
        return f"{self.scheme}://{name}"


class S3Server(Server):
    """One that speaks the protocol of S3."""

    scheme = "s3"

    def environment(self, *, wrong: bool = False) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "another-secret" if wrong else "testing-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }


class MinioGateway(S3Server):
    name = "MinIO gateway"

    @classmethod
    def program(cls) -> Path:
        return INSTALLED / "minio" / "bin" / "juicefs"

    def command(self, *, read_only: bool) -> list[str]:
        program, records = str(self.program()), f"sqlite3://{self.folder}/records.db"
        made = [program, "format", "--storage", "file", "--bucket", f"{self.folder}/data/", "--trash-days", "0"]
        subprocess.run([*made, records, "volume"], check=True, capture_output=True)
        flags = ["--multi-buckets", "--no-banner", "--no-usage-report", "--metrics", "127.0.0.1:0"]
        flags += ["--cache-dir", f"{self.folder}/cache", "--log", f"{self.folder}/gateway.log"]
        return [program, "gateway", *flags, *["--read-only"] * read_only, records, f"127.0.0.1:{self.port}"]

    def own_environment(self) -> dict[str, str]:
        return {"MINIO_ROOT_USER": "testing", "MINIO_ROOT_PASSWORD": "testing-secret"}

    def read_only(self) -> dict[str, str]:
        self.stop()
        self.start(read_only=True)
        return self.environment()


class CephGateway(S3Server):
    """Ceph's gateway before a cluster of one monitor and one disk in memory, which is there as long as the test is."""

    name = "Ceph gateway"
    _unpacked = INSTALLED / "ceph" / "usr"
    _settings = """[global]
fsid = {uuid}
mon_host = v2:127.0.0.1:{port}
public_addr = 127.0.0.1
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
ms_mon_client_mode = crc
ms_bind_ipv6 = false
run_dir = {folder}
admin_socket = {folder}/$name.asok
log_file = {folder}/$name.log
mon_cluster_log_file = {folder}/cluster.log
keyring = {folder}/keyring
mon_data = {folder}/mon
osd_data = {folder}/osd
osd_objectstore = memstore
memstore_device_bytes = 4294967296
osd_pool_default_size = 1
osd_pool_default_pg_num = 1
osd_crush_chooseleaf_type = 0
mon_allow_pool_size_one = true
osd_class_dir = {libraries}/rados-classes
plugin_dir = {libraries}/ceph
erasure_code_dir = {libraries}/ceph/erasure-code
rgw_frontends = beast endpoint={endpoint}
"""

    def __init__(self, folder: Path, port: int) -> None:
        super().__init__(folder, port)
        self._behind = contextlib.ExitStack()
        self._disk: subprocess.Popen[bytes] | None = None

    @classmethod
    def program(cls) -> Path:
        """Unpacked by ``make stores``, or installed."""
        unpacked = cls._unpacked / "bin" / "radosgw"
        return unpacked if unpacked.exists() else Path(shutil.which("radosgw") or unpacked)

    def command(self, *, read_only: bool) -> list[str]:
        if self._disk is None:
            self._disk = self._begin_cluster()
            who = ["--uid", "testing", "--display-name", "testing"]
            self._do("radosgw-admin", "user", "create", *who, "--access-key", "testing", "--secret", "testing-secret")
        return [str(self.program()), "-f", "-n", "client.rgw"]

    def own_environment(self) -> dict[str, str]:
        home = self._libraries()
        libraries = [home, home / "ceph", self._unpacked.parent / "lib" / home.name, self._unpacked / "lib"]
        return {"CEPH_CONF": f"{self.folder}/ceph.conf", "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries))}

    def environment(self, *, wrong: bool = False) -> dict[str, str]:
        return {**super().environment(wrong=wrong), "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required"}

    def read_only(self) -> dict[str, str]:
        self.stop()
        self._do("radosgw-admin", "user", "modify", "--uid", "testing", "--op-mask", "read")
        self.start()
        return self.environment()

    def nbytes(self) -> int:
        return int(psutil.Process(self._disk.pid).memory_info().rss)

    def end(self) -> None:
        self.stop()
        self._behind.close()

    def _libraries(self) -> Path:
        return self.program().parents[1] / "lib" / f"{os.uname().machine}-linux-gnu"

    def _begin_cluster(self) -> subprocess.Popen[bytes]:
        """Start the monitor and the disk, which is returned."""
        port, disk_id, monitor_id = self._behind.enter_context(kept_port()), str(uuid.uuid4()), str(uuid.uuid4())
        facts = {"folder": self.folder, "port": port, "uuid": monitor_id, "endpoint": self.endpoint.split("/")[2]}
        (self.folder / "ceph.conf").write_text(self._settings.format(**facts, libraries=self._libraries()))
        for name in ("mon", "osd"):
            (self.folder / name).mkdir()
        self._do("monmaptool", "--create", "--fsid", monitor_id, "--addv", "a", f"[v2:127.0.0.1:{port}]", "monmap")
        self._do("osdmaptool", "--createsimple", "1", "osdmap")
        self._do("ceph-authtool", "--create-keyring", "keyring", "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
        self._do("ceph-mon", "--mkfs", "-i", "a", "--monmap", "monmap", "--osdmap", "osdmap", "--keyring", "keyring")
        self._run("ceph-mon", "-f", "-i", "a")
        self._do("ceph-osd", "--mkfs", "-i", "0", "--osd-uuid", disk_id)
        return self._run("ceph-osd", "-f", "-i", "0")

    def _run(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start one of Ceph's programs, which ends with the cluster at the latest."""
        process = self.begin([str(self.program().with_name(name)), *arguments])
        self._behind.callback(process.wait)
        self._behind.callback(process.kill)
        return process

    def _do(self, name: str, *arguments: str) -> None:
        """Run one to its end."""
        assert self._run(name, *arguments).wait(120) == 0, self._log.read_text()[-2000:]


class FakeGcs(Server):
    name, scheme = "fake-gcs-server", "gs"

    @classmethod
    def program(cls) -> Path:
        found = sorted((INSTALLED / "fake-gcs").glob("*/vendor/fake-gcs-server/bin/fake-gcs-server-*"))
        return found[0] if found else INSTALLED / "fake-gcs" / "fake-gcs-server"

    def command(self, *, read_only: bool) -> list[str]:
        flags = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(self.port), "-log-level", "error"]
        flags += ["-external-url", self.endpoint, "-public-host", self.endpoint.partition("://")[2]]
        return [str(self.program()), *flags, "-filesystem-root", f"{self.folder}/data"]

    def environment(self, *, wrong: bool = False) -> dict[str, str]:
        known = {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false", "NO_GCE_CHECK": "true"}  # it needs no credentials
        return {"STORAGE_EMULATOR_HOST": self.endpoint, **known}


class Azurite(Server):
    name, scheme = "Azurite", "az"
    _account = "devstoreaccount1"
    _key = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # it is public

    @classmethod
    def program(cls) -> Path:
        return INSTALLED / "azurite" / "node_modules" / ".bin" / "azurite-blob"

    def command(self, *, read_only: bool) -> list[str]:
        flags = ["--silent", "--disableTelemetry", "--skipApiVersionCheck", "--location", f"{self.folder}/data"]
        return [str(self.program()), *flags, "--blobPort", str(self.port)]

    def environment(self, *, wrong: bool = False) -> dict[str, str]:
        key = base64.b64encode(b"another secret").decode() if wrong else self._key
        return self._connection(f"AccountKey={key}")

    def read_only(self) -> dict[str, str]:
        from datetime import datetime, timedelta

        from azure.storage.blob import AccountSasPermissions, ResourceTypes, generate_account_sas

        everything = ResourceTypes(service=True, container=True, object=True)
        may, until_then = AccountSasPermissions(read=True, list=True), datetime.now(UTC) + timedelta(hours=1)
        return self._connection(
            f"SharedAccessSignature={generate_account_sas(self._account, self._key, everything, may, until_then)}"
        )

    def _connection(self, secret: str) -> dict[str, str]:
        place = f"BlobEndpoint={self.endpoint}/{self._account}"
        text = f"DefaultEndpointsProtocol=http;AccountName={self._account};{secret};{place};"
        return {"AZURE_STORAGE_CONNECTION_STRING": text}


SERVERS: list[type[Server]] = [MinioGateway, CephGateway, FakeGcs, Azurite]


def why_missing(server: type[Server]) -> str:
    """Why a server cannot be tested here, ``""`` if it can."""
    if not server.program().exists():
        return f"{server.name} is not installed: make stores"
    if server.scheme != "s3" and not CLIENTS.exists():
        return "gcsfs and adlfs are not installed: make stores"
    return ""


def use(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on these are where servers are, and the credentials, in this process."""
    if CLIENTS.exists() and str(CLIENTS) not in sys.path:
        sys.path.append(str(CLIENTS))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for scheme in ("s3", *(("gs", "az") if CLIENTS.exists() else ())):
        fsspec.get_filesystem_class(scheme).clear_instance_cache()


def clients_known(folder: Path) -> dict[str, str]:
    """Environment for processes that are to find the libraries; behind those of this environment."""
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.path.append({str(CLIENTS)!r})\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(HOME)])}


def trainer(url: str, oracle: Path, log: Path, environment: dict[str, str], **more: Any) -> subprocess.Popen[bytes]:
    """Start ``tests.support.crash_trainer`` as on a machine of its own."""
    request = json.dumps({"dirpath": url, "oracle": str(oracle), **more})
    command = [sys.executable, "-m", "tests.support.crash_trainer", request]
    with open(log, "wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **environment}, cwd=HOME)


def large(attempt: int, nbytes: int) -> tuple[Manifest, memoryview]:
    """A snapshot that is not made up byte by byte."""
    image = memoryview(random.Random(attempt).randbytes(2**20) * (nbytes >> 20))
    name = snapshot_name(1, attempt)
    made = Manifest(run="run", name=name, step=1, attempt=attempt, nbytes=len(image), part_bytes=8 * 2**20)
    return made.sealed(image), image


def main(url: str, nbytes: int) -> None:
    store = open_store(url)
    store.claim(claim_of(1))
    store.put(*large(1, nbytes), attempt=1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
