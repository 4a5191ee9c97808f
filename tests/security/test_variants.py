"""Spellings and orders of requests with which somebody could hope to get past the guard."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import struct
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

import pytest

from downrange.clock import SystemClock
from downrange.model.message import PhysicalOffset, QueueOffset, StoredMessage
from downrange.model.message_id import pack_host, unpack_host
from downrange.model.record import MAGIC_V1, encode_record
from downrange.model.topics import HALF_TOPIC
from downrange.protocol.codes import RequestCode, ResponseCode, SerializeType
from downrange.protocol.command import Command
from downrange.protocol.framing import FrameDecoder, encode, with_prefix
from downrange.protocol.signing import ACCESS_KEY, SIGNATURE, signature
from tests.security.guarded import (
    ADMIN,
    CONSUMER,
    GENERATIONS,
    NOBODY,
    PRODUCER,
    READER,
    SECRETS,
    Acl2,
    Generation,
    Guarded,
    Wire,
    guarded,
    raw_exchange,
    rules_request,
)
from tests.security.matrix_requests import Half, ask, end_transaction, heartbeat, message_id, pull, send

HOST: Final = pack_host("127.0.0.1", 1)
BODY_AT: Final = 88
"""Where the body of a record begins, behind its head."""


@pytest.fixture(params=GENERATIONS, ids=lambda generation: generation.name)
async def made(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Guarded]:
    generation: Generation = request.param
    async with guarded(tmp_path, generation) as made:
        yield made


def end_of(made: Guarded, topic: str) -> int:
    """How many messages the queues of a topic ever got."""
    return sum(made.running.store.max_offset_of(topic, queue_id) for queue_id in range(4))


def changed(command: Command, **fields: str | None) -> Command:
    """The request with some fields set, or left out where they are None; the signature stays as it is."""
    table = {**command.ext_fields, **fields}
    return Command(
        command.code,
        raw_ext={name: value for name, value in table.items() if value is not None},
        body=command.body,
    )


async def refused(made: Guarded, *commands: Command) -> None:
    for wire in (Wire(), Wire(is_binary=True), Wire(is_vip=True), Wire(is_tls=True)):
        for command, reply in zip(commands, await made.ask(*commands, wire=wire), strict=True):
            assert reply is not None
            assert made.is_refusal(reply), f"{wire} {dict(command.ext_fields)}: {reply.code} {reply.remark}"


async def test_half_a_signature_is_none(made: Guarded) -> None:
    good = PRODUCER.sign(send(310, "T1"))
    assert (await made.one(good)).code == 0
    before = await made.state()
    fields = good.ext_fields
    await refused(
        made,
        changed(good, Signature=None),
        changed(good, Signature=""),
        changed(good, Signature="AAAA"),
        changed(good, Signature=fields[SIGNATURE].lower()),
        changed(good, Signature=fields[SIGNATURE] + "\n"),
        changed(good, Signature="é" * 28),
        changed(good, AccessKey=None),
        changed(good, AccessKey=""),
        changed(good, AccessKey="PRODUCER-KEY"),
        changed(good, AccessKey="producer-key "),
        changed(good, AccessKey="admin-key"),
        changed(good, AccessKey=None, accesskey="producer-key"),
        changed(good, Signature=None, signature=fields[SIGNATURE]),
        changed(good, added="1"),
        changed(good, SecurityToken="1"),
        changed(good, e="1"),
        changed(good, h=None),
        Command(good.code, raw_ext=fields, body=b"another body"),
        Command(good.code, raw_ext=fields, body=b""),
    )
    assert await made.state() == before


NAMES: Final = (
    "t1", "T1 ", " T1", "T1\t", "T1\0", "ns%T1", "NS%T1", "T1%", "T1,T9", "T9,T1", "*", "Topic:T1", "T", "T11", "",
    "T1/../T9", "T1", "%RETRY%G1", "%RETRY%G9", "%DLQ%G1", "%DLQ%G9", "%RETRY%", "%RETRY%*", "%RETRY%g1", "%RETRY%G1 ",
    "%RETRY%%RETRY%G1", "%retry%G1", "TBW102", "SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_HALF_TOPIC", "DefaultCluster",
    "DefaultCluster_REPLY_TOPIC",
)  # fmt: skip


async def test_names_that_look_alike_are_other_names(made: Guarded) -> None:
    """Sends: the producer may T1. Pulls: the consumer may T1 and what belongs to its group."""
    before = await made.state()
    await refused(made, *(PRODUCER.sign(send(310, name)) for name in NAMES if name != "T1"))
    await refused(made, *(NOBODY.sign(send(310, name)) for name in NAMES))
    readable = ("T1", "%RETRY%G1")
    await refused(made, *(CONSUMER.sign(pull(11, name, "G1")) for name in NAMES if name not in readable))
    groups = ("g1", "G1 ", "G1\0", "ns%G1", "*", "", "G", "G11", "%RETRY%G1", "TOOLS_CONSUMER", "CID_RMQ_SYS_TRANS")
    await refused(made, *(CONSUMER.sign(pull(11, "T1", group)) for group in groups))
    await refused(made, *(CONSUMER.sign(heartbeat(group, "T1")) for group in groups))
    assert await made.state() == before


async def test_the_body_decides_when_header_and_body_differ(made: Guarded) -> None:
    before = await made.state()
    beat = heartbeat("G9", "T9")
    await refused(
        made,
        CONSUMER.sign(changed(beat, consumerGroup="G1", topic="T1")),
        CONSUMER.sign(changed(heartbeat("G1", "T9"), topic="T1")),
        CONSUMER.sign(
            changed(ask(36, offset=made.scenes["own"].other_record, group="G1", delayLevel=0), originTopic="T1")
        ),
        CONSUMER.sign(ask(33, offset=made.scenes["own"].other_record, topic="T1")),
        PRODUCER.sign(changed(end_transaction(made.scenes["other"].half), topic="T1")),
    )
    assert await made.state() == before


def json_frame(code: int, members: Sequence[tuple[str, str]], body: bytes, opaque: int = 1) -> bytes:
    """A frame whose ext fields have these members, in this order, as JSON texts."""
    ext = ",".join(f"{name}:{value}" for name, value in members)
    header = f'{{"code":{code},"extFields":{{{ext}}},"flag":0,"language":"JAVA","opaque":{opaque},"version":399}}'
    return with_prefix(SerializeType.JSON, header.encode(), len(body)) + body


def binary_frame(code: int, members: Sequence[tuple[str, str]], body: bytes, opaque: int = 1) -> bytes:
    block = b"".join(
        struct.pack(">H", len(name)) + name.encode() + struct.pack(">i", len(value.encode())) + value.encode()
        for name, value in members
    )
    header = struct.pack(">hbhiii", code, 0, 399, opaque, 0, 0) + struct.pack(">i", len(block)) + block
    return with_prefix(SerializeType.ROCKETMQ, header, len(body)) + body


async def test_a_field_that_stands_there_twice_is_read_by_all_alike(made: Guarded) -> None:
    """Whichever of the two topics the signature was made for, and whichever is stored in: it is not T9."""
    before = end_of(made, "T9")
    good = PRODUCER.sign(send(310, "T1"))
    secret, body = SECRETS["producer-key"].encode(), good.body_bytes
    others = [(name, value) for name, value in good.ext_fields.items() if name not in ("b", SIGNATURE)]
    stored = 0
    for first, second, signed_for, place in itertools.product(("T1", "T9"), ("T1", "T9"), ("T1", "T9"), (0, 4, 99)):
        text = signature({**dict(others), "b": signed_for}, body, secret)
        members = [("b", first), *others]
        members.insert(place, ("b", second))
        members.append((SIGNATURE, text))
        quoted = [(json.dumps(name), json.dumps(value)) for name, value in members]
        spelt = [('"\\u0062"' if name == '"b"' and value == '"T9"' else name, value) for name, value in quoted]
        with_null = [*quoted, ('"b"', "null")]
        frames = [json_frame(310, variant, body) for variant in (quoted, spelt, with_null)]
        frames.append(binary_frame(310, members, body))
        frames.append(binary_frame(310, [*members, ("b", "")], body))
        for frame in frames:
            replies = await raw_exchange(made.port, encode(good, 0) + frame + encode(good, 2), {0, 1, 2})
            assert replies[0].code == replies[2].code == 0
            stored += replies[1].code == 0
    assert end_of(made, "T9") == before
    assert stored > 0


async def test_a_topic_twice_in_a_pull_reads_no_other_topic(made: Guarded) -> None:
    await made.admin(send(310, "T9", body=b"a secret of T9"))
    good = CONSUMER.sign(pull(11, "T1", "G1"))
    secret = SECRETS["consumer-key"].encode()
    others = [(name, value) for name, value in good.ext_fields.items() if name not in ("topic", SIGNATURE)]
    for first, second, signed_for in itertools.product(("T1", "T9"), repeat=3):
        text = signature({**dict(others), "topic": signed_for}, b"", secret)
        members = [("topic", first), *others, ("topic", second), (SIGNATURE, text)]
        quoted = [(json.dumps(name), json.dumps(value)) for name, value in members]
        for frame in (json_frame(11, quoted, b""), binary_frame(11, members, b"")):
            replies = await raw_exchange(made.port, encode(good, 0) + frame, {0, 1})
            assert b"secret of T9" not in replies[1].body_bytes


async def test_two_accounts_in_one_request(made: Guarded) -> None:
    """The name may stand there twice: rights and secret are those of one and the same account."""
    good = PRODUCER.sign(send(310, "T9"))
    before = end_of(made, "T9")
    others = [(name, value) for name, value in good.ext_fields.items() if name != ACCESS_KEY]
    for names in itertools.permutations(("producer-key", "admin-key")):
        members = [(ACCESS_KEY, names[0]), *others, (ACCESS_KEY, names[1])]
        quoted = [(json.dumps(name), json.dumps(value)) for name, value in members]
        for frame in (json_frame(310, quoted, b"body"), binary_frame(310, members, b"body")):
            replies = await raw_exchange(made.port, frame, {1})
            assert made.is_refusal(replies[1])
    assert end_of(made, "T9") == before


async def test_requests_behind_allowed_ones_are_looked_at(made: Guarded) -> None:
    good, foreign = PRODUCER.sign(send(310, "T1")), PRODUCER.sign(send(310, "T9"))
    admin_only = PRODUCER.sign(ask(25, b"brokerPermission=4\n"))
    forged = changed(PRODUCER.sign(send(310, "T1")), b="T9")
    before = end_of(made, "T1"), end_of(made, "T9")
    line = [good, good, foreign, good, admin_only, good, forged, good]
    for _ in range(3):
        replies = await made.ask(*line)
        assert [reply is not None and made.is_refusal(reply) for reply in replies] == [one is not good for one in line]
    assert (end_of(made, "T1"), end_of(made, "T9")) == (before[0] + 15, before[1])


class Live:
    """One connection that stays open, and its requests one after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer
        self._decoder = FrameDecoder()
        self._number = 0
        self.pushed: list[Command] = []

    @staticmethod
    async def open(port: int) -> Live:
        return Live(*await asyncio.open_connection("127.0.0.1", port))

    async def ask(self, command: Command) -> Command:
        self._number += 1
        self.writer.write(encode(command, self._number))
        return await self.until(lambda reply: reply.is_response and reply.opaque == self._number)

    async def until(self, wanted: object) -> Command:
        assert callable(wanted)
        async with asyncio.timeout(20):
            while True:
                for command in self._decoder.feed(await self._reader.read(1 << 16)):
                    if wanted(command):
                        return command
                    self.pushed.append(command)


