"""Two machines train a model in shards with no server, and something is lost: it comes together in a bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.machines import PHASES, Sharded, started, twin, twins
from tests.support.waiting import until

__all__ = ["twin", "twins"]

_COPY = "import s3fs, sys; s3fs.S3FileSystem().get('bucket/run/', sys.argv[1] + '/', recursive=True)"


class Bucket(Sharded):
    """The third machine has a bucket in place of the snapshot server."""

    third = "the bucket"

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

    def lose_third(self) -> None:
        self.cut_for_a_while("memory")

    def check(self, twin: Path) -> None:
        assert self.asks(_COPY, str(self.root / "run" / "run")), (self.root / "asked").read_text()
        super().check(twin)


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_python: str) -> Iterator[Bucket]:
    yield from started(Bucket, tmp_path, monkeypatch, warm_python)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("when", PHASES)
@pytest.mark.parametrize("what", ["a rank", "a machine", "the first machine", "the bucket", "a link"])
def test_sharded_machines_without_a_server_resume_after_a_loss(
    machines: Bucket, twin: Path, what: str, when: Callable[[Sharded], None]
) -> None:
    machines.train_slowly_to(8)
    when(machines)
    machines.lose(what)
    assert machines.wait("run") == [0, 0], machines.log()
    machines.check(twin)
