"""A link that delays and loses packets, and is cut for a while; ``soak/test_machines.py`` trains by such links."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest

from lightning_spot.client.remote import ServerStore
from tests.support.link import FAR
from tests.support.network import TOKEN, listening, network_or_skip
from tests.support.server import RUN_ID, is_kept
from tests.support.waiting import until
from tests.support.wire_pair import RUN, Sender, state

pytestmark = pytest.mark.guarantee("G20")


@pytest.mark.parametrize("cut_s", [0.0, 2.0])
def test_a_snapshot_gets_to_a_server_by_a_far_link_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_s: float
) -> None:
    """Also if the link is cut while it is sent."""
    monkeypatch.setenv("LIGHTNING_SPOT_TOKEN", TOKEN)
    images = [bytes(state(step, 300_000)) for step in (1, 2)]
    images[1] = images[0][:200_000] + images[1][200_000:]
    sent: list[int] = []

    def bring() -> list[bytes]:
        sender, read = Sender(tmp_path, url), []
        try:
            sender.open(durable=False, servers=(url,))
            until(lambda: is_kept(sender.server.route(RUN_ID)), "the server")
            sent.extend(sender.bring(step, image) for step, image in enumerate(images, 1))
            store = ServerStore(f"{url}/{RUN}")
            for manifest in sorted(store.survey().manifests, key=lambda manifest: manifest.step):
                image = bytearray(manifest.nbytes)
                store.fetch(manifest, memoryview(image))
                read.append(bytes(image))
        finally:
            sender.close()
        return read

    with network_or_skip("far", ("near", "memory")) as network, ThreadPoolExecutor(1) as thread:
        for host in network.address:
            network.shape(host, **asdict(FAR))
        url = listening(network, "memory", 7070, tmp_path / "server", "--allow-storage", str(tmp_path))
        brought = thread.submit(network.there, "near", bring)
        if cut_s:
            until(lambda: network.received("memory") > 50_000 or brought.done(), "it to be on its way")
            assert not brought.done()
            network.cut("near")
            time.sleep(cut_s)
            network.mend("near")
        assert brought.result(120) == images
    assert cut_s or sent[1] < 0.6 * len(images[1])  # of the second one, what has changed
