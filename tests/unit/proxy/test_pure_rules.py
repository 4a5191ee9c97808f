"""Rules of the gRPC port that need no server: types, queues, handles, headers, settings, signatures, conversions."""

from __future__ import annotations

import gzip
import zlib
from dataclasses import replace

import hpack
import pytest

from downrange.model.message import PhysicalOffset, QueueOffset, StoredMessage, SysFlag
from downrange.model.message_id import HostPort
from downrange.model.topics import (
    EXPONENTIAL,
    CustomizedRetryPolicy,
    ExponentialRetryPolicy,
    GroupRetryPolicy,
    SubscriptionGroupConfig,
)
from downrange.proxy.access import read_authorization
from downrange.proxy.caller import timeout_seconds
from downrange.proxy.client_settings import merged
from downrange.proxy.conversion import properties_of, sys_flag_of, to_message
from downrange.proxy.errors import Refused
from downrange.proxy.handles import live_handle, parse_handle
from downrange.proxy.http2.frames import (
    PREFACE,
    ErrorCode,
    FrameReader,
    Http2Error,
    Kind,
    encode_frame,
    trailers,
)
from downrange.proxy.message_types import check_type, queue_of_group, type_of
from downrange.proxy.routing import endpoints_of
from downrange.proxy.sending import recall_broker
from downrange.proxy.times import millis, put
from downrange.proxy.wire import messages as m
from downrange.proxy.wire.enums import AddressScheme, ClientType, Code, Encoding, MessageType
from downrange.proxy.wire.stub import stub
from tests.support.grpc_replay import conversations

HANDLE = "2 1794806922005 10000 7 1 broker-a 0 2 4205524"


def test_the_types_of_the_message_classes_are_in_step() -> None:
    import downrange.proxy.wire as wire

    written = (wire.__path__[0] + "/messages.pyi").encode()
    with open(written, encoding="utf-8") as file:
        assert file.read() == stub(), "run python -m downrange.proxy.wire.stub"


def test_captured_messages_are_read_and_written_as_they_were() -> None:
    count = 0
    for rows in conversations().values():
        for row in rows:
            if row.event in ("c2s", "s2c") and hasattr(m, row.type) and "no message" not in row.note:
                if "not a protobuf" in row.note:
                    continue
                message = getattr(m, row.type).FromString(row.data)
                assert len(message.SerializeToString()) == len(row.data), row
                count += 1
    assert count > 500


@pytest.mark.parametrize(
    ("group", "queues"),
    [("fifoMessageGroup", (2, 2, 2)), ("group-1", (1, 7, 15)), ("order-42", (3, 3, 10)), ("你好", (0, 0, 0))],
)
def test_a_message_group_has_the_queue_that_it_has_in_rocketmq(group: str, queues: tuple[int, int, int]) -> None:
    assert tuple(queue_of_group(group, count) for count in (4, 8, 16)) == queues


def test_the_type_of_a_message_follows_from_its_properties() -> None:
    assert type_of({}) is MessageType.NORMAL
    assert type_of({"__SHARDINGKEY": "g"}) is MessageType.FIFO
    assert type_of({"TIMER_DELIVER_MS": "5", "__SHARDINGKEY": "g"}) is MessageType.DELAY
    assert type_of({"DELAY": "0"}) is MessageType.NORMAL
    assert type_of({"TRAN_MSG": "true", "DELAY": "3"}) is MessageType.TRANSACTION
    check_type("MIXED", MessageType.DELAY)
    with pytest.raises(Refused, match="the expected type is FIFO, but actual type is NORMAL"):
        check_type("FIFO", MessageType.NORMAL)


def test_handles_have_nine_parts_and_expire() -> None:
    handle = parse_handle(HANDLE)
    assert str(handle) == HANDLE
    assert handle.log_offset == 4205524
    assert live_handle(HANDLE, 1794806922005) == handle
    with pytest.raises(Refused, match="expired"):
        live_handle(HANDLE, 1794806922005 + 10000)
    assert parse_handle(HANDLE.rpartition(" ")[0]).log_offset == -1
    for wrong in ("", "nonsense", "1 2 3 4 5 6 7", "a 2 3 4 0 b 6 7", "1 2 3 4 9 b 6 7"):
        with pytest.raises(Refused) as error:
            parse_handle(wrong)
        assert error.value.code is Code.INVALID_RECEIPT_HANDLE


