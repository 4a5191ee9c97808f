"""The published holes of RocketMQ's servers, tried on ours. They needed no account, so these servers ask for none.

Every attempt would leave a file with MARKER in its name, or change one that is there. None may.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest

from downrange.broker.app import RunningBroker, broker
from downrange.broker.config import REMOTELY_CHANGEABLE as BROKER_KEYS
from downrange.broker.config import BrokerConfig
from downrange.namesrv.app import name_server
from downrange.namesrv.config import NamesrvConfig
from downrange.protocol.bodies.send import BatchEntry, encode_batch
from downrange.protocol.codes import RequestCode, ResponseCode, SerializeType
from downrange.protocol.command import Command
from downrange.protocol.framing import encode, with_prefix
from downrange.settings import parse_properties
from downrange.store.config import StoreConfig
from tests.security.guarded import exchange, raw_exchange
from tests.security.matrix_requests import (
    Half,
    ask,
    end_transaction,
    group_config,
    heartbeat,
    locks,
    pull,
    send,
    send_v1,
    topic_config,
)
from tests.support.controllers import running_controller

MARKER: Final = "evilmarker"


@asynccontextmanager
async def open_broker(directory: Path) -> AsyncIterator[RunningBroker]:
    """A broker without access control, some directories below the test's own."""
    config = BrokerConfig(listen_port=0, namesrv_addr="", bind_address="127.0.0.1", metrics_port=-1)
    store = StoreConfig(
        store_path_root_dir=directory / "a" / "b" / "store", mapped_file_size_commit_log=1 << 22,
        max_hash_slot_num=1000, max_index_num=4000,
    )  # fmt: skip
    async with broker(config, store) as running:
        yield running


@asynccontextmanager
async def open_name_server(directory: Path) -> AsyncIterator[int]:
    config = NamesrvConfig(
        listen_port=0, kv_config_path=directory / "ns" / "kv.json", config_store_path=directory / "ns" / "ns.properties"
    )
    async with name_server(config) as server:
        yield server.port


async def answers(port: int, *commands: Command) -> list[Command]:
    return [reply for reply in await exchange(port, commands) if reply is not None]