async def test_a_change_of_an_account_bites_on_live_connections(made: Guarded) -> None:
    live = await Live.open(made.port)
    good = PRODUCER.sign(send(310, "T1"))
    for _ in range(3):  # the third one is decided by what was remembered of the others
        assert (await live.ask(good)).code == 0
    for change in made.generation.changes("producer-key"):
        await made.admin(change)
        reply = await live.ask(good)
        assert made.is_refusal(reply), f"after {change.code} {dict(change.ext_fields)}: {reply.code} {reply.remark}"
        await made.admin(*made.generation.restore("producer-key", SECRETS["producer-key"]))
        assert (await live.ask(good)).code == 0
    live.writer.close()


async def test_a_pull_that_waits_ends_when_rights_change(made: Guarded) -> None:
    """It would give the account the next message after its right is gone."""
    live = await Live.open(made.port)
    asked = pull(11, "T1", "G1")
    end = str(made.running.store.max_offset_of("T1", 0))
    waiting = changed(asked, sysFlag="6", suspendTimeoutMillis="600000", queueOffset=end)
    asking = asyncio.ensure_future(live.ask(CONSUMER.sign(waiting)))
    while not any(one.usage.requests for one in made.running.server.connections):  # until the pull waits
        await asyncio.sleep(0.01)
    await made.admin(made.generation.changes("consumer-key")[0])
    reply = await asking
    assert reply.code == ResponseCode.PULL_NOT_FOUND
    assert made.is_refusal(await live.ask(CONSUMER.sign(waiting)))
    live.writer.close()


