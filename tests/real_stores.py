"""Servers that are no AWS, started on loopback from where ``make stores`` has installed them, each with its library.

As a program (``python -m tests.real_stores URL NBYTES``) it puts one snapshot, for tests that kill it meanwhile.
"""

from __future__ import annotations

import base64
import json
import os
import random
import signal
import socket
import subprocess
import sys
from datetime import UTC
from pathlib import Path
from typing import Any

import fsspec

from lightning_spot.client.stores import open_store
from lightning_spot.image.manifest import Manifest, snapshot_name
from lightning_spot.tiers.filesystem import open_filesystem
from tests.conftest import until
from tests.oracle import HOME, claim_of

INSTALLED = Path(os.environ.get("STORES") or HOME / ".stores")
CLIENTS = INSTALLED / "clients"


class Server:
    """A server, which keeps what it has from one start to the next.

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

    @classmethod
    def program(cls) -> Path:
        """Of the server."""
        raise NotImplementedError

    def command(self, *, read_only: bool) -> list[str]:
        """That starts it."""
        raise NotImplementedError

    def environment(self, *, wrong: bool = False) -> dict[str, str]:
        """Of its clients: where it is, and credentials, right or wrong ones."""
        raise NotImplementedError

    def read_only(self) -> dict[str, str] | None:
        """Credentials that may read only; ``None`` if it has none."""
        return None

    def start(self, *, read_only: bool = False) -> None:
        with open(self._log, "ab") as log:
            environment = {**os.environ, "MINIO_ROOT_USER": "testing", "MINIO_ROOT_PASSWORD": "testing-secret"}
            command = self.command(read_only=read_only)
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=self.folder)

        def answers() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, self._log.read_text()[-2000:]
            with socket.socket() as connection:
                return connection.connect_ex(("127.0.0.1", self.port)) == 0

        until(answers, f"{self.name} to listen", 60)

    def stop(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()

    def bucket(self, name: str) -> str:
        """Make a bucket; its URL."""
        fsspec.filesystem(self.scheme, use_listings_cache=False, skip_instance_cache=True).mkdir(name)
        return f"{self.scheme}://{name}"

    def uploads(self, _bucket: str) -> list[str]:
        """Unfinished uploads, where those are kept until somebody aborts them."""
        return []


class MinioGateway(Server):
    name, scheme = "MinIO gateway", "s3"

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

    def environment(self, *, wrong: bool = False) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "another-secret" if wrong else "testing-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def read_only(self) -> dict[str, str]:
        self.stop()
        self.start(read_only=True)
        return self.environment()

    def uploads(self, bucket: str) -> list[str]:
        files, path = open_filesystem(bucket)
        return [str(item["Key"]) for item in files.list_multipart_uploads(path) or []]


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
        return {"STORAGE_EMULATOR_HOST": self.endpoint, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}


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


SERVERS: list[type[Server]] = [MinioGateway, FakeGcs, Azurite]


def why_missing(server: type[Server]) -> str:
    """Why a server cannot be tested here, ``""`` if it can."""
    if not server.program().exists():
        return f"{server.name} is not installed: make stores"
    if server.scheme != "s3" and not CLIENTS.exists():
        return "gcsfs and adlfs are not installed: make stores"
    return ""


def clients_known(folder: Path) -> dict[str, str]:
    """Environment for processes that are to find the libraries; behind those of this environment."""
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.path.append({str(CLIENTS)!r})\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(HOME)])}


def trainer(url: str, oracle: Path, log: Path, environment: dict[str, str], **more: Any) -> subprocess.Popen[bytes]:
    """Start ``tests.crash_trainer`` as on a machine of its own."""
    request = json.dumps({"dirpath": url, "oracle": str(oracle), **more})
    command = [sys.executable, "-m", "tests.crash_trainer", request]
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