@pytest.mark.parametrize(
    ("text", "seconds"),
    [(b"3S", 3.0), (b"2999m", 2.999), (b"8760H", 8760 * 3600.0), (b"99999999S", 99999999.0), (b"5M", 300.0),
     (b"100000u", 0.1), (None, None), (b"", None), (b"123456789S", None), (b"-1S", None), (b"3s", None)],
)  # fmt: skip
def test_deadlines_are_read(text: bytes | None, seconds: float | None) -> None:
    assert timeout_seconds(text) == (None if seconds is None else pytest.approx(seconds))


def test_authorization_headers_are_read() -> None:
    signature = "E7ADDA9959AAA31662EBF574C240D62FB1986BD7"
    text = "MQv2-HMAC-SHA1 Credential=AK/region/RocketMQ, SignedHeaders=x-mq-date-time, Signature="
    for hexadecimal in (signature, signature.lower()):
        assert read_authorization(text + hexadecimal) == ("AK", bytes.fromhex(signature))
    assert read_authorization(text + "no hexadecimal number") == ("AK", b"")
    with pytest.raises(Refused, match="authentication header is incorrect"):
        read_authorization("nonsense")
    with pytest.raises(Refused, match="keyValues length"):
        read_authorization("MQv2-HMAC-SHA1 Credential")


def test_addresses_of_a_server_have_a_scheme() -> None:
    schemes = {"127.0.0.1": AddressScheme.IPV4, "::1": AddressScheme.IPV6, "mq.example.org": AddressScheme.DOMAIN_NAME}
    for host, scheme in schemes.items():
        assert endpoints_of(host, 8081).scheme == scheme


def test_settings_of_a_group_go_to_its_consumers() -> None:
    settings = m.Settings(client_type=ClientType.PUSH_CONSUMER)
    settings.subscription.group.name = "g"
    put(settings.subscription.long_polling_timeout, 7000)
    group = SubscriptionGroupConfig("g", retry_max_times=3, consume_message_orderly=True)
    found = merged(settings, group)
    assert found.subscription.fifo
    assert found.backoff_policy.max_attempts == 4
    assert millis(found.subscription.long_polling_timeout) == 20_000
    assert merged(settings, None).backoff_policy.max_attempts == 17
    assert not settings.HasField("backoff_policy")


def test_pauses_of_a_group_go_to_its_consumers() -> None:
    settings = m.Settings(client_type=ClientType.PUSH_CONSUMER)
    settings.subscription.group.name = "g"

    def policy(wanted: GroupRetryPolicy | None) -> m.RetryPolicy:
        return merged(settings, SubscriptionGroupConfig("g", group_retry_policy=wanted)).backoff_policy

    usual = [millis(pause) for pause in policy(None).customized_backoff.next]
    assert (usual[0], usual[-1], len(usual)) == (1000, 7_200_000, 18)
    listed = policy(GroupRetryPolicy(customized_retry_policy=CustomizedRetryPolicy((100, 2500))))
    assert [millis(pause) for pause in listed.customized_backoff.next] == [100, 2500]
    growing = policy(GroupRetryPolicy(EXPONENTIAL, ExponentialRetryPolicy(700, 9000, 1.5))).exponential_backoff
    assert (millis(growing.initial), millis(growing.max), growing.multiplier) == (700, 9000, 1.5)
    default = policy(GroupRetryPolicy(EXPONENTIAL)).exponential_backoff
    assert (millis(default.initial), millis(default.max), default.multiplier) == (5000, 7_200_000, 2)


def test_the_broker_of_a_timer_message_is_in_its_handle() -> None:
    handle = "djEgVG9waWNEIGJyb2tlci1hIDE3MDAwMDAwMDUwMDEgMDFCOENBM0E1RjJEM0MxMjM0MDU4NUQyQ0EwMDAwMDAwMQ=="
    assert recall_broker(handle) == "broker-a"
    for wrong in ("", "nonsense", "djE=", "ä"):
        with pytest.raises(Refused, match="recall handle is invalid"):
            recall_broker(wrong)


# --- messages and records -----------------------------------------------------------------------------------------

RECORD = StoredMessage(
    topic="T", queue_id=3, queue_offset=QueueOffset(5), physical_offset=PhysicalOffset(1000), body=b"hello",
    properties_text="", sys_flag=0, flag=0, born_timestamp=1_700_000_000_123, born_host=HostPort("10.0.0.1", 5),
    store_timestamp=1_700_000_000_456, store_host=HostPort("10.0.0.2", 10911), reconsume_times=0,
    prepared_transaction_offset=0, body_crc=0, store_size=0,
)  # fmt: skip


