"""The settings of TLS, and the contexts made of them."""

from __future__ import annotations

import logging
import ssl
from dataclasses import replace
from pathlib import Path

import pytest

from downrange.settings import ConfigError, Property, configure
from downrange.transport.certificates import make_client
from downrange.transport.tls import ClientTls, ServerTls, outgoing_tls, server_tls
from downrange.transport.tls_config import ClientAuth, TlsConfig, TlsMode, resolved
from tests.support.certificates import Certificates

SECRET, GUESSED = "hush hush", "a guess"


@pytest.fixture
def files(tmp_path: Path) -> Certificates:
    return Certificates.make(tmp_path)


def of(**keys: str) -> TlsConfig:
    return configure(TlsConfig, {f"tls.{key.replace('_', '.')}": Property(value) for key, value in keys.items()})


def test_without_a_certificate_tls_is_disabled_and_with_one_permissive(files: Certificates) -> None:
    assert server_tls(TlsConfig()) is None
    cert, key = files.server
    found = server_tls(TlsConfig(server_cert_path=cert, server_key_path=key))
    assert found is not None
    assert not found.is_enforced
    assert server_tls(files.server_config(TlsMode.DISABLED)) is None
    enforcing = server_tls(files.server_config(TlsMode.ENFORCING))
    assert enforcing is not None
    assert enforcing.is_enforced


def test_outgoing_connections_follow_the_mode_unless_told_otherwise(files: Certificates) -> None:
    for mode, enable, is_used in (
        (TlsMode.DISABLED, None, False),
        (TlsMode.PERMISSIVE, None, False),
        (TlsMode.ENFORCING, None, True),
        (TlsMode.ENFORCING, False, False),
        (TlsMode.PERMISSIVE, True, True),
    ):
        assert (outgoing_tls(files.server_config(mode, enable=enable)) is not None) is is_used


@pytest.mark.parametrize("text", ["Enforcing", "on", "true", ""])
def test_an_unknown_mode_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="expected disabled or permissive or enforcing"):
        of(server_mode=text)


def test_client_auth_has_no_upper_and_lower_case() -> None:
    assert of(server_need_client_auth="REQUIRE").server_need_client_auth is ClientAuth.REQUIRE
    with pytest.raises(ConfigError, match="expected none or optional or require"):
        of(server_need_client_auth="maybe")


def test_the_file_wins_and_has_no_modes(tmp_path: Path) -> None:
    file = tmp_path / "tls.properties"
    file.write_text("tls.client.authServer=false\n")
    given = TlsConfig(config_file=file, client_auth_server=True, client_key_password=SECRET)
    assert resolved(given) == replace(given, client_auth_server=False)
    for line in ("tls.server.mode=disabled", "tls.enable=true", "useTLS=true", f"tls.config.file={file}"):
        file.write_text(line)
        with pytest.raises(ConfigError, match=r"does not belong into a tls\.config\.file"):
            resolved(given)
    file.write_text("tls.client.trustCert=x")
    with pytest.raises(
        ConfigError, match=r"unknown key tls\.client\.trustCert; did you mean tls\.client\.trustCertPath"
    ):
        resolved(given)
    file.unlink()
    with pytest.raises(ConfigError, match="cannot read configuration file"):
        resolved(given)


def test_passwords_are_shown_nowhere(files: Certificates, caplog: pytest.LogCaptureFixture) -> None:
    issued = files.renew()
    files.server[1].write_bytes(issued.key_pem(SECRET))
    config = replace(files.server_config(), server_key_password=SECRET)
    with caplog.at_level(logging.DEBUG):
        found = ServerTls(config, TlsMode.PERMISSIVE)
        assert SECRET not in repr(config) + repr(found) + str(config)
        with pytest.raises(ConfigError, match=r"tls\.server\.keyPassword is wrong") as error:
            ServerTls(replace(config, server_key_password=GUESSED), TlsMode.PERMISSIVE)
    assert GUESSED not in str(error.value) + caplog.text
    with pytest.raises(ConfigError, match=r"tls\.server\.keyPassword is wrong"):  # and nobody is asked at a terminal
        ServerTls(replace(config, server_key_password=None), TlsMode.PERMISSIVE)


