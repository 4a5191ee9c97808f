"""Reading traces: entries of every release, joined into the life of one message."""

from __future__ import annotations

import pytest

from downrange.client.trace import ConsumeCode, MessageType, encode_end_transaction, encode_sub_after, encode_sub_before
from downrange.client.trace_reader import TracedDelivery, trace_of
from downrange.model.record import decode_records
from downrange.protocol.framing import FrameDecoder
from tests.support.golden import scenarios

ID = "7F0000011ED04E0E2F2A49FCF42F002B"


def entry(*fields: str) -> str:
    return "\x01".join(fields) + "\x02"


PUB = ("Pub", "1000", "Region", "pg", "T", "ID", "tag", "k1 k2", "10.0.0.1:1", "5", "3", "0")


def genuine_reports(scenario: str) -> list[tuple[str, str]]:
    """What the genuine tool was answered when it asked for a trace."""
    return [
        (message.body.decode(), message.born_host.host)
        for row in scenarios()[scenario]
        for command in FrameDecoder().feed(row.frame)
        if row.is_response and "QUERY_MESSAGE" in row.note and command.body_bytes
        for message in decode_records(command.body_bytes)
    ]


def genuine_entries(scenario: str, kind: str) -> list[list[str]]:
    """The entries of one kind the genuine clients sent, as fields."""
    return [
        text.split("\x01")
        for row in scenarios()[scenario]
        for command in FrameDecoder().feed(row.frame)
        if row.sender == "client" and not row.is_response and command.ext_fields.get("b") == "RMQ_SYS_TRACE_TOPIC"
        for text in command.body_bytes.decode().split("\x02")
        if text.startswith(kind)
    ]


# --- reading


def test_traces_of_a_genuine_4_9_client_are_read() -> None:
    """What the genuine tool printed for this message: one Pub in 6 ms, one Sub in 0 ms, both a success."""
    trace = trace_of(ID, genuine_reports("498-json/trace"))
    (sent,) = trace.sends
    assert (sent.group, sent.client_host, sent.cost_millis, sent.success) == ("gspg_trace", "10.0.0.9", 6, True)
    assert (sent.topic, sent.tags, sent.keys, sent.body_length) == ("gsTopicOrder", "TagA", "gstr1", 23)
    assert sent.message_type is MessageType.NORMAL
    assert sent.offset_message_id == "0A00000100009FCF0000000000003451"
    (delivery,) = trace.groups["gscg_trace"]
    assert (delivery.cost_millis, delivery.success, delivery.code) == (0, True, ConsumeCode.SUCCESS)
    assert (delivery.client_host, delivery.retry_times) == ("10.0.0.9", 0)


def test_traces_of_a_genuine_5_3_client_are_read() -> None:
    (fields,) = genuine_entries("533/trace", "Pub")
    trace = trace_of(fields[5], genuine_reports("533/trace"))
    assert [sent.success for sent in trace.sends] == [True]
    assert [delivery.success for delivery in trace.deliveries] == [True]


def test_the_forms_of_a_send_entry() -> None:
    (oldest,) = trace_of("ID", [(entry(*PUB, "true"), "h")]).sends
    assert (oldest.success, oldest.offset_message_id, oldest.client_host) == (True, None, "h")
    (usual,) = trace_of("ID", [(entry(*PUB, "OFFSET", "false"), "h")]).sends
    assert (usual.success, usual.offset_message_id) == (False, "OFFSET")
    (longest,) = trace_of("ID", [(entry(*PUB, "OFFSET", "true", "10.0.0.7"), "h")]).sends
    assert (longest.success, longest.client_host) == (True, "10.0.0.7")
    (future,) = trace_of("ID", [(entry(*PUB[:11], "77", "OFFSET", "true"), "h")]).sends
    assert future.message_type == 77


