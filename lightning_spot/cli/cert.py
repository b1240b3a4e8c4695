"""``lightning-spot cert``: makes certificates to try TLS with, by a CA of their own."""

from __future__ import annotations

import argparse
import ipaddress
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_spot.errors import SettingsError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

CA, CA_KEY, SERVER, SERVER_KEY, CLIENT = "ca.pem", "ca-key.pem", "server.pem", "server-key.pem", "client.pem"
_VALID = timedelta(days=365)
_SKEW = timedelta(hours=1)  # of clocks


def add_cert_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``cert``."""
    parser.add_argument("folder", metavar="DIR", help=f"for the files; a CA that is there ({CA}, {CA_KEY}) is used")
    parser.add_argument("hosts", metavar="HOST", nargs="+", help="name or IP address that clients reach the server by")


def cert(arguments: argparse.Namespace) -> int:
    """Make a CA, a pair for a server, and a certificate with its key for clients.

    Raises:
        SettingsError: if a file is there already or cannot be written, or ``cryptography`` is not installed.
    """
    folder = Path(arguments.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in make(folder, arguments.hosts):
            print(path)
    except ModuleNotFoundError as error:
        raise SettingsError("cert needs cryptography: pip install 'lightning_spot[tls]'") from error
    except FileExistsError as error:
        raise SettingsError(f"{error.filename} is there already: nothing is replaced. Give another DIR") from error
    except (OSError, ValueError) as error:
        raise SettingsError(f"{folder}: the certificates cannot be made ({error})") from error
    return 0


def make(folder: Path, hosts: list[str]) -> list[Path]:
    """Make the files; those that were written.

    Raises:
        FileExistsError: if one is there already.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from cryptography.x509.oid import ExtendedKeyUsageOID as Use

    has_ca = (folder / CA).exists() and (folder / CA_KEY).exists()
    for name in (SERVER, SERVER_KEY, CLIENT, *(() if has_ca else (CA, CA_KEY))):
        if (path := folder / name).exists():
            raise FileExistsError(None, "", str(path))
    names, written = [_name(host) for host in hosts], []
    if has_ca:
        ca = x509.load_pem_x509_certificate((folder / CA).read_bytes())
        ca_key = load_pem_private_key((folder / CA_KEY).read_bytes(), None)
        if not isinstance(ca_key, ec.EllipticCurvePrivateKey):
            raise ValueError(f"{CA_KEY} is no key that this command made")
    else:
        ca_key = ec.generate_private_key(ec.SECP256R1())
        ca = _certificate("lightning-spot development CA", ca_key, None, ca_key, [])
        written += [_write(folder / CA_KEY, _pem(ca_key)), _write(folder / CA, _pem(ca))]
    key, client_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    serves, asks = (x509.ExtendedKeyUsage([use]) for use in (Use.SERVER_AUTH, Use.CLIENT_AUTH))
    server = _certificate(hosts[0][:64], key, ca, ca_key, [x509.SubjectAlternativeName(names), serves])
    client = _certificate("lightning-spot client", client_key, ca, ca_key, [asks])
    written += [_write(folder / SERVER_KEY, _pem(key)), _write(folder / SERVER, _pem(server))]
    return [*written, _write(folder / CLIENT, _pem(client) + _pem(client_key))]


def _name(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        return x509.DNSName(host)


def _certificate(
    subject: str,
    key: EllipticCurvePrivateKey,
    issuer: x509.Certificate | None,
    issuer_key: EllipticCurvePrivateKey,
    extensions: list[x509.ExtensionType],
) -> x509.Certificate:
    """A certificate that also strict clients take; without an issuer, that of a CA."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, subject)])
    now = datetime.now(UTC)
    is_ca = issuer is None
    signs = x509.KeyUsage(not is_ca, False, False, False, False, is_ca, is_ca, False, False)  # itself, or others
    own, issuers = key.public_key(), issuer_key.public_key()
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name if issuer is None else issuer.subject)
        .public_key(own)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + _VALID)
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None), critical=True)
        .add_extension(signs, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(own), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuers), critical=False)
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def _pem(what: x509.Certificate | EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    if hasattr(what, "private_bytes"):
        return bytes(what.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return bytes(what.public_bytes(Encoding.PEM))


def _write(path: Path, pem: bytes) -> Path:
    """Write a file that was not there; with a key in it, for this user only."""
    mode = 0o600 if b"PRIVATE KEY" in pem else 0o644
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(pem)
    return path