async def test_a_proxy_preamble_changes_no_address(made: Guarded) -> None:
    """Nobody is a proxy unless the configuration says so: the preamble is no frame, and the connection ends."""
    before = await made.state()
    for preamble in (
        b"PROXY TCP4 10.9.8.7 127.0.0.1 5555 10911\r\n",
        b"PROXY UNKNOWN\r\n",
        b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c" + bytes([10, 9, 8, 7, 127, 0, 0, 1, 0, 99, 0, 99]),
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", made.port)
        writer.write(preamble + encode(ADMIN.sign(ask(215, topic="T9")), 1))
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionResetError):  # closed with bytes of ours unread
                assert await reader.read() == b""
        writer.close()
    assert await made.state() == before


def java_hash(text: str) -> int:
    value = 0
    for letter in text:
        value = (31 * value + ord(letter)) & 0xFFFFFFFF
    return value


async def test_keys_of_other_topics_with_the_same_hash_find_nothing(made: Guarded) -> None:
    theirs = "a"
    mine = chr(ord(theirs) + (ord("9") - ord("1")) * 31 * 31)
    assert java_hash(f"T1#{mine}") == java_hash(f"T9#{theirs}")
    await made.admin(send(310, "T9", body=b"a secret of T9", properties={"KEYS": theirs}))
    query = {"maxNum": 9, "beginTimestamp": 0, "endTimestamp": 1 << 60}
    (found,) = await made.admin(ask(12, topic="T9", key=theirs, **query))
    assert b"a secret of T9" in found.body_bytes
    reply = await made.one(CONSUMER.sign(ask(12, topic="T1", key=mine, **query)))
    assert reply.code == 22, reply.remark
    await made.admin(send(310, "T1", body=b"for all", properties={"KEYS": mine}))
    reply = await made.one(CONSUMER.sign(ask(12, topic="T1", key=mine, **query)))
    assert reply.code == 0
    assert b"for all" in reply.body_bytes
    assert b"a secret of T9" not in reply.body_bytes


