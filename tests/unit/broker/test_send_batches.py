"""Batches, and sends with V1 names: what is answered, stored and counted. `compare` says what each test proves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from downrange.protocol.bodies.fields import encode_fields
from downrange.protocol.bodies.send import BatchEntry, SendMessageRequest, encode_batch, encode_send_v1
from downrange.protocol.codes import RequestCode, SerializeType
from downrange.protocol.command import Command
from downrange.protocol.framing import encode
from tests.unit.broker.test_sends import BINARY, ID, JAVA, JSON, compare, send, usual

V1, V2, BATCH = RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE
pytestmark = pytest.mark.parametrize("kind", [JSON, BINARY])


def entries(number: int, count: int = 5) -> list[BatchEntry]:
    return [BatchEntry(n, b"body %d" % n, JAVA.replace(ID, ID.format(100 * number + n))) for n in range(count)]


def request(
    number: int, code: RequestCode, body: bytes, kind: SerializeType, *, oneway: bool = False, **fields: Any
) -> bytes:
    values: dict[str, Any] = {
        "producer_group": "group",
        "topic": "TopicA",
        "queue_id": 1,
        "born_timestamp": 1_790_000_000_000 + number,
        "properties": "WAIT\x01true",
    }
    header = SendMessageRequest(**(values | fields))
    names = encode_send_v1(header) if code is V1 else encode_fields(header)
    return encode(Command(code, number, 2 * oneway, names, body, serialize_type=int(kind)))


def batch(number: int, kind: SerializeType, code: RequestCode = BATCH, count: int = 5, **fields: Any) -> bytes:
    return request(number, code, encode_batch(entries(number, count)), kind, batch=True, **fields)


@pytest.mark.parametrize("code", [V1, V2, BATCH])
async def test_a_batch_is_usual_whatever_its_request_code(
    tmp_path: Path, kind: SerializeType, code: RequestCode
) -> None:
    chunks = [[send(0, queue_id=1)], *[[batch(2 * n, kind, code), batch(2 * n + 1, kind, code)] for n in range(4)]]
    assert compare(tmp_path, chunks).sends.accelerated == usual(8)


async def test_batches_and_single_messages_may_follow_each_other(tmp_path: Path, kind: SerializeType) -> None:
    chunk = [
        send(0, queue_id=1, kind=kind),
        send(1, queue_id=1, kind=kind),
        batch(2, kind),
        batch(3, kind, oneway=True),
        batch(4, kind, count=1),
        send(5, queue_id=1, kind=kind),
        batch(6, kind, V1),
        request(7, V1, b"single", kind, properties=JAVA),
    ]
    assert compare(tmp_path, [chunk]).sends.accelerated == usual(7)


async def test_a_single_message_with_v1_names_is_usual(tmp_path: Path, kind: SerializeType) -> None:
    chunk = [request(n, V1, b"body", kind, properties=JAVA.replace(ID, ID.format(n))) for n in range(5)]
    assert compare(tmp_path, [chunk]).sends.accelerated == usual(4)


@pytest.mark.parametrize(
    "text", ["", "WAIT\x01true\x02", "WAIT\x01false", "KEYS\x01\u4e2d\u6587\x02TAGS\x01of all", "no separator"]
)
async def test_what_a_batch_shares_is_stored_alike(tmp_path: Path, text: str, kind: SerializeType) -> None:
    chunk = [send(0, queue_id=1, kind=kind), *[batch(n, kind, properties=text) for n in range(3)]]
    assert compare(tmp_path, [chunk]).sends.accelerated == usual(3)


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        (b"", {}),
        (encode_batch(entries(0))[:-1], {}),
        (encode_batch(entries(0)) + b"\0", {}),
        (encode_batch(entries(0)).replace(b"UNIQ", b"UN\xffQ"), {}),
        (b"\xff\xff\xff\xff" + encode_batch(entries(0))[4:], {}),
        (encode_batch([BatchEntry(0, b"", "KEYS\x01" + "k" * 32_000)]), {"properties": "p" * 800}),
        (encode_batch(entries(0)), {"properties": "DELAY\x013"}),
        (encode_batch(entries(0)), {"sys_flag": 4}),
        (encode_batch(entries(0)), {"queue_id": 7}),
        (encode_batch(entries(0)), {"topic": "New"}),
    ],
)
async def test_a_batch_that_is_not_usual_is_read_in_python(
    tmp_path: Path, body: bytes, fields: dict[str, Any], kind: SerializeType
) -> None:
    odd = request(3, BATCH, body, kind, **fields)
    before = [send(0, queue_id=1, kind=kind), batch(1, kind), batch(2, kind)]
    served = compare(tmp_path, [[*before, odd, batch(4, kind)]])
    assert served.sends.accelerated == usual(3)


async def test_batches_end_in_the_next_file(tmp_path: Path, kind: SerializeType) -> None:
    chunks = [[batch(n, kind, count=n % 40 + 1) for n in range(first, first + 5)] for first in range(0, 100, 5)]
    served = compare(tmp_path, chunks)
    assert served.sends.accelerated >= usual(80)
    assert served.broker.store.max_offset > 3 * served.broker.store.config.mapped_file_size_commit_log


async def test_a_batch_that_fits_no_file_is_refused_alike(tmp_path: Path, kind: SerializeType) -> None:
    large = request(3, BATCH, encode_batch([BatchEntry(0, b"x" * 40_000, "")] * 2), kind)
    compare(tmp_path, [[send(0, queue_id=1, kind=kind), batch(1, kind), large, batch(2, kind)]])