def names_of(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def children() -> list[str]:
    """The processes that this one started."""
    return [path.read_text() for path in Path(f"/proc/{os.getpid()}/task").glob("*/children")]


# --- CVE-2019-17572: a topic's name becomes a path -------------------------------------------------------------------


def paths(directory: Path) -> list[str]:
    """Names that lead out of the store, or look as if they could."""
    return [
        f"../{MARKER}", f"../../{MARKER}", f"../../../../../../../../{directory}/{MARKER}", f"..\\{MARKER}",
        f"{directory}/{MARKER}", f"x/../../{MARKER}", f"{MARKER}/../../..", f"{MARKER}\0", f"\0{MARKER}", ".", "..",
        "../..", f"%2e%2e/{MARKER}", f"\uff0e\uff0e/{MARKER}", f"\uff0e\uff0e\uff0f{MARKER}", f"./{MARKER}",
        f"~/{MARKER}", f"{MARKER}\n", MARKER * 26, f"{MARKER}:stream", f"$({MARKER})", f"`{MARKER}`",
    ]  # fmt: skip


CREATING: Final[dict[str, Callable[[str], Command]]] = {
    "10": lambda name: send_v1(10, name),
    "310": lambda name: send(310, name),
    "310 half": lambda name: send(310, name, properties={"TRAN_MSG": "true", "PGROUP": "PG"}),
    "310 delayed": lambda name: send(310, name, properties={"DELAY": "1"}),
    "310 retry": lambda name: send(310, f"%RETRY%{name}"),
    "320": lambda name: send(320, name, body=encode_batch([BatchEntry(0, b"one", "")]), batch=True),
    "324": lambda name: send_v1(324, name),
    "325": lambda name: send(325, name),
    "17": lambda name: ask(
        17, topic=name, defaultTopic="TBW102", readQueueNums=1, writeQueueNums=1, perm=6, topicFilterType="SINGLE_TAG"
    ),
    "18": lambda name: ask(18, {"topicConfigList": [topic_config("good"), topic_config(name)]}),
    "200": lambda name: ask(200, group_config(name)),
    "225": lambda name: ask(225, {"groupConfigList": [group_config("good"), group_config(name)]}),
    "36": lambda name: ask(36, offset=0, group=name, delayLevel=-1),
    "11": lambda name: pull(11, name, "good"),
    "513": lambda name: ask(513, {"topic": name}, topic=name),
}
"""Requests that store or create under a name: they must be refused."""
OTHERS: Final[dict[str, Callable[[str], Command]]] = {
    "11": lambda name: pull(11, "T1", name),
    "34": lambda name: heartbeat(name, "T1"),
    "34 topic": lambda name: heartbeat("good", name),
    "35": lambda name: ask(35, clientID=name, consumerGroup=name),
    "37": lambda name: end_transaction(Half(0, 0)),
    "41": lambda name: locks(41, name, name),
    "12": lambda name: ask(12, topic=name, key="k", maxNum=9, beginTimestamp=0, endTimestamp=1 << 60),
    "14": lambda name: ask(14, consumerGroup=name, topic=name, queueId=0),
    "15": lambda name: ask(15, consumerGroup=name, topic=name, queueId=0, commitOffset=1),
    "29": lambda name: ask(29, topic=name, queueId=0, timestamp=0),
    "30": lambda name: ask(30, topic=name, queueId=0),
    "31": lambda name: ask(31, topic=name, queueId=0),
    "32": lambda name: ask(32, topic=name, queueId=0),
    "202": lambda name: ask(202, topic=name),
    "207": lambda name: ask(207, groupName=name, removeOffset=True),
    "215": lambda name: ask(215, topic=name),
    "222": lambda name: ask(222, topic=name, group=name, timestamp=0, isForce=True),
    "306": lambda name: ask(306),
    "314": lambda name: ask(314, srcGroup=name, destGroup=name, topic=name, offline=True),
    "316": lambda name: ask(316),
    "321": lambda name: ask(321, topic=name, queueId=0, index=0, count=1),
}
"""Requests that look something up or delete it; some answer success, since nothing is there to delete."""


async def test_no_name_becomes_a_path(tmp_path: Path) -> None:
    kept = tmp_path / "a" / "b" / "precious" / "file"
    kept.parent.mkdir(parents=True)
    kept.write_text("kept")
    precious = ["../precious", "../../precious", "precious", "../../../precious", f"{kept.parent}"]
    async with open_broker(tmp_path) as running:
        port = running.server.port
        (stored,) = await answers(port, send(310, "T1"))
        assert stored.code == 0
        for name in (*paths(tmp_path), *precious):
            for what, make in CREATING.items():
                (reply,) = await answers(port, make(name))
                if name != "precious":
                    assert reply.code != 0, f"{what} of {name!r} was carried out"
            for make in OTHERS.values():
                await answers(port, make(name))
        assert not {topic.topic_name for topic in running.topics} & set(paths(tmp_path))
    assert kept.read_text() == "kept"
    assert [name for name in names_of(tmp_path) if MARKER in name] == []
    assert not (tmp_path.parent / MARKER).exists()
    queues = {path.name for path in (tmp_path / "a" / "b" / "store" / "consumequeue").iterdir()}
    assert all(re.fullmatch(r"[%|a-zA-Z0-9_-]+", name) for name in queues), queues


async def test_queue_ids_out_of_range_make_no_directory(tmp_path: Path) -> None:
    async with open_broker(tmp_path) as running:
        for queue_id in (4, 99, 2**31 - 1, 2**31, 2**63, -(2**31)):
            command = send(310, "T1")
            fields = {**command.ext_fields, "e": str(queue_id)}
            (reply,) = await answers(running.server.port, Command(310, raw_ext=fields, body=b"body"))
            assert reply.code != 0 or queue_id < 0  # a negative one means: any queue
        await answers(
            running.server.port,
            *(ask(15, consumerGroup="g", topic="T1", queueId=one, commitOffset=1) for one in (-1, 2**31 - 1)),
        )
    made = {path.name for path in (tmp_path / "a" / "b" / "store" / "consumequeue" / "T1").iterdir()}
    assert made <= {"0", "1", "2", "3"}


# --- CVE-2023-33246, CVE-2023-37582: configuration becomes a command, or a file --------------------------------------

KEYS: Final = (
    "rocketmqHome", "filterServerNums", "namesrvAddr", "brokerConfigPath", "configStorePath", "kvConfigPath",
    "configBlackList", "storePathRootDir", "storePathCommitLog", "aclEnable", "aclFile", "authenticationEnabled",
    "authorizationEnabled", "authenticationWhitelist", "initAuthenticationUser", "innerClientAuthenticationCredentials",
    "authenticationProvider", "bindAddress", "listenPort", "brokerIP1", "brokerIP2", "metricsPort", "tls.server.mode",
    "tls.config.file", "messageStorePlugIn", "transactionalMessageCheckListenerImpl", "productEnvName", "etcdEndpoints",
    "etcdPrefix", "",
)  # fmt: skip


def spellings(key: str, value: str) -> Iterator[str]:
    """The line of a properties file, and other ways to write it."""
    yield f"{key}={value}"
    if not key:
        return
    yield f"  {key} : {value}  "
    yield f"\t{key}\t{value}"
    yield f"{key}\\\n={value}"
    yield f"\\u{ord(key[0]):04x}{key[1:]}={value}"
    yield f"{key[:3]}\\u{ord(key[3]):04X}{key[4:]}={value}"
    yield f"\\{key[0]}{key[1:]}={value}" if key[0] not in "nrtfu" else f"{key}={value}"
    yield f"{key} ={value}\r"
    yield f"# a comment\r{key}={value}"
    yield f"{key.upper()}={value}"
    yield f"{key}\\ ={value}"
    yield f"{key}\0={value}"


def attack(directory: Path) -> str:
    """The value that made a broker of 4.9.5 run a command."""
    return f"-c $@|sh . echo touch {directory}/{MARKER};"


@asynccontextmanager
async def open_server(directory: Path, server: str) -> AsyncIterator[int]:
    """A server without access control; its port."""
    match server:
        case "broker":
            async with open_broker(directory) as running:
                yield running.server.port
        case "name server":
            async with open_name_server(directory) as port:
                yield port
        case _:
            async with running_controller(directory) as controller:
                yield controller.server.port


SETTINGS: Final = {
    "broker": (25, 26, "traceOn=false"),
    "name server": (318, 319, "orderMessageEnable=true"),
    "controller": (1009, 1010, "notifyBrokerRoleChanged=false"),
}
"""The requests that change and show settings, and a change that is allowed."""


@pytest.mark.parametrize("server", SETTINGS)
async def test_no_key_outside_the_list_is_changed(tmp_path: Path, server: str) -> None:
    before_children = children()
    update, show, harmless = SETTINGS[server]
    async with open_server(tmp_path, server) as port:
        get = ask(show)
        (before,) = await answers(port, get)
        tried = 0
        for key in KEYS:
            for line in spellings(key, attack(tmp_path)):
                for body in (line, f"{harmless}\n{line}", f"{line}\n{harmless}"):
                    (reply,) = await answers(port, ask(update, body.encode()))
                    assert reply.code in (ResponseCode.NO_PERMISSION, ResponseCode.SYSTEM_ERROR), f"{body!r}: {reply}"
                    tried += 1
        assert tried > 500
        pair = f"filterServerNums=1\nrocketmqHome={attack(tmp_path)}"
        (reply,) = await answers(port, ask(update, pair.encode()))
        assert reply.code == ResponseCode.NO_PERMISSION
        (after,) = await answers(port, get)
        assert after.body_bytes == before.body_bytes
        assert after.ext_fields == before.ext_fields
        others = [ask(code, pair.encode()) for code, _, _ in SETTINGS.values() if code != update]
        for unknown in await answers(port, *others):
            assert unknown.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
        (changed,) = await answers(port, ask(update, harmless.encode()))
        assert changed.code == ResponseCode.SUCCESS
    assert children() == before_children
    assert [name for name in names_of(tmp_path) if MARKER in name] == []


async def test_line_breaks_in_values_make_no_lines(tmp_path: Path) -> None:
    """A line break in the value of a harmless key makes no second line in the file that the next start reads."""
    evil = f"rocketmqHome={attack(tmp_path)}"
    async with open_broker(tmp_path) as running, open_name_server(tmp_path) as namesrv_port:
        for breaking in ("\\n", "\\r", "\\r\\n", "\\u000a", "\\u000d", "\\u0085", "\\u2028", "\\f", "\\\n"):
            for key in sorted(BROKER_KEYS):
                await answers(running.server.port, ask(25, f"{key}=1{breaking}{evil}".encode()))
            for key in ("orderMessageEnable", "deleteTopicWithBrokerRegistration"):
                await answers(namesrv_port, ask(318, f"{key}=true{breaking}{evil}".encode()))
            value = breaking.encode().decode("unicode_escape")
            await answers(namesrv_port, ask(100, namespace=f"n{value}", key=f"k{value}", value=f"v{value}{evil}"))
        await answers(running.server.port, ask(25, b"deleteWhen=05"))
        await answers(namesrv_port, ask(318, b"orderMessageEnable=true"))
        files = [tmp_path / name for name in names_of(tmp_path) if name.endswith(".properties")]
        assert len(files) == 2
        for file in files:
            assert parse_properties(file.read_text()).keys() <= BROKER_KEYS | {
                "orderMessageEnable",
                "deleteTopicWithBrokerRegistration",
            }
            assert "rocketmqHome" not in re.split(r"[=\n]", file.read_text())
    assert [name for name in names_of(tmp_path) if MARKER in name] == []


async def test_key_values_stay_in_their_file(tmp_path: Path) -> None:
    async with open_name_server(tmp_path) as port:
        for name in paths(tmp_path):
            await answers(
                port,
                ask(100, namespace=name, key=name, value="x"),
                ask(102, namespace=name, key="k"),
                ask(219, namespace=name),
            )
    assert {path for path in names_of(tmp_path) if "kv.json" not in path} <= {"ns", "ns/ns.properties"}


# --- CVE-2022-1471 and its like: YAML that makes objects -------------------------------------------------------------


@pytest.mark.parametrize(
    "tag",
    [
        '!!python/object/apply:os.system ["touch {}"]',
        '!!python/object/new:subprocess.Popen [["touch", "{}"]]',
        '!!python/object/apply:subprocess.check_output [["touch", "{}"]]',
        '!!javax.script.ScriptEngineManager [!!java.net.URLClassLoader [[!!java.net.URL ["file://{}"]]]]',
        "!!python/name:os.system {}",
    ],
)
def test_a_tag_in_an_accounts_file_is_an_error_and_not_an_object(tmp_path: Path, tag: str) -> None:
    account = "{accessKey: admin-key, secretKey: adminSecret1, admin: true}"
    evil = tag.format(tmp_path / MARKER)
    (tmp_path / "plain_acl.yml").write_text(f"accounts:\n- {account}\nmore: {evil}\n")
    (tmp_path / "plain_acl.yml").chmod(0o600)
    (tmp_path / "broker.conf").write_text("aclEnable=true\n")
    line = ["standalone", "-c", str(tmp_path / "broker.conf"), "-d", str(tmp_path / "data"), "--namesrv-port", "0"]
    run = subprocess.run([sys.executable, "-m", "downrange", *line], capture_output=True, text=True, timeout=60)
    assert run.returncode == 2
    assert len(run.stderr.strip().splitlines()) == 1
    assert "plain_acl.yml" in run.stderr
    assert not (tmp_path / MARKER).exists()


# --- lengths ---------------------------------------------------------------------------------------------------------


def frames_with_wrong_lengths() -> dict[str, bytes]:
    good = encode(ask(28), 1)
    header = b'{"code":28,"flag":0,"language":"JAVA","opaque":1,"version":399}'
    wrong = {
        "a frame of 2 GiB": struct.pack(">iI", 0x7FFFFFFF, len(header)) + header,
        "a negative frame": struct.pack(">iI", -1, len(header)) + header,
        "an empty frame": struct.pack(">i", 0) * 8,
        "a frame of three bytes": struct.pack(">i", 3) + b"abc" + good,
        "a header longer than its frame": struct.pack(">iI", 4 + len(header), 0x00FFFFFF) + header,
        "a header as long as possible": struct.pack(">iI", 0x01000000, 0x00FFFFFF) + header,
        "an unknown encoding": struct.pack(">iI", 4 + len(header), 0x7F000000 | len(header)) + header,
        "a deep header": with_prefix(SerializeType.JSON, b'{"code":28,"extFields":' + b"[" * 100_000, 0),
    }
    for name, lengths in {
        "remark": (0x7FFFFFFF, 0),
        "negative remark": (-5, 0),
        "fields": (0, 0x7FFFFFFF),
        "negative fields": (0, -9),
    }.items():
        binary = struct.pack(">hbhiii", 28, 0, 399, 1, 0, lengths[0]) + struct.pack(">i", lengths[1])
        wrong[f"a binary header with {name} too long"] = with_prefix(SerializeType.ROCKETMQ, binary, 0)
    for length in (0x7FFFFFFF, -1, 0x7FFFFFF0):
        block = struct.pack(">H", 1) + b"b" + struct.pack(">i", length) + b"T1"
        binary = struct.pack(">hbhiii", 310, 0, 399, 1, 0, 0) + struct.pack(">i", len(block)) + block
        wrong[f"a binary field of {length} bytes"] = with_prefix(SerializeType.ROCKETMQ, binary, 0)
    for size, length in ((0x7FFFFFFF, 1), (-1, 1), (40, 0x7FFFFFFF), (40, -1), (0, 0)):
        body = struct.pack(">iiiii", size, 0, 0, 0, length) + b"body" + struct.pack(">h", 0)
        wrong[f"a batch entry of {size}, {length} bytes"] = encode(send(320, "T1", body=body, batch=True), 1)
    return wrong


@pytest.mark.parametrize("server", SETTINGS)
async def test_wrong_lengths_end_the_connection_or_are_refused(tmp_path: Path, server: str) -> None:
    _, show, _ = SETTINGS[server]
    async with open_server(tmp_path, server) as port:
        for name, data in frames_with_wrong_lengths().items():
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data)
            writer.write_eof()
            received = b""
            async with asyncio.timeout(20):
                with contextlib.suppress(ConnectionResetError):
                    received = await reader.read()
            writer.close()
            if received:
                assert b'"code":0' not in received, f"{name}: {received!r}"
            alive = await raw_exchange(port, encode(ask(show), 7), {7})
            assert alive[7].code == 0
        if server == "broker":
            (state,) = await answers(port, ask(28))
            assert json.loads(state.body_bytes)["table"]["commitLogMaxOffset"] == "0"


async def test_the_controllers_requests_and_those_of_filter_servers_do_not_exist(tmp_path: Path) -> None:
    async with open_broker(tmp_path) as running, open_name_server(tmp_path) as namesrv_port:
        codes = [54, 55, 301, 302, *range(1001, 1014), 905, 908]
        for port in (running.server.port, namesrv_port):
            replies = await answers(
                port, *(ask(code) for code in codes if port != running.server.port or code not in running.codes)
            )
            assert {reply.code for reply in replies} == {ResponseCode.REQUEST_CODE_NOT_SUPPORTED}
        assert RequestCode.GET_BROKER_CLUSTER_ACL_CONFIG not in running.codes
