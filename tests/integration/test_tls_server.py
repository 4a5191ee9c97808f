"""TLS of servers and pools over real sockets: modes, versions, certificates, reloading, peers that misbehave."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import ssl
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from downrange.protocol.codes import ResponseCode
from downrange.protocol.command import Command, request
from downrange.protocol.framing import Frame, decode_frame, encode
from downrange.transport.certificates import make_authority, make_client
from downrange.transport.connection import Connection
from downrange.transport.errors import ConnectFailed, TransportError
from downrange.transport.limits import Limits
from downrange.transport.pool import Pool, connect
from downrange.transport.server import READS_TOGETHER, Server
from downrange.transport.serving import encode_reply, send_replies, serve_commands
from downrange.transport.tls import ClientTls, server_tls
from downrange.transport.tls_config import ClientAuth, TlsConfig, TlsMode
from tests.support.certificates import Certificates

ECHO = 1


def echo(command: Command, connection: Connection) -> Command:
    return command.reply(ResponseCode.SUCCESS, None, body=command.body)


@pytest.fixture(params=["together", "by the loop"], autouse=True)
def reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain connections are read together where the compiled module is there, else by the loop's own transports."""
    if request.param == "by the loop":
        monkeypatch.setattr("downrange.transport.server.READS_TOGETHER", False)
    elif not READS_TOGETHER:
        pytest.skip("this needs the compiled module")


@pytest.fixture
def files(tmp_path: Path) -> Certificates:
    return Certificates.make(tmp_path / "tls")


@asynccontextmanager
async def serving(config: TlsConfig, limits: Limits | None = None) -> AsyncIterator[Server]:
    limits = limits or Limits(drain_seconds=1)
    async with Server(serve_commands(echo), limits=limits, tls=server_tls(config)) as server:
        yield server


async def ask(server: Server, config: TlsConfig | None, body: bytes = b"hello", host: str = "127.0.0.1") -> bytes:
    """The answer over a connection of its own."""
    pool = Pool(tls=None if config is None else ClientTls(config))
    try:
        reply = await pool.request(f"{host}:{server.port}", request(ECHO, body=body), 10)
        return reply.body_bytes
    finally:
        await pool.close()