async def test_a_body_that_looks_like_a_record_shows_nothing_of_others(made: Guarded) -> None:
    """The head of a record in a body says a size that goes on into the message of somebody else."""
    place = made.running.store.max_offset
    before = end_of(made, "%RETRY%G1")
    sent = await made.one(PRODUCER.sign(send(310, "T1", body=struct.pack(">iIi", 700, MAGIC_V1, 0) + bytes(80))))
    assert sent.code == 0
    await made.admin(send(310, "T9", body=b"a secret of T9" + bytes(600)))
    inside = place + BODY_AT
    record = made.running.store.record_at(inside)
    assert record is not None
    assert b"a secret of T9" in bytes(record)  # the store itself would give it out
    for signer in (CONSUMER, ADMIN):
        reply = await made.one(signer.sign(ask(33, offset=inside)))
        assert reply.code == 1
        assert b"a secret of T9" not in reply.body_bytes
        back = await made.one(signer.sign(ask(36, offset=inside, group="G1", delayLevel=0)))
        assert back.code == 1
    assert end_of(made, "%RETRY%G1") == before


async def test_who_may_read_all_topics_but_one_finds_no_way_around(made: Guarded) -> None:
    """Messages of T9 lie in other topics while they wait, and in the log beside all others."""
    await made.admin(*made.generation.reader_of_all_but_t9())
    await made.admin(send(310, "T9", body=b"a secret of T9", properties={"DELAY": "18"}))
    scene = made.scenes["other"]
    delayed = made.running.store.record_at(made.running.store.max_offset - _record_size(made))
    assert delayed is not None
    assert b"a secret of T9" in bytes(delayed)
    place = made.running.store.max_offset - len(delayed)
    await refused(
        made,
        READER.sign(pull(11, "T9", "any")),
        READER.sign(pull(361, "SCHEDULE_TOPIC_XXXX", "any")),
        READER.sign(pull(11, "RMQ_SYS_TRANS_HALF_TOPIC", "any")),
        READER.sign(pull(11, "RMQ_SYS_TRANS_OP_HALF_TOPIC", "any")),
        READER.sign(pull(11, "TRANS_CHECK_MAX_TIME_TOPIC", "any")),
        READER.sign(ask(12, topic="SCHEDULE_TOPIC_XXXX", key="k", maxNum=9, beginTimestamp=0, endTimestamp=1 << 60)),
        READER.sign(ask(33, offset=place)),
        READER.sign(ask(33, offset=scene.record)),
        READER.sign(ask(33, offset=scene.half.physical_offset)),
        READER.sign(ask(36, offset=place, group="any", delayLevel=-1)),
        READER.sign(ask(36, offset=scene.record, group="any", delayLevel=-1)),
        READER.sign(ask(36, offset=scene.half.physical_offset, group="any", delayLevel=-1)),
        READER.sign(heartbeat("any", "T9")),
        READER.sign(heartbeat("any", "SCHEDULE_TOPIC_XXXX")),
    )
    for offset in range(place - 300, place + 80):  # whatever begins between records is none
        reply = await made.one(READER.sign(ask(33, offset=offset)))
        assert b"a secret of T9" not in reply.body_bytes