def test_a_message_is_stored_and_shown_with_all_it_has() -> None:
    message = m.Message(body=b"x")
    message.user_properties["colour"] = "blue"
    system = message.system_properties
    system.tag, system.message_id, system.message_group, system.trace_context = "TagA", "ID", "g", "00-trace"
    system.keys.extend(["a", "", "b"])
    system.message_type = MessageType.TRANSACTION
    system.body_encoding = Encoding.GZIP
    put(system.orphaned_transaction_recovery_duration, 30_000)
    put(system.born_timestamp, 1_700_000_000_123)
    found = properties_of(message, "T", "10.0.0.1:5")
    assert found == {
        "colour": "blue", "TAGS": "TagA", "KEYS": "a b", "UNIQ_KEY": "ID", "TRAN_MSG": "true",
        "__transactionId__": "ID", "CHECK_IMMUNITY_TIME_IN_SECONDS": "30", "RECONSUME_TIME": "0", "PGROUP": "T",
        "__SHARDINGKEY": "g", "TRACE_CONTEXT": "00-trace", "__BORNHOST": "10.0.0.1:5",
        "BORN_TIMESTAMP": "1700000000123",
    }  # fmt: skip
    assert sys_flag_of(message) == SysFlag.COMPRESSED | SysFlag.TRANSACTION_PREPARED
    text = "".join(f"{name}\x01{value}\x02" for name, value in found.items())
    shown = to_message(replace(RECORD, properties_text=text), "T", attempt=2, handle=HANDLE)
    assert dict(shown.user_properties) == {"colour": "blue"}
    assert list(shown.system_properties.keys) == ["a", "b"]
    assert shown.system_properties.body_digest.checksum == "5D41402ABC4B2A76B9719D911017C592"
    assert (shown.system_properties.message_group, shown.system_properties.trace_context) == ("g", "00-trace")
    assert shown.system_properties.store_host == "10.0.0.2:10911"
    assert shown.system_properties.delivery_attempt == 2
    assert shown.system_properties.receipt_handle == HANDLE


@pytest.mark.parametrize("packed", [gzip.compress(b"hello"), zlib.compress(b"hello")], ids=["gzip", "zlib"])
def test_compressed_bodies_are_shown_plain(packed: bytes) -> None:
    shown = to_message(replace(RECORD, body=packed, sys_flag=int(SysFlag.COMPRESSED)), "T")
    assert (shown.body, shown.system_properties.body_encoding) == (b"hello", Encoding.IDENTITY)


def test_a_body_that_cannot_be_inflated_is_shown_as_it_is() -> None:
    shown = to_message(replace(RECORD, body=b"\x1f\x8bno gzip", sys_flag=int(SysFlag.COMPRESSED)), "T")
    assert (shown.body, shown.system_properties.body_encoding) == (b"\x1f\x8bno gzip", Encoding.GZIP)


# --- frames -------------------------------------------------------------------------------------------------------


def test_frames_are_read_whole_and_cut_anywhere() -> None:
    data = PREFACE + encode_frame(Kind.PING, 0, 0, b"12345678") + encode_frame(Kind.DATA, 1, 7, bytes(300))
    whole = FrameReader(16384).feed(data)
    assert [(frame.kind, frame.stream, len(frame.payload)) for frame in whole] == [
        (Kind.PING, 0, 8),
        (Kind.DATA, 7, 300),
    ]
    for cut in range(1, len(data)):
        reader = FrameReader(16384)
        assert reader.feed(data[:cut]) + reader.feed(data[cut:]) == whole


def test_a_frame_that_is_too_large_ends_the_connection() -> None:
    with pytest.raises(Http2Error) as error:
        FrameReader(16384).feed(PREFACE + encode_frame(Kind.DATA, 0, 1, bytes(16385)))
    assert error.value.code is ErrorCode.FRAME_SIZE_ERROR


@pytest.mark.parametrize("text", ["", "plain", "50% of ä\n", "x" * 126, "x" * 127, "x" * 128, "x" * 5000])
def test_trailers_are_read_by_others(text: str) -> None:
    fields = {bytes(name): bytes(value) for name, value in hpack.Decoder().decode(trailers(13, text), raw=True)}
    assert fields[b"grpc-status"] == b"13"
    if text.isalpha():
        assert fields[b"grpc-message"] == text.encode()
