"""``lightning-spot cert``: keys are this user's only, nothing is replaced, and a CA that is there signs again."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509

from lightning_spot.cli.cert import CA, CA_KEY, CLIENT, SERVER, SERVER_KEY

Cli = Callable[..., str]


def test_keys_are_private_and_names_are_those_of_clients(tmp_path: Path, cli: Cli) -> None:
    before = os.umask(0)
    try:
        printed = cli("cert", tmp_path / "certs", "10.0.0.5", "::1", "snapshots.example.com")
    finally:
        os.umask(before)
    files = {path.name: path for path in (tmp_path / "certs").iterdir()}
    assert files.keys() == {CA, CA_KEY, SERVER, SERVER_KEY, CLIENT}
    assert set(printed.split()) == set(map(str, files.values()))
    for path in files.values():
        assert path.stat().st_mode & 0o777 == (0o600 if b"PRIVATE" in path.read_bytes() else 0o644)
    server = x509.load_pem_x509_certificate(files[SERVER].read_bytes())
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(name.value) for name in names] == ["10.0.0.5", "::1", "snapshots.example.com"]


def test_nothing_is_replaced_and_a_ca_signs_again(tmp_path: Path, cli: Cli) -> None:
    cli("cert", tmp_path, "a.example")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for name in (SERVER, SERVER_KEY, CLIENT):
        assert name in cli("cert", tmp_path, "b.example", code=2)
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
        (tmp_path / name).unlink()
        del before[tmp_path / name]
    cli("cert", tmp_path, "b.example")
    assert all(path.read_bytes() == text for path, text in before.items())
    ca, server = (x509.load_pem_x509_certificate((tmp_path / name).read_bytes()) for name in (CA, SERVER))
    server.verify_directly_issued_by(ca)
    (tmp_path / CA_KEY).unlink()
    for name in (SERVER, SERVER_KEY, CLIENT):
        (tmp_path / name).unlink()
    assert CA in cli("cert", tmp_path, "c.example", code=2)
    assert (tmp_path / CA).read_bytes() == before[tmp_path / CA]
    assert not (tmp_path / CA_KEY).exists()


def test_what_is_missing_or_wrong_is_one_line(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    assert "file" in cli("cert", tmp_path / "file", "a.example", code=2)
    assert "certificates cannot be made" in cli("cert", tmp_path / "x", "hööst", code=2)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    assert "lightning_spot[tls]" in cli("cert", tmp_path / "y", "a.example", code=2)
