"""A broker with accounts, what it holds, and requests to it over real sockets."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import msgspec

from downrange.broker.app import RunningBroker, broker
from downrange.broker.config import BrokerConfig
from downrange.protocol.bodies.send import SendMessageResponse
from downrange.protocol.codes import ResponseCode, SerializeType
from downrange.protocol.command import ONEWAY_FLAG, Command
from downrange.protocol.framing import MAX_FRAME, FrameDecoder, encode
from downrange.protocol.signing import Signer
from downrange.store.config import StoreConfig
from tests.security.matrix_requests import Half, Scene, ask, group_config, send, topic_config
from tests.support.certificates import Certificates

SECRETS: Final = {
    "admin-key": "adminSecret1",
    "producer-key": "producerSecret1",
    "consumer-key": "consumerSecret1",
    "nobody-key": "nobodySecret1",
    "reader-key": "readerSecret1",
}
ADMIN: Final = Signer("admin-key", SECRETS["admin-key"])
PRODUCER: Final = Signer("producer-key", SECRETS["producer-key"])
CONSUMER: Final = Signer("consumer-key", SECRETS["consumer-key"])
NOBODY: Final = Signer("nobody-key", SECRETS["nobody-key"])
READER: Final = Signer("reader-key", SECRETS["reader-key"])
FORGER: Final = Signer("admin-key", "not the secret")
SIGNERS: Final = {"N": NOBODY, "P": PRODUCER, "C": CONSUMER, "S": ADMIN, "W": FORGER}

PLAIN_ACCOUNTS: Final = f"""
accounts:
- {{accessKey: admin-key, secretKey: {SECRETS["admin-key"]}, admin: true}}
- {{accessKey: producer-key, secretKey: {SECRETS["producer-key"]}, topicPerms: [T1=PUB]}}
- {{accessKey: consumer-key, secretKey: {SECRETS["consumer-key"]}, topicPerms: [T1=SUB], groupPerms: [G1=SUB]}}
- {{accessKey: nobody-key, secretKey: {SECRETS["nobody-key"]}}}
"""
BATCH: Final = 10
"""Requests over one connection: a server may close one that is refused too often."""


class Wire(NamedTuple):
    """How requests travel."""

    is_binary: bool = False
    is_vip: bool = False
    is_oneway: bool = False
    is_tls: bool = False

    def __str__(self) -> str:
        return "-".join(
            (
                "binary" if self.is_binary else "json",
                "vip" if self.is_vip else "main",
                "oneway" if self.is_oneway else "answered",
                "tls" if self.is_tls else "plain",
            )
        )


PLAIN_WIRE: Final = Wire()
WIRES: Final = [Wire(*flags) for flags in product((False, True), repeat=4)]


class Generation(Protocol):
    """One of the two kinds of access control."""

    name: str

    def settings(self, directory: Path) -> dict[str, object]:
        """The keys of the broker's configuration that switch it on, with the accounts in files of the directory."""

    def account_requests(self) -> Iterable[Command]:
        """The administrator's requests that make the other accounts."""

    def changes(self, name: str) -> Sequence[Command]:
        """Requests, each of which takes an account its right to send to T1."""

    def restore(self, name: str, secret: str) -> Sequence[Command]:
        """Requests that give it back to the account."""

    def reader_of_all_but_t9(self) -> Sequence[Command]:
        """Requests that make an account which may read every topic but T9, with every group."""

    def is_refusal(self, reply: Command) -> bool:
        """Whether access control refused the request, in its own words."""


class PlainAcl:
    """Access control of 4.x."""

    name = "plain_acl"

    def settings(self, directory: Path) -> dict[str, object]:
        file = directory / "plain_acl.yml"
        file.write_text(PLAIN_ACCOUNTS)
        file.chmod(0o600)
        return {"acl_enable": True, "acl_file": file}

    def account_requests(self) -> Iterable[Command]:
        return ()

    def changes(self, name: str) -> Sequence[Command]:
        change = {"accessKey": name, "admin": False}
        return (
            ask(51, accessKey=name),
            ask(50, **change, secretKey="anotherSecret1", topicPerms="T1=PUB"),
            ask(50, **change, secretKey=SECRETS[name], topicPerms="T1=DENY"),
            ask(50, **change, secretKey=SECRETS[name], topicPerms="T1=SUB"),
        )

    def restore(self, name: str, secret: str) -> Sequence[Command]:
        return (ask(50, accessKey=name, secretKey=secret, admin=False, topicPerms="T1=PUB"),)

    def reader_of_all_but_t9(self) -> Sequence[Command]:
        account = {"accessKey": "reader-key", "secretKey": SECRETS["reader-key"], "admin": False}
        return (ask(50, **account, defaultTopicPerm="SUB", defaultGroupPerm="SUB", topicPerms="T9=DENY"),)

    def is_refusal(self, reply: Command) -> bool:
        remark = reply.remark or ""
        if reply.code == ResponseCode.NO_PERMISSION:
            return "unreadable" in remark  # a body that does not say what it would touch
        return reply.code == 1 and remark.startswith("org.apache.rocketmq.acl.common.AclException: ")


