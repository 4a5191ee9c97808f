"""The client of etcd against real etcd processes; what both stores promise is asked of both."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from downrange.clock import SystemClock
from downrange.controller.coordination import (
    Compare,
    Coordination,
    Delete,
    OutcomeUnknown,
    Put,
    StoreUnavailable,
    Target,
)
from downrange.controller.etcd import EtcdAccess, EtcdClient
from downrange.controller.http_json import Endpoint
from downrange.controller.memory_store import MemoryStore
from downrange.settings import ConfigError
from tests.support.certificates import Certificates
from tests.support.etcd import EtcdCluster, etcd


@pytest.fixture(params=["memory", "etcd"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Coordination]:
    if request.param == "memory":
        yield MemoryStore(SystemClock())
        return
    async with etcd(tmp_path) as cluster:
        client = cluster.client()
        yield client
        await client.close()


async def test_a_transaction_happens_as_a_whole_if_its_conditions_hold(store: Coordination) -> None:
    assert (await store.range("/a")).items == ()
    absent = Compare("/a", Target.CREATED, 0)
    first = await store.txn([absent], [Put("/a", b"\x00\xff"), Put("/ab", b"2")])
    assert first.is_done
    again = await store.txn([absent], [Put("/a", b"other")])
    assert not again.is_done
    assert [(item.key, item.value, item.create_revision) for item in again.items] == [
        ("/a", b"\x00\xff", first.revision)
    ]
    changed = await store.txn([Compare("/a", Target.MODIFIED, first.revision)], [Put("/a", b"3")])
    assert changed.is_done
    assert changed.revision > first.revision
    (item,) = (await store.range("/a")).items
    assert (item.create_revision, item.mod_revision, item.value) == (first.revision, changed.revision, b"3")
    everything = await store.range("/a", is_prefix=True)
    assert [one.key for one in everything.items] == ["/a", "/ab"]
    assert everything.revision >= changed.revision
    assert (await store.txn([Compare("/a", Target.CREATED, first.revision)], [Delete("/a")])).is_done
    assert (await store.range("/a")).items == ()
    assert (await store.txn([Compare("/a", Target.MODIFIED, 0)], [])).is_done


async def test_a_key_disappears_with_its_lease_and_a_watch_tells(store: Coordination) -> None:
    lease = await store.lease_grant(2)
    assert lease.ttl >= 2
    put = await store.txn([], [Put("/l", b"x", lease.id)])
    assert await store.lease_keepalive(lease.id, 1.0) >= 2
    assert not await store.watch("/l", put.revision + 1, 0.05)
    assert await store.watch("/l", put.revision, 5)  # what has happened since is not missed
    async with asyncio.timeout(20):
        while (await store.range("/l")).items:
            await store.watch("/l", put.revision + 1, 0.5)
    assert await store.lease_keepalive(lease.id, 1.0) == 0


async def test_a_watch_hears_of_a_change_at_once(store: Coordination) -> None:
    put = await store.txn([], [Put("/w", b"1")])
    watching = asyncio.create_task(store.watch("/w", put.revision + 1, 20))
    await asyncio.sleep(0)
    assert (await store.txn([], [Delete("/w")])).is_done
    assert await asyncio.wait_for(watching, 10)


async def test_calls_go_on_at_another_node_when_one_is_killed(tmp_path: Path) -> None:
    async with etcd(tmp_path, 3) as cluster:
        client = cluster.client(timeout=6.0)
        for at, node in enumerate([cluster.nodes[0], *cluster.nodes]):
            if at:
                node.kill()
            async with asyncio.timeout(30):
                while True:
                    try:
                        await client.txn([], [Put("/k", str(at).encode())])
                        break
                    except StoreUnavailable:
                        continue
            (item,) = (await client.range("/k")).items
            assert item.value == str(at).encode()
            if at:
                cluster.start(node)
                await cluster.until_writable(node)
        await client.close()


async def test_without_a_quorum_a_write_has_no_known_outcome_and_a_read_fails(tmp_path: Path) -> None:
    async with etcd(tmp_path, 3) as cluster:
        survivor, *others = cluster.nodes
        client = cluster.client(survivor, timeout=1.0)
        await client.txn([], [Put("/k", b"1")])
        for node in others:
            node.kill()
        with pytest.raises(OutcomeUnknown):
            await client.txn([], [Put("/k", b"2")])
        with pytest.raises(StoreUnavailable):
            await client.range("/k")
        for node in others:
            cluster.start(node)
        await cluster.until_writable()
        assert (await client.range("/k")).items[0].value in (b"1", b"2")
        await client.close()


async def test_a_node_that_hangs_costs_the_time_of_one_call(tmp_path: Path) -> None:
    async with etcd(tmp_path, 3) as cluster:
        hung = cluster.nodes[0]
        client = cluster.client(timeout=9.0)
        await client.range("/k")
        hung.hang()
        assert (await client.range("/k")).items == ()
        of_hung = cluster.client(hung, timeout=0.3)
        with pytest.raises(StoreUnavailable, match="did not answer within"):
            await of_hung.range("/k")
        await of_hung.close()
        await client.close()


async def test_a_user_with_a_password_is_let_in_and_others_are_not(tmp_path: Path) -> None:
    async with etcd(tmp_path) as cluster:
        endpoint = cluster.nodes[0].endpoint
        admin = cluster.client()
        for path, body in (
            ("user/add", {"name": "root", "password": "top secret"}),
            ("role/add", {"name": "root"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("enable", {}),
        ):
            await admin._read(f"/v3/auth/{path}", body)
        await admin.close()

        def client(user: str, password: str) -> EtcdClient:
            return EtcdClient(EtcdAccess((Endpoint.parse(endpoint),), user=user, password=password))

        inside = client("root", "top secret")
        assert (await inside.txn([], [Put("/k", b"1")])).is_done
        inside._token = "expired.1"  # noqa: S105
        with pytest.raises(OutcomeUnknown):
            await inside.txn([], [Put("/k", b"2")])
        assert (await inside.txn([], [Put("/k", b"3")])).is_done
        for outside in (client("", ""), client("root", "wrong")):
            with pytest.raises(StoreUnavailable) as refused:
                await outside.range("/k")
            assert "top secret" not in str(refused.value)
            await outside.close()
        await inside.close()
        assert "top secret" not in repr(EtcdAccess((), password="top secret"))  # noqa: S106


async def test_tls_with_the_right_certificate_only(tmp_path: Path) -> None:
    certificates = Certificates.make(tmp_path / "tls")
    cluster = EtcdCluster(tmp_path, 1)
    node = cluster.nodes[0]
    config = certificates.server_config()
    secure = node.endpoint.replace("http:", "https:")
    members = f"{node.name}={node.peer_url}"
    node.start(
        members, "--cert-file", str(config.server_cert_path), "--key-file", str(config.server_key_path),
        "--listen-client-urls", secure, "--advertise-client-urls", secure,
    )  # fmt: skip
    try:
        trusting = EtcdClient(
            EtcdAccess((Endpoint.parse(secure),), tls=ssl.create_default_context(cafile=certificates.ca))
        )
        async with asyncio.timeout(30):
            while True:
                try:
                    assert (await trusting.txn([], [Put("/k", b"1")])).is_done
                    break
                except StoreUnavailable:
                    await asyncio.sleep(0.05)
        stranger = EtcdClient(EtcdAccess((Endpoint.parse(secure),), tls=ssl.create_default_context()))
        with pytest.raises(StoreUnavailable, match="cannot connect"):
            await stranger.range("/k")
        await trusting.close()
        await stranger.close()
    finally:
        node.kill()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n[1,2,3]",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n{}",
        b"HTTP/1.1 500 Oops\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n",
        b"X" * 70_000 + b"\r\n\r\n",
    ],
)
async def test_a_peer_that_is_no_etcd_is_reported_in_one_line(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        client = EtcdClient(EtcdAccess((Endpoint.parse(f"127.0.0.1:{port}"),), timeout=2.0))
        with pytest.raises(StoreUnavailable, match=f"etcd: http://127.0.0.1:{port}"):
            await client.range("/k")
        with pytest.raises(OutcomeUnknown):
            await client.txn([], [Put("/k", b"1")])
        await client.close()


def test_addresses_are_checked() -> None:
    assert str(Endpoint.parse("10.0.0.1:2379")) == "http://10.0.0.1:2379"
    assert Endpoint.parse("https://etcd.example:2379/").is_tls
    for wrong in (
        "",
        "etcd",
        "http://etcd",
        "ftp://etcd:1",
        "http://u:p@etcd:1",
        "http://etcd:1/path",
        "http://[::1",
        "h:99999",
    ):
        with pytest.raises(ConfigError, match="expected http://host:port"):
            Endpoint.parse(wrong)


def test_etcd_is_installed() -> None:
    """The tests above would fail one by one; this one says why."""
    subprocess.run(["etcd", "--version"], check=True, capture_output=True)
