"""Two machines train a model in shards with no memory node, and something is lost: it comes together in a bucket."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.chain import NotPermitted
from lightning_spot.exact.compare import differences
from tests.conftest import until
from tests.network import Network
from tests.test_sharded_fit import final
from tests.test_sharded_hosts import STEPS, Sharded, check_states, committing, restoring, sending, staging, twin

__all__ = ["twin"]

_COPY = "import s3fs, sys; s3fs.S3FileSystem().get('bucket/run/', sys.argv[1] + '/', recursive=True)"


class Bucket(Sharded):
    """The third machine has a bucket in place of the memory node."""

    def start_node(self) -> None:
        self.url, self.more = "auto", ("--dir=s3://bucket/run",)
        address = self.network.address["memory"]
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{address}:5000",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            self._monkeypatch.setenv(name, value)
        with open(self.root / "moto", "wb") as log:
            self.network.start("memory", "-m", "moto.server", "-H", address, "-p", "5000", log=log)
        until(lambda: self.asks("import s3fs; s3fs.S3FileSystem().mkdir('bucket')"), "the bucket to be there", 100.0)

    def asks(self, *code: str) -> bool:
        """Whether some code that asks the bucket succeeds there."""
        with open(self.root / "asked", "ab") as log:
            return self.network.start("memory", "-c", *code, log=log).wait(100) == 0


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    try:
        with Network(f"ls-bucket-{os.getpid()}", ("first", "second", "memory"), tmp_path) as network:
            yield Bucket(network, tmp_path, monkeypatch)
    except NotPermitted as reason:
        pytest.skip(f"no network namespaces here: {reason}")


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("when", [staging, sending, committing, restoring])
@pytest.mark.parametrize("what", ["a rank", "a machine", "the first machine", "the bucket", "a link"])
def test_machines_train_in_shards_with_no_memory_node_and_something_is_lost(
    machines: Bucket, tmp_path: Path, twin: Path, what: str, when: Callable[[Sharded], None]
) -> None:
    network, root = machines.network, tmp_path / "run"
    for host in ("first", "second"):
        network.shape(host, 40_000_000)
    machines.train("run", STEPS)
    machines.come_to(8)
    when(machines)
    if what in ("the bucket", "a link"):
        host = "memory" if what == "the bucket" else "second"
        network.cut(host)
        time.sleep(8.0)  # TCP gives nothing up in that time
        network.mend(host)
    else:
        machines.kill_rank() if what == "a rank" else network.lose("second" if what == "a machine" else "first")
        until(lambda: machines.ended(), "it to end", 100.0)
    if what not in ("the bucket", "a link") or machines.ended():
        machines.end()
        machines.train("run", STEPS)
    assert machines.wait("run") == [0, 0], machines.log()
    assert machines.asks(_COPY, str(root / "run"))
    check_states(root)
    assert list(differences(final(twin), final(root))) == []