class Acl2:
    """ACL 2.0 of 5.x."""

    name = "acl2"
    _RULES: Final = {
        "producer-key": {"Topic:T1": ["Pub"]},
        "consumer-key": {"Topic:T1": ["Sub"], "Group:G1": ["Sub"]},
    }
    _REFUSALS: Final = re.compile(
        r"User:.* has no permission to access |User:.* is (not found|disabled)\.$|username cannot be null\.$"
        r"|check signature failed\.$|.*: unreadable "
    )

    def settings(self, directory: Path) -> dict[str, object]:
        first = json.dumps({"username": "admin-key", "password": SECRETS["admin-key"]})
        return {"authentication_enabled": True, "authorization_enabled": True, "init_authentication_user": first}

    def account_requests(self) -> Iterable[Command]:
        for name in ("producer-key", "consumer-key", "nobody-key"):
            yield ask(3001, {"password": SECRETS[name], "userType": "Normal"}, username=name)
            if name in self._RULES:
                yield rules_request(3006, name, self._RULES[name])

    def changes(self, name: str) -> Sequence[Command]:
        return (
            ask(3003, username=name),
            ask(3002, {"userStatus": "disable"}, username=name),
            ask(3002, {"password": "anotherSecret1"}, username=name),
            ask(3008, subject=f"User:{name}"),
            rules_request(3007, name, {"Topic:T1": ["Pub"]}, decision="Deny"),
            rules_request(3007, name, {"Topic:T1": ["Sub"]}),
            rules_request(3007, name, {"Topic:T1": ["Pub"]}, addresses=["10.9.8.0/24"]),
        )

    def restore(self, name: str, secret: str) -> Sequence[Command]:
        return (
            ask(3003, username=name),
            ask(3001, {"password": secret, "userType": "Normal"}, username=name),
            rules_request(3006, name, self._RULES[name]),
        )

    def reader_of_all_but_t9(self) -> Sequence[Command]:
        return (
            ask(3001, {"password": SECRETS["reader-key"], "userType": "Normal"}, username="reader-key"),
            rules_request(3006, "reader-key", {"Topic:*": ["Sub"], "Group:*": ["Sub"]}),
            rules_request(3007, "reader-key", {"Topic:T9": ["All"]}, decision="Deny"),
        )

    def is_refusal(self, reply: Command) -> bool:
        return reply.code == ResponseCode.NO_PERMISSION and bool(self._REFUSALS.match(reply.remark or ""))


def rules_request(
    code: int, name: str, rules: Mapping[str, list[str]], *, decision: str = "Allow", addresses: Sequence[str] = ()
) -> Command:
    entries = [
        {"resource": resource, "actions": actions, "sourceIps": list(addresses), "decision": decision}
        for resource, actions in rules.items()
    ]
    subject = f"User:{name}"
    return ask(code, {"subject": subject, "policies": [{"policyType": "Custom", "entries": entries}]}, subject=subject)


GENERATIONS: Final[Sequence[Generation]] = (PlainAcl(), Acl2())
# Files that the broker makes of what it has already, at times of its own.
_SAVED_BY_TIMERS: Final = re.compile(r"config|checkpoint$|abort$|index|commitlog|consumequeue(/(T1|T9|RMQ_SYS_\w+)|$)")


@dataclass(eq=False)
class Guarded:
    """A broker with the accounts, T1, T9, G1 and G9, and a message and a half message of both topics."""

    running: RunningBroker
    directory: Path
    generation: Generation
    tls: ssl.SSLContext
    scenes: dict[str, Scene] = field(default_factory=dict)

    @property
    def port(self) -> int:
        return self.running.server.port

    async def ask(self, *commands: Command, wire: Wire = PLAIN_WIRE) -> list[Command | None]:
        """Send requests and return their answers; None for those that get none because they are one-way."""
        replies: list[Command | None] = []
        port, tls = self.port - 2 * wire.is_vip, self.tls if wire.is_tls else None
        for at in range(0, len(commands), BATCH):
            replies += await exchange(port, [as_sent(one, wire) for one in commands[at : at + BATCH]], tls)
        return replies

    async def one(self, command: Command, wire: Wire = PLAIN_WIRE) -> Command:
        (reply,) = await self.ask(command, wire=wire)
        assert reply is not None
        return reply

    async def admin(self, *commands: Command) -> list[Command]:
        """Requests of the administrator that succeed."""
        replies = await self.ask(*(ADMIN.sign(command) for command in commands))
        for command, reply in zip(commands, replies, strict=True):
            assert reply is not None
            assert reply.code == 0, f"{command.code}: {reply.code} {reply.remark}"
        return [reply for reply in replies if reply is not None]

    def is_refusal(self, reply: Command) -> bool:
        return self.generation.is_refusal(reply)

    async def furnish(self) -> None:
        """Make the topics and the groups that are not there, or not any more."""
        for topic in ("T1", "T9"):
            if topic not in self.running.topics:
                await self.admin(ask(18, {"topicConfigList": [topic_config(topic)]}))
        await self.admin(*(ask(200, group_config(group)) for group in ("G1", "G9")))

    async def fill(self) -> None:
        """Store the messages that requests of the matrix name."""
        records, halves = {}, {}
        for topic in ("T1", "T9"):
            half = send(310, topic, properties={"TRAN_MSG": "true", "PGROUP": "PG", "UNIQ_KEY": "u"})
            place, half_place = await self.admin(send(310, topic, properties={"KEYS": "k"}), half)
            records[topic] = _physical_offset(place)
            halves[topic] = Half(_physical_offset(half_place), half_place.header(SendMessageResponse).queue_offset)
        self.scenes = {
            "own": Scene("T1", "G1", records["T1"], records["T9"], halves["T1"]),
            "other": Scene("T9", "G9", records["T9"], records["T9"], halves["T9"]),
        }

    async def state(self) -> dict[str, object]:
        """Everything that a refused request could have changed."""
        asked = {
            "config": ask(26),
            "topics": ask(21),
            "groups": ask(201),
            "offsets": ask(43),
            "delay": ask(45),
            "producers": ask(328),
            "consumers of G1": ask(203, consumerGroup="G1"),
            "consumers of G9": ask(203, consumerGroup="G9"),
            "accounts of 4.x": ask(52),
            "users": ask(3005),
            "rules": ask(3010),
        }
        replies = await self.ask(*(ADMIN.sign(command) for command in asked.values()))
        found: dict[str, object] = {
            name: (reply.code, dict(reply.ext_fields), reply.body_bytes)
            for name, reply in zip(asked, replies, strict=True)
            if reply is not None
        }
        found["log"] = self.running.store.max_offset
        found["files"] = sorted(files_of(self.directory))
        return found