def test_files_that_cannot_be_used_are_named(files: Certificates, tmp_path: Path) -> None:
    config = files.server_config(TlsMode.PERMISSIVE, ClientAuth.REQUIRE)
    gone, empty = tmp_path / "gone.pem", tmp_path / "empty.pem"
    empty.write_text("")
    other = files.client[1]
    for changes, message in (
        ({"server_cert_path": gone}, r"tls\.server\.certPath=.*gone\.pem: no such file"),
        ({"server_key_path": gone}, r"tls\.server\.keyPath=.*gone\.pem: no such file"),
        ({"server_key_path": None}, r"tls\.server\.keyPath is missing"),
        ({"server_key_path": other}, "the key belongs to another certificate"),
        ({"server_trust_cert_path": gone}, r"tls\.server\.trustCertPath=.*gone\.pem: no such file"),
        ({"server_trust_cert_path": empty}, r"tls\.server\.trustCertPath=.*empty\.pem: no certificates in PEM"),
        ({"server_trust_cert_path": None}, r"need\.client\.auth=require needs tls\.server\.trustCertPath"),
        ({"server_auth_client": False}, "a certificate that is not checked proves nothing"),
        ({"test_mode_enable": True}, r"tls\.test\.mode\.enable=true and tls\.server\.keyPath exclude each other"),
    ):
        with pytest.raises(ConfigError, match=message):
            ServerTls(replace(config, **changes), TlsMode.PERMISSIVE)
    with pytest.raises(ConfigError, match=r"tls\.client\.trustCertPath=.*gone\.pem: no such file"):
        ClientTls(TlsConfig(client_trust_cert_path=gone))
    with pytest.raises(ConfigError, match=r"tls\.client\.keyPath is missing"):
        ClientTls(TlsConfig(client_cert_path=files.client[0]))


def test_contexts_check_certificates_and_names_unless_told_otherwise(files: Certificates) -> None:
    context = ClientTls(files.client_config()).context()
    assert context.check_hostname
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    unnamed = ClientTls(replace(files.client_config(), client_check_host_name=False)).context()
    assert (unnamed.check_hostname, unnamed.verify_mode) == (False, ssl.CERT_REQUIRED)
    trusting = ClientTls(TlsConfig(client_auth_server=False)).context()
    assert (trusting.check_hostname, trusting.verify_mode) == (False, ssl.CERT_NONE)
    server = ServerTls(files.server_config(need=ClientAuth.REQUIRE), TlsMode.PERMISSIVE).context()
    assert server.verify_mode is ssl.CERT_REQUIRED
    assert server.minimum_version is ssl.TLSVersion.TLSv1_2


def test_a_key_that_others_can_read_is_warned_about(files: Certificates, caplog: pytest.LogCaptureFixture) -> None:
    ServerTls(files.server_config(), TlsMode.PERMISSIVE)
    assert "can be read by others" not in caplog.text
    files.server[1].chmod(0o644)
    ServerTls(files.server_config(), TlsMode.PERMISSIVE)
    assert f"private key can be read by others path={files.server[1]}" in caplog.text


def test_a_context_is_made_again_only_when_a_file_changes(files: Certificates, tmp_path: Path) -> None:
    file = tmp_path / "tls.properties"
    cert, key = files.client
    file.write_text(f"tls.client.trustCertPath={files.ca}\n")
    tls = ClientTls(TlsConfig(config_file=file))
    first = tls.context()
    assert tls.context() is first
    file.write_text(f"tls.client.trustCertPath={files.ca}\ntls.client.certPath={cert}\ntls.client.keyPath={key}\n")
    second = tls.context()
    assert second is not first
    assert tls.context() is second
    files.write_client(make_client(files.authority, "renewed"))  # a file that only the new settings name
    third = tls.context()
    assert third is not second
    file.write_text("nonsense=1\n")
    assert tls.context() is third
    assert tls.context() is third