def _record_size(made: Guarded) -> int:
    """The size of the last record of the log."""
    store = made.running.store
    return next(size for size in range(91, 1000) if _ends_the_log(store.record_at(store.max_offset - size), size))


def _ends_the_log(record: memoryview | None, size: int) -> bool:
    return record is not None and len(record) == size


async def test_an_operator_of_some_topics_reaches_no_messages_of_others(tmp_path: Path) -> None:
    async with guarded(tmp_path, Acl2()) as made:
        await made.admin(rules_request(3007, "consumer-key", {"Topic:T1": ["All"], "Group:G1": ["All"]}))
        mine, theirs = message_id(made.scenes["own"].record), message_id(made.scenes["other"].record)
        direct = {"consumerGroup": "G1", "clientId": "c@1", "topic": "T1"}
        await refused(
            made,
            CONSUMER.sign(ask(309, **direct, msgId=theirs)),
            CONSUMER.sign(ask(323, topic="T1", msgId=theirs)),
            CONSUMER.sign(ask(314, srcGroup="G1", destGroup="G9", topic="T1", offline=True)),
            CONSUMER.sign(ask(314, srcGroup="G9", destGroup="G1", topic="T1", offline=True)),
            CONSUMER.sign(ask(222, topic="T9", group="G1", timestamp=0, isForce=True)),
            CONSUMER.sign(ask(25, b"traceOn=false")),
            CONSUMER.sign(ask(3001, {"password": "newSecret7", "userType": "Super"}, username="newcomer")),
        )
        reply = await made.one(CONSUMER.sign(ask(309, **direct, msgId=mine)))
        assert "not online" in (reply.remark or "")


def forged_half_message(place: int, queue_offset: int, real_topic: str) -> bytes:
    """The record of a half message, right in every byte, for a place in the log."""
    properties = f"PGROUP\x01PG\x02TRAN_MSG\x01true\x02REAL_TOPIC\x01{real_topic}\x02REAL_QID\x010"
    message = StoredMessage(
        topic=HALF_TOPIC, queue_id=0, queue_offset=QueueOffset(queue_offset), physical_offset=PhysicalOffset(place),
        body=b"forged", properties_text=properties, sys_flag=0, flag=0, born_timestamp=1, born_host=unpack_host(HOST),
        store_timestamp=1, store_host=unpack_host(HOST), reconsume_times=0, prepared_transaction_offset=0,
        body_crc=0, store_size=0,
    )  # fmt: skip
    return encode_record(message, HOST, HOST)


@pytest.mark.parametrize("real_topic", ["T1", "T9"])
@pytest.mark.parametrize("outcome", [8, 12], ids=["commit", "rollback"])
async def test_a_forged_half_message_ends_no_transaction(made: Guarded, real_topic: str, outcome: int) -> None:
    theirs = made.scenes["other"].half
    place = made.running.store.max_offset + BODY_AT
    body = forged_half_message(place, theirs.queue_offset, real_topic)
    assert (await made.one(PRODUCER.sign(send(310, "T1", body=body)))).code == 0
    before = end_of(made, "T1"), end_of(made, "T9")
    forged = changed(end_transaction(Half(place, theirs.queue_offset)), commitOrRollback=str(outcome))
    assert (await made.one(PRODUCER.sign(forged))).code != 0
    assert (end_of(made, "T1"), end_of(made, "T9")) == before
    await made.admin(end_transaction(theirs))  # their transaction has not ended
    assert end_of(made, "T9") == before[1] + 1