def _physical_offset(reply: Command) -> int:
    return int(reply.header(SendMessageResponse).msg_id[-16:], 16)


def files_of(directory: Path) -> Iterator[str]:
    """The files below a directory, without those that the broker's timers write."""
    for path in directory.rglob("*"):
        name = str(path.relative_to(directory))
        if not _SAVED_BY_TIMERS.search(name):
            yield name


def as_sent(command: Command, wire: Wire) -> Command:
    kind = SerializeType.ROCKETMQ if wire.is_binary and command.code < 1 << 15 else SerializeType.JSON
    flag = command.flag | (ONEWAY_FLAG if wire.is_oneway else 0)
    return msgspec.structs.replace(command, serialize_type=int(kind), flag=flag)


async def exchange(port: int, commands: Sequence[Command], tls: ssl.SSLContext | None = None) -> list[Command | None]:
    """Send requests over one connection and return their answers; one that is answered follows one-way requests."""
    frames = [encode(command, number) for number, command in enumerate(commands)]
    expected = {number for number, command in enumerate(commands) if not command.is_oneway}
    if not expected:
        expected = {len(frames)}
        frames.append(encode(ask(9999), len(frames)))
    replies = await raw_exchange(port, b"".join(frames), expected, tls)
    assert replies.keys() == expected, f"answers {sorted(replies)}, expected {sorted(expected)}"
    return [replies.get(number) for number in range(len(commands))]


async def raw_exchange(
    port: int, data: bytes, expected: set[int], tls: ssl.SSLContext | None = None
) -> dict[int, Command]:
    """Send bytes over a new connection and return all answers that came until the expected ones were there."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
    try:
        writer.write(data)
        decoder, replies = FrameDecoder(max_header=MAX_FRAME), dict[int, Command]()
        async with asyncio.timeout(20):
            while not expected <= replies.keys():
                received = await reader.read(1 << 16)
                assert received, f"closed after the answers {sorted(replies)}, expected {sorted(expected)}"
                replies |= {reply.opaque: reply for reply in decoder.feed(received) if reply.is_response}
        for reply in replies.values():
            refuse_secrets(encode(reply))
        return replies
    finally:
        writer.close()


def refuse_secrets(answer: bytes) -> None:
    """No byte of any answer is part of a secret."""
    for secret in (*SECRETS.values(), "newSecret7", "newSecret8"):
        assert secret.encode() not in answer, answer


@asynccontextmanager
async def guarded(
    directory: Path, generation: Generation = GENERATIONS[0], **options: object
) -> AsyncIterator[Guarded]:
    settings = BrokerConfig(
        listen_port=0, namesrv_addr="", bind_address="127.0.0.1", metrics_port=-1, failed_login_wait_mills=0
    )
    certificates = Certificates.make(directory / "tls")
    settings = replace(settings, tls=certificates.server_config(), **generation.settings(directory), **options)  # type: ignore[arg-type]
    store = StoreConfig(
        store_path_root_dir=directory / "store", mapped_file_size_commit_log=1 << 22, max_hash_slot_num=1000,
        max_index_num=4000,
    )  # fmt: skip
    async with broker(settings, store) as running:
        made = Guarded(running, directory, generation, ssl.create_default_context(cafile=certificates.ca))
        await made.admin(*generation.account_requests())
        await made.furnish()
        await made.fill()
        yield made
