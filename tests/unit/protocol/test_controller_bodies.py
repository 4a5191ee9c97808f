"""The headers and bodies of controller mode: what 5.3.3 wrote is read, and written again as equal data."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import pytest

from downrange.protocol import java_json
from downrange.protocol.bodies import controller
from downrange.protocol.bodies.body import BodyError, decode_body, encode_body
from downrange.protocol.bodies.fields import FieldError, decode_fields, encode_fields
from downrange.protocol.bodies.members import BrokerHeartbeatRequest
from downrange.protocol.codes import RequestCode as R
from downrange.protocol.codes import ResponseCode
from downrange.protocol.command import Command
from tests.support.golden import scenarios
from tests.support.replay import decode

CAPTURES = "controller-533.tar.xz"
OF_SIGNERS = {"AccessKey", "Signature"}


class NoFields(msgspec.Struct, frozen=True):
    """A request or response without a header."""


class Shape(NamedTuple):
    """The types of a request and of its answer; a body of None is empty or no JSON object."""

    request: type[msgspec.Struct] = NoFields
    request_body: type[Any] | None = None
    response: type[msgspec.Struct] = NoFields
    response_body: type[Any] | None = None


SHAPES: dict[int, Shape] = {
    R.BROKER_HEARTBEAT: Shape(BrokerHeartbeatRequest),
    R.CONTROLLER_ALTER_SYNC_STATE_SET: Shape(
        controller.AlterSyncStateSetRequest,
        controller.SyncStateSet,
        controller.AlterSyncStateSetResponse,
        controller.SyncStateSet,
    ),
    R.CONTROLLER_ELECT_MASTER: Shape(
        controller.ElectMasterRequest, None, controller.ElectMasterResponse, controller.ElectMasterBody
    ),
    R.CONTROLLER_REGISTER_BROKER: Shape(
        controller.RegisterBrokerToControllerRequest,
        None,
        controller.RegisterBrokerToControllerResponse,
        controller.SyncStateSet,
    ),
    R.CONTROLLER_GET_REPLICA_INFO: Shape(
        controller.GetReplicaInfoRequest, None, controller.GetReplicaInfoResponse, controller.SyncStateSet
    ),
    R.CONTROLLER_GET_METADATA_INFO: Shape(response=controller.GetMetadataInfoResponse),
    R.CONTROLLER_GET_SYNC_STATE_DATA: Shape(response_body=controller.BrokerReplicasInfo),
    R.CONTROLLER_GET_BROKER_EPOCH_CACHE: Shape(response_body=controller.EpochEntryCache),
    R.CONTROLLER_NOTIFY_BROKER_ROLE_CHANGED: Shape(controller.NotifyBrokerRoleChangedRequest, controller.SyncStateSet),
    R.CONTROLLER_UPDATE_CONTROLLER_CONFIG: Shape(),
    R.CONTROLLER_GET_CONTROLLER_CONFIG: Shape(),
    R.CONTROLLER_CLEAN_BROKER_DATA: Shape(controller.CleanBrokerDataRequest),
    R.CONTROLLER_GET_NEXT_BROKER_ID: Shape(
        controller.GetNextBrokerIdRequest, response=controller.GetNextBrokerIdResponse
    ),
    R.CONTROLLER_APPLY_BROKER_ID: Shape(controller.ApplyBrokerIdRequest, response=controller.BrokerSetResponse),
}


def exchanges() -> Iterator[tuple[str, Command, int]]:
    """Place, command, and the request code that it belongs to: of all frames that are about controller mode."""
    for rows in scenarios(CAPTURES).values():
        asked: dict[tuple[int, str, int], int] = {}
        for row in rows:
            if not row.is_response:
                asked[(row.connection, row.sender, row.opaque)] = row.code
                code = row.code
            else:
                code = asked[(row.connection, row.receiver, row.opaque)]
            if code in SHAPES:
                yield row.place, decode(row.frame), code


def test_captured_headers_and_bodies_survive_the_round_trip() -> None:
    seen: Counter[int] = Counter()
    for place, command, code in exchanges():
        seen[code] += 1
        request, request_body, response, response_body = SHAPES[code]
        header_type = response if command.is_response else request
        again = encode_fields(command.header(header_type))
        assert again == {name: value for name, value in command.ext_fields.items() if name not in OF_SIGNERS}, place
        body_type = response_body if command.is_response else request_body
        if body_type is not None and (data := command.body_bytes):
            written = encode_body(decode_body(body_type, data))
            assert json.loads(written) == java_json.loads(data), place
    # 5.3.3 was asked everything but 1007's error, 906-908, and by nobody two-way for 904.
    assert seen.keys() == SHAPES.keys()


def test_a_list_of_broker_names_is_json() -> None:
    assert controller.decode_broker_names(controller.encode_broker_names(("broker-a", "b"))) == ("broker-a", "b")
    for wrong in (b"", b"{}", b"[1]", b'["a"', b"\xff"):
        with pytest.raises(BodyError, match="not a JSON list of broker names"):
            controller.decode_broker_names(wrong)


def test_replication_figures_are_read_as_5_3_3_shows_them() -> None:
    text = (
        b'{"haClientRuntimeInfo":{"lastReadTimestamp":0,"lastWriteTimestamp":0,"masterFlushOffset":0,"maxOffset":0,'
        b'"transferredByteInSecond":0},"haConnectionInfo":[{"addr":"h:1","diff":0,"inSync":true,"slaveAckOffset":3900,'
        b'"transferFromWhere":3900,"transferredByteInSecond":36}],"inSyncSlaveNums":1,"master":true,'
        b'"masterCommitLogMaxOffset":3900}'
    )
    info = decode_body(controller.HARuntimeInfo, text)
    assert info.master
    assert info.ha_connection_info[0].slave_ack_offset == 3900
    assert encode_body(info) == text


@pytest.mark.parametrize(
    ("header_type", "fields", "wrong"),
    [
        (controller.ElectMasterRequest, {"clusterName": "c"}, "brokerName"),
        (controller.AlterSyncStateSetRequest, {"brokerName": "b", "masterBrokerId": "x"}, "masterBrokerId"),
        (
            controller.AlterSyncStateSetRequest,
            {"brokerName": "b", "masterBrokerId": "1", "masterEpoch": "3000000000"},
            "masterEpoch",
        ),
        (controller.ApplyBrokerIdRequest, {"clusterName": "c", "brokerName": "b"}, "appliedBrokerId"),
    ],
)
def test_a_wrong_field_is_named(header_type: type[msgspec.Struct], fields: dict[str, str], wrong: str) -> None:
    with pytest.raises(FieldError) as caught:
        decode_fields(header_type, fields)
    assert caught.value.field == wrong


def test_the_codes_of_refusals_are_rocketmqs() -> None:
    names = [ResponseCode(code).name for code in range(2000, 2015)]
    assert names[:3] == ["FENCED_MASTER_EPOCH", "FENCED_SYNC_STATE_SET_EPOCH", "INVALID_MASTER"]
    assert names[7] == "NOT_LEADER"
    assert names[-4:] == [
        "MASTER_STILL_EXIST",
        "ELECT_MASTER_FAILED",
        "ALTER_SYNC_STATE_SET_FAILED",
        "BROKER_ID_INVALID",
    ]