def test_the_begin_and_the_end_of_a_delivery_are_joined() -> None:
    begin = entry("SubBefore", "2000", "null", "cg", "REQ", "ID", "1", "k")
    end = entry("SubAfter", "REQ", "ID", "7", "false", "k", "4", "2007", "cg")
    other = entry("SubBefore", "1500", "Region", "cg", "REQ2", "OTHER", "0", "k")
    pending = entry("SubBefore", "3000", "Region", "cg", "REQ3", "ID", "2", "k")
    unbegun = entry("SubAfter", "REQ4", "ID", "10", "true", "k", "0", "1010", "cg0")
    short = entry("SubAfter", "REQ5", "ID", "10", "true", "k")  # old: says neither when nor whose
    reports = [(begin + other, "c1"), (end + pending, "c1"), (unbegun + short, "c2")]
    trace = trace_of("ID", reports)
    assert trace.deliveries == [
        TracedDelivery(1000, "cg0", "c2", None, 10, True, ConsumeCode.SUCCESS),
        TracedDelivery(2000, "cg", "c1", 1, 7, False, ConsumeCode.FAILED),
        TracedDelivery(3000, "cg", "c1", 2),
    ]
    assert list(trace.groups) == ["cg0", "cg"]
    assert trace_of("ID", reports * 2) == trace, "a report that is listed twice counts once"


def test_recalls_and_transactions() -> None:
    recall = entry("Recall", "5000", "Region", "pg", "T", "ID", "true")
    ended = entry(
        *("EndTransaction", "4000", "Region", "pg", "T", "ID", "tag", "k", "10.0.0.1:1", "2", "TX", "COMMIT_MESSAGE"),
        "true",
    )
    trace = trace_of("ID", [(recall + ended, "h")])
    (transaction,) = trace.transactions
    assert (transaction.transaction_id, transaction.state, transaction.from_check) == ("TX", "COMMIT_MESSAGE", True)
    assert [one.success for one in trace.recalls] == [True]


@pytest.mark.parametrize(
    "text",
    ["", "\x02", "Pub\x02", "Future\x01x\x02", "Pub\x01" * 4, entry(*PUB), "SubAfter\x01R\x01ID\x02", "\x01" * 50],
)
def test_what_cannot_be_read_is_passed_over(text: str) -> None:
    assert trace_of("ID", [(text, "h")]).is_empty


def test_numbers_that_are_none_do_not_hide_the_rest() -> None:
    (sent,) = trace_of("ID", [(entry("Pub", "soon", *PUB[2:9], "-", "", "?", "OFFSET", "true"), "h")]).sends
    assert (sent.timestamp, sent.body_length, sent.cost_millis, sent.success) == (0, 0, 0, True)


# --- writing


@pytest.mark.parametrize("scenario", ["498-json/trace", "533/trace"])
def test_deliveries_are_written_as_the_genuine_clients_write_them(scenario: str) -> None:
    for fields in genuine_entries(scenario, "SubBefore"):
        _, timestamp, region, group, request_id, message_id, times, keys = fields
        ours = encode_sub_before(
            timestamp=int(timestamp),
            region_id=None if region == "null" else region,
            group=group,
            request_id=request_id,
            message_id=message_id,
            retry_times=int(times),
            keys=keys,
        )
        assert ours == entry(*fields)
    for fields in genuine_entries(scenario, "SubAfter"):
        _, request_id, message_id, cost, success, keys, code, timestamp, group = fields
        ours = encode_sub_after(
            timestamp=int(timestamp),
            group=group,
            request_id=request_id,
            message_id=message_id,
            keys=keys,
            cost_millis=int(cost),
            success=success == "true",
            code=ConsumeCode(int(code)),
        )
        assert ours == entry(*fields)
    assert genuine_entries(scenario, "SubAfter")


def test_the_end_of_a_transaction_is_read_as_it_was_written() -> None:
    text = encode_end_transaction(
        timestamp=4000,
        group="pg",
        topic="T",
        message_id="ID",
        tags=None,
        keys="k",
        transaction_id="TX",
        store_host="10.0.0.1:1",
        state="ROLLBACK_MESSAGE",
        from_check=False,
    )
    assert text.split("\x01")[6:8] == ["null", "k"]
    (transaction,) = trace_of("ID", [(text, "h")]).transactions
    assert (transaction.timestamp, transaction.group, transaction.state) == (4000, "pg", "ROLLBACK_MESSAGE")
    assert not transaction.from_check
