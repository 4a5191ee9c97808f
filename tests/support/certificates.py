"""Certificates for tests: authorities, and servers and clients that they vouch for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from downrange.transport.certificates import Issued, make_authority, make_client, make_server
from downrange.transport.tls_config import ClientAuth, TlsConfig, TlsMode

NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Certificates:
    """An authority `ca.pem`, and the certificates and keys of a server and of a client, in a directory."""

    directory: Path
    authority: Issued

    @classmethod
    def make(cls, directory: Path) -> Certificates:
        directory.mkdir(parents=True, exist_ok=True)
        made = cls(directory, make_authority())
        made.authority.write(made.ca)
        made.renew()
        made.write_client(make_client(made.authority, "test"))
        return made

    @property
    def ca(self) -> Path:
        return self.directory / "ca.pem"

    @property
    def server(self) -> tuple[Path, Path]:
        return self.directory / "server.pem", self.directory / "server.key"

    @property
    def client(self) -> tuple[Path, Path]:
        return self.directory / "client.pem", self.directory / "client.key"

    def renew(self, names: tuple[str, ...] = NAMES, days: float = 1) -> Issued:
        """Give the server a new certificate and a new key."""
        issued = make_server(self.authority, names, days)
        issued.write(*self.server)
        return issued

    def write_client(self, issued: Issued) -> None:
        issued.write(*self.client)

    def server_config(
        self, mode: TlsMode = TlsMode.PERMISSIVE, need: ClientAuth = ClientAuth.NONE, enable: bool | None = None
    ) -> TlsConfig:
        """The settings of a server, which is also a client of name servers and masters."""
        cert, key = self.server
        client_cert, client_key = self.client
        return TlsConfig(
            server_mode=mode,
            enable=enable,
            server_cert_path=cert,
            server_key_path=key,
            server_need_client_auth=need,
            server_trust_cert_path=self.ca if need is not ClientAuth.NONE else None,
            client_trust_cert_path=self.ca,
            client_cert_path=client_cert,
            client_key_path=client_key,
        )

    def client_config(self, *, shows_certificate: bool = False) -> TlsConfig:
        cert, key = self.client
        return TlsConfig(
            client_trust_cert_path=self.ca,
            client_cert_path=cert if shows_certificate else None,
            client_key_path=key if shows_certificate else None,
        )