async def test_a_producer_cannot_end_another_transaction_with_its_own(made: Guarded) -> None:
    theirs = made.scenes["other"].half
    properties = {
        "TRAN_MSG": "true", "PGROUP": "PG", "UNIQ_KEY": "v", "TRAN_PREPARED_QUEUE_OFFSET": str(theirs.queue_offset),
        "REAL_TOPIC": "T9",
    }  # fmt: skip
    place = made.running.store.max_offset
    reply = await made.one(PRODUCER.sign(send(310, "T1", properties=properties)))
    assert reply.code == 0
    before = end_of(made, "T9")
    mine = Half(place, int(reply.ext_fields["queueOffset"]))
    assert (await made.one(PRODUCER.sign(end_transaction(mine)))).code == 0
    assert end_of(made, "T9") == before
    await made.admin(end_transaction(theirs))
    assert end_of(made, "T9") == before + 1


async def test_only_those_who_may_send_to_a_topic_are_asked_about_its_transactions(tmp_path: Path) -> None:
    """Everybody may send the heartbeat of a producer group; the question about a transaction has the message in it."""
    for generation in GENERATIONS:
        directory = tmp_path / generation.name
        directory.mkdir()
        async with guarded(directory, generation, transaction_time_out=0, transaction_check_interval=600_000) as made:
            half = send(310, "T1", properties={"TRAN_MSG": "true", "PGROUP": "PG", "UNIQ_KEY": "new"})
            await made.admin(changed(half, g=str(SystemClock().now())))
            beat = ask(34, {"clientID": "c@1", "producerDataSet": [{"groupName": "PG"}]})
            strangers = [await Live.open(made.port) for _ in range(3)]
            for live, signer in zip(strangers, (NOBODY, CONSUMER, NOBODY), strict=True):
                assert (await live.ask(signer.sign(beat))).code == 0
            await asyncio.sleep(0.01)  # a round asks about what is older than itself
            await made.running.transactions.check()
            for live, signer in zip(strangers, (NOBODY, CONSUMER, NOBODY), strict=True):
                await live.ask(signer.sign(beat))  # what was sent to it before has come now
                assert live.pushed == []
            member = await Live.open(made.port)
            assert (await member.ask(PRODUCER.sign(beat))).code == 0
            await asyncio.sleep(0.01)
            await made.running.transactions.check()
            await member.ask(PRODUCER.sign(beat))
            assert [one.code for one in member.pushed] == [RequestCode.CHECK_TRANSACTION_STATE]
            assert b"T1" in member.pushed[0].body_bytes
            for live in (member, *strangers):
                live.writer.close()


async def test_a_delayed_message_stays_in_its_topic(made: Guarded) -> None:
    before = end_of(made, "T9")
    reply = await made.one(
        PRODUCER.sign(send(310, "T1", properties={"REAL_TOPIC": "T9", "REAL_QID": "0", "DELAY": "1"}))
    )
    assert reply.code == 0
    async with asyncio.timeout(20):
        t1 = end_of(made, "T1")
        while end_of(made, "T1") == t1:
            await asyncio.sleep(0.05)
    assert end_of(made, "T9") == before


async def test_clients_do_not_get_the_signatures_of_operators(made: Guarded) -> None:
    live = await Live.open(made.port)
    assert (await live.ask(CONSUMER.sign(heartbeat("G1", "T1")))).code == 0
    for command in (
        ask(307, consumerGroup="G1", clientId="c@1", jstackEnable=False),
        ask(309, consumerGroup="G1", clientId="c@1", topic="T1", msgId=message_id(made.scenes["own"].record)),
        ask(223, topic="T1", group="G1"),
    ):
        asking = asyncio.ensure_future(made.one(ADMIN.sign(command)))
        relayed = await live.until(
            lambda one: not one.is_response and one.code != RequestCode.NOTIFY_CONSUMER_IDS_CHANGED
        )
        assert not {ACCESS_KEY, SIGNATURE} & relayed.ext_fields.keys()
        live.writer.write(encode(relayed.reply(body=b"{}"), relayed.opaque))
        assert (await asking).code == 0
    live.writer.close()