async def rest(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the connection is closed."""
    received = b""
    async with asyncio.timeout(20):
        with suppress(ConnectionResetError):  # closed with bytes that were not read
            while part := await reader.read(4096):
                received += part
    return received


async def until(holds: object, seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not holds():  # type: ignore[operator]
            await asyncio.sleep(0.01)


# --- modes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "takes_tls", "takes_plain"),
    [(TlsMode.DISABLED, False, True), (TlsMode.PERMISSIVE, True, True), (TlsMode.ENFORCING, True, False)],
)
async def test_modes(files: Certificates, mode: TlsMode, takes_tls: bool, takes_plain: bool) -> None:
    async with serving(files.server_config(mode)) as server:
        for config, is_taken in ((files.client_config(), takes_tls), (None, takes_plain)):
            if is_taken:
                assert await ask(server, config) == b"hello"
            else:
                with pytest.raises(TransportError):
                    await ask(server, config)


async def test_an_enforcing_server_closes_plain_connections_without_a_byte(files: Certificates) -> None:
    async with serving(files.server_config(TlsMode.ENFORCING)) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(encode(request(ECHO)))
        assert await rest(reader) == b""
        writer.close()


async def test_bodies_of_all_sizes_arrive_over_tls(files: Certificates) -> None:
    async with serving(files.server_config()) as server:
        pool = Pool(tls=ClientTls(files.client_config()))
        for size in (0, 1, 16_000, 70_000, 3_000_000):
            body = bytes(range(256)) * (size // 256 + 1)
            reply = await pool.request(f"127.0.0.1:{server.port}", request(ECHO, body=body[:size]), 20)
            assert reply.body_bytes == body[:size]
        await pool.close()


async def test_replies_of_one_batch_go_to_plain_and_tls_connections(files: Certificates) -> None:
    """`send_replies` sends to whichever origins a batch has, in any mixture."""
    taken: list[tuple[Frame, Connection]] = []

    def serve(frames: list[Frame], origins: list[Connection]) -> None:
        taken.extend(zip(frames, origins, strict=True))
        if len(taken) == 6:
            taken.sort(key=lambda each: decode_frame(each[0]).body_bytes)  # plain and TLS alternate
            replies = []
            for frame, connection in taken:
                replies.append(b"".join(encode_reply(echo(decode_frame(frame), connection))))
            send_replies([connection for _, connection in taken], b"".join(replies))

    async with Server(serve, limits=Limits(drain_seconds=1), tls=server_tls(files.server_config())) as server:
        tls = ClientTls(files.client_config())
        address = f"127.0.0.1:{server.port}"
        opened = [await connect(address, tls=tls if number % 2 else None) for number in range(3)]
        bodies = [b"%d" % number for number in range(6)]
        waits = [opened[number % 3].request(request(ECHO, body=body), 10) for number, body in enumerate(bodies)]
        replies = await asyncio.gather(*waits)
        assert [reply.body_bytes for reply in replies] == bodies
        for connection in opened:
            connection.close()


async def test_the_test_mode_needs_no_files() -> None:
    async with serving(TlsConfig(test_mode_enable=True)) as server:
        assert await ask(server, TlsConfig(test_mode_enable=True)) == b"hello"
        with pytest.raises(ConnectFailed, match="certificate is refused"):
            await ask(server, TlsConfig())
        assert await ask(server, None) == b"hello", "permissive"


# --- versions, certificates ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1")
async def test_old_versions_are_refused(files: Certificates, version: ssl.TLSVersion) -> None:
    async with serving(files.server_config()) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.minimum_version = context.maximum_version = version
        context.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.raises(ssl.SSLError, match=r"(?i)protocol.version"):
            await asyncio.open_connection("127.0.0.1", server.port, ssl=context)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_new_versions_are_taken(files: Certificates, version: ssl.TLSVersion) -> None:
    async with serving(files.server_config()) as server:
        context = ssl.create_default_context(cafile=str(files.ca))
        context.minimum_version = context.maximum_version = version
        _, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=context)
        assert writer.get_extra_info("ssl_object").version() == version.name.replace("_", ".")
        writer.close()
        await writer.wait_closed()


async def test_a_server_of_another_authority_is_refused(files: Certificates, tmp_path: Path) -> None:
    others = Certificates.make(tmp_path / "other")
    async with serving(files.server_config()) as server:
        with pytest.raises(ConnectFailed, match=r"certificate is refused: .*tls\.client\.trustCertPath"):
            await ask(server, others.client_config())


async def test_a_server_with_another_name_is_refused_unless_names_are_not_compared(files: Certificates) -> None:
    files.renew(("broker.example",))
    async with serving(files.server_config()) as server:
        with pytest.raises(ConnectFailed, match="certificate is refused: IP address mismatch"):
            await ask(server, files.client_config())
        unchecked = TlsConfig(client_trust_cert_path=files.ca, client_check_host_name=False)
        assert await ask(server, unchecked) == b"hello"


async def test_an_expired_server_is_refused(files: Certificates) -> None:
    files.renew(days=-1)
    async with serving(files.server_config()) as server:
        with pytest.raises(ConnectFailed, match="certificate has expired"):
            await ask(server, files.client_config())


async def test_mutual_authentication(files: Certificates, tmp_path: Path) -> None:
    others = Certificates.make(tmp_path / "other")
    stranger = TlsConfig(
        client_trust_cert_path=files.ca, client_cert_path=others.client[0], client_key_path=others.client[1]
    )
    async with serving(files.server_config(TlsMode.ENFORCING, ClientAuth.REQUIRE)) as server:
        assert await ask(server, files.client_config(shows_certificate=True)) == b"hello"
        for config in (files.client_config(), stranger):
            with pytest.raises(TransportError):
                await ask(server, config)
        files.write_client(make_client(files.authority, "late", days=-1))
        with pytest.raises(TransportError):
            await ask(server, files.client_config(shows_certificate=True))
        assert not server.connections
    files.write_client(make_client(files.authority, "again"))
    async with serving(files.server_config(need=ClientAuth.OPTIONAL)) as server:
        for config in (files.client_config(shows_certificate=True), files.client_config()):
            assert await ask(server, config) == b"hello"
        with pytest.raises(TransportError):
            await ask(server, stranger)


# --- reloading ----------------------------------------------------------------------------------------------------


async def serial(server: Server, files: Certificates) -> int:
    """The number of the certificate that a server shows."""
    context = ssl.create_default_context(cafile=str(files.ca))
    _, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=context)
    shown = writer.get_extra_info("ssl_object").getpeercert()
    writer.close()
    await writer.wait_closed()
    return int(shown["serialNumber"], 16)


async def test_a_renewed_certificate_is_taken_without_a_restart(
    files: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    first = files.renew()
    async with serving(files.server_config()) as server:
        pool = Pool(tls=ClientTls(files.client_config()))
        address = f"127.0.0.1:{server.port}"
        await pool.request(address, request(ECHO), 10)
        assert await serial(server, files) == first.certificate.serial_number
        second = files.renew()
        assert await serial(server, files) == second.certificate.serial_number
        await pool.request(address, request(ECHO), 10)
        assert len(server.connections) >= 1, "open connections stay"
        # The certificate alone, for the old key, as some authorities renew it.
        third = type(second)(files.renew().certificate, second.key)
        third.write(files.directory / "unused.pem", files.server[1])
        with caplog.at_level(logging.ERROR):
            for _ in range(3):
                assert await serial(server, files) == second.certificate.serial_number, "the pair does not match"
        assert caplog.text.count("cannot be used, the old ones stay in use") == 1
        assert "the key belongs to another certificate" in caplog.text
        fourth = files.renew()
        assert await serial(server, files) == fourth.certificate.serial_number
        files.server[0].write_text("no PEM")
        assert await serial(server, files) == fourth.certificate.serial_number
        files.server[0].unlink()
        assert await serial(server, files) == fourth.certificate.serial_number
        await pool.close()


async def test_clients_are_let_in_and_kept_out_by_the_trust_file(files: Certificates, tmp_path: Path) -> None:
    partner = make_authority("Partner CA")
    make_client(partner, "partner").write(tmp_path / "partner.pem", tmp_path / "partner.key")
    config = TlsConfig(
        client_trust_cert_path=files.ca,
        client_cert_path=tmp_path / "partner.pem",
        client_key_path=tmp_path / "partner.key",
    )
    trust = tmp_path / "trust.pem"
    trust.write_bytes(files.ca.read_bytes())
    settings = files.server_config(TlsMode.ENFORCING, ClientAuth.REQUIRE)
    settings = TlsConfig(
        **{name: getattr(settings, name) for name in TlsConfig.__slots__ if name != "server_trust_cert_path"},
        server_trust_cert_path=trust,
    )
    async with serving(settings) as server:
        with pytest.raises(TransportError):
            await ask(server, config)
        partner.write(tmp_path / "partner-ca.pem")
        trust.write_bytes(files.ca.read_bytes() + (tmp_path / "partner-ca.pem").read_bytes())
        assert await ask(server, config) == b"hello"
        trust.write_bytes(files.ca.read_bytes())
        with pytest.raises(TransportError):
            await ask(server, config)
        assert await ask(server, files.client_config(shows_certificate=True)) == b"hello"


async def test_a_client_takes_renewed_files_too(files: Certificates, tmp_path: Path) -> None:
    async with serving(files.server_config(TlsMode.ENFORCING, ClientAuth.REQUIRE)) as server:
        files.write_client(make_client(make_authority(), "stranger"))
        pool = Pool(tls=ClientTls(files.client_config(shows_certificate=True)))
        address = f"127.0.0.1:{server.port}"
        with pytest.raises(TransportError):
            await pool.request(address, request(ECHO), 10)
        files.write_client(make_client(files.authority, "known"))
        assert (await pool.request(address, request(ECHO), 10)).code == 0
        await pool.close()


# --- peers that misbehave -----------------------------------------------------------------------------------------


async def test_a_silent_connection_is_closed_when_it_was_idle_for_too_long(files: Certificates) -> None:
    limits = Limits(idle_seconds=0.3, drain_seconds=1)
    async with serving(files.server_config(), limits) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        assert await rest(reader) == b""
        assert not server.connections
        writer.close()


@pytest.mark.parametrize("first", [b"\x16", b"\x16\x03\x01\x02\x00\x01\x00"], ids=["one byte", "a beginning"])
async def test_a_slow_handshake_is_given_up(
    files: Certificates, first: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    limits = Limits(handshake_seconds=0.3, drain_seconds=1)
    with caplog.at_level(logging.INFO):
        async with serving(files.server_config(), limits) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(first)
            assert await rest(reader) == b""
            assert not server.connections
            writer.close()
            assert "reason=slow handshake" in caplog.text
            assert await ask(server, files.client_config()) == b"hello"


async def test_garbage_after_the_first_byte_ends_the_connection_and_no_other(files: Certificates) -> None:
    async with serving(files.server_config()) as server:
        pool = Pool(tls=ClientTls(files.client_config()))
        await pool.request(f"127.0.0.1:{server.port}", request(ECHO), 10)
        for garbage in (b"\x16" + b"x" * 500, b"\x16\x03\x01\x00\x05hello", b"\x16\x03\x03" + b"\xff" * 5000):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(garbage)
            assert len(await rest(reader)) <= 7, "an alert at most"
            writer.close()
        assert (await pool.request(f"127.0.0.1:{server.port}", request(ECHO), 10)).code == 0
        assert len(server.connections) == 1
        await pool.close()


async def test_a_server_that_stops_leaves_no_silent_connection_or_handshake_behind(files: Certificates) -> None:
    async with serving(files.server_config()) as server:
        silent = socket.create_connection(("127.0.0.1", server.port))
        half = socket.create_connection(("127.0.0.1", server.port))
        half.sendall(b"\x16\x03")
        acceptor = server._acceptor
        assert acceptor is not None
        await until(lambda: repr(acceptor) == "<Acceptor silent=1 handshakes=1>")
    for caller in (silent, half):
        caller.settimeout(10)
        with suppress(ConnectionResetError):  # closed with bytes that nobody read
            assert caller.recv(1) == b""
        caller.close()


async def test_a_client_with_tls_says_so_when_the_server_is_plain() -> None:
    async with Server(serve_commands(echo)) as server:
        with pytest.raises(ConnectFailed, match="closed the connection during the TLS handshake"):
            await ask(server, TlsConfig(client_auth_server=False))


async def test_closed_connections_are_freed_without_the_garbage_collector(files: Certificates) -> None:
    """After they were used, and after a handshake that failed."""
    made: list[weakref.ref[Connection]] = []
    async with serving(files.server_config()) as server:
        acceptor = server._acceptor
        assert acceptor is not None
        make = acceptor._make_over_tls

        def noted() -> asyncio.Protocol:
            protocol = make()
            assert isinstance(protocol, Connection)
            made.append(weakref.ref(protocol))
            return protocol

        acceptor._make_over_tls = noted
        gc.collect()
        gc.disable()
        try:
            assert await ask(server, files.client_config()) == b"hello"
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"\x16" + b"x" * 500)
            await rest(reader)
            writer.close()
            assert len(made) == 2
            await until(lambda: not any(one() for one in made))
        finally:
            gc.enable()
