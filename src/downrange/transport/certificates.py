"""Makes certificates for trying TLS out: a small authority, and certificates that it signs.

Needs the package cryptography, which is no part of a plain installation: `pip install 'downrange[tls]'`.
"""

from __future__ import annotations

import ipaddress
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from downrange.settings import ConfigError

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError:
    raise ConfigError("the package cryptography is missing: pip install 'downrange[tls]'") from None

_CLOCKS_DIFFER: Final = timedelta(minutes=5)
DAYS: Final = 365


@dataclass(frozen=True, slots=True, repr=False)
class Issued:
    """A certificate and its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def write(self, cert_path: Path, key_path: Path | None = None) -> None:
        """Write PEM files; only the owner may read the key. Each file is whole at any time."""
        if key_path is not None:
            _replace(key_path, self.key_pem(), 0o600)
        _replace(cert_path, self.certificate.public_bytes(serialization.Encoding.PEM), 0o644)

    def key_pem(self, password: str | None = None) -> bytes:
        encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if password is not None:
            encryption = serialization.BestAvailableEncryption(password.encode())
        return self.key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)


def make_authority(name: str = "Downrange CA", days: float = DAYS) -> Issued:
    """An authority of its own, which signs certificates and nothing else."""
    return _issue(name, None, days, (), is_authority=True)


def make_server(authority: Issued, names: Iterable[str], days: float = DAYS) -> Issued:
    """A certificate of a server that clients reach by these names and addresses; brokers use it as clients, too."""
    given = tuple(names)
    both = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
    return _issue(given[0], authority, days, given, usages=both)


def make_client(authority: Issued, name: str, days: float = DAYS) -> Issued:
    return _issue(name, authority, days, (), usages=(ExtendedKeyUsageOID.CLIENT_AUTH,))


@contextmanager
def self_signed() -> Iterator[tuple[Path, Path]]:
    """Files of a certificate for localhost that signed itself; they are gone after the block."""
    issued = _issue("localhost", None, DAYS, ("localhost", "127.0.0.1", "::1"))
    with tempfile.TemporaryDirectory(prefix="downrange-tls-") as directory:
        cert, key = Path(directory) / "cert.pem", Path(directory) / "key.pem"
        issued.write(cert, key)
        yield cert, key


def _issue(
    name: str,
    issuer: Issued | None,
    days: float,
    names: Iterable[str],
    *,
    usages: Iterable[x509.ObjectIdentifier] = (),
    is_authority: bool = False,
) -> Issued:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    signer = issuer.key if issuer is not None else key
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.certificate.subject if issuer is not None else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, now + timedelta(days=days)) - _CLOCKS_DIFFER)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .add_extension(_key_usage(is_authority=is_authority), critical=True)
    )
    if alternatives := [_general_name(one) for one in names]:
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    if purposes := list(usages):
        builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
    return Issued(builder.sign(signer, hashes.SHA256()), key)


def _key_usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        pass
    try:
        return x509.DNSName(text)
    except ValueError:
        raise ConfigError(f"{text!r} is neither an address nor a host name in ASCII") from None


def _replace(path: Path, data: bytes, mode: int) -> None:
    new = path.with_name(f"{path.name}.new")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with open(descriptor, "wb") as file:
        os.fchmod(descriptor, mode)
        file.write(data)
    new.replace(path)
