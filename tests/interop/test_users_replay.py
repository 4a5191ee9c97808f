"""What mqadmin and clients once asked a 5.3.3 broker with ACL 2.0, signatures and all, is answered as it did.

The table names every answer that is another one, and why. All scenarios are one story: users are made in the first and
used in the others.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import msgspec

from downrange.auth.gate import MOST_REFUSALS_IN_A_ROW
from downrange.auth.user_access_control import ACCOUNT_CODES
from downrange.broker.app import broker
from downrange.broker.config import BrokerConfig
from downrange.protocol.codes import ResponseCode
from downrange.protocol.command import Command
from tests.support.broker_client import store_config
from tests.support.golden import Row, scenarios
from tests.support.replay import Wire, decode

STORY = ("auth_users", "auth_acls", "auth_requests", "auth_change", "auth_clients")


class Other(NamedTuple):
    """Our code and the beginning of our remark, where 5.3.3 answered something else."""

    code: int
    remark: str


NO_CLUSTER_RIGHT = Other(ResponseCode.NO_PERMISSION, "User:{} has no permission to access Cluster:DefaultCluster from ")
TOO_OLD = Other(ResponseCode.POLLING_TIMEOUT, "the broker[127.0.0.1] pop message is timeout too much")
DIFFERENT: dict[str, dict[str, Other]] = {
    "5.3.3 makes a Normal user of a type that it does not know": {
        "auth_users#21": Other(
            ResponseCode.INVALID_PARAMETER, "The userType 'Nonsense' is unknown, expected Super or "
        ),
    },
    "5.3.3 answers with its null pointer": {
        "auth_users#47": Other(ResponseCode.SYSTEM_ERROR, "the body of request 3001 is not the JSON of a UserInfo"),
        "auth_acls#19": Other(ResponseCode.SYSTEM_ERROR, "The subject 'alice' is unknown, expected User:NAME"),
    },
    "5.3.3 lets every user read and change the configuration, secrets included, and read the figures": {
        f"auth_requests#{number}": NO_CLUSTER_RIGHT for number in (89, 91, 93, 333, 335, 337)
    },
    "5.3.3 lets an Allow for a prefix win over a Deny for the topic itself": {
        "auth_change#17": Other(
            ResponseCode.NO_PERMISSION,
            "User:frank has no permission to access Topic:AuthTopic from 127.0.0.1, the decision is deny.",
        ),
    },
    "these users may pop, but their requests name a time that was long ago": {
        f"auth_requests#{number}": TOO_OLD for number in (22, 24, 73)
    },
    "the page that explains missing subscriptions has another address in 4.9.8, whose words our pulls have": {
        f"auth_requests#{number}": Other(ResponseCode.SUBSCRIPTION_NOT_EXIST, "the consumer's ")
        for number in (10, 14, 18, 20, 61)
    },
    "a group without a committed offset begins at 0 in a queue whose messages are all there": {
        "auth_clients#28": Other(ResponseCode.SUCCESS, ""),
    },
}
EXPECTED = {f"auth-533/{place}": other for places in DIFFERENT.values() for place, other in places.items()}


async def test_genuine_users_and_policies_are_obeyed_as_5_3_3_did(tmp_path: Path) -> None:
    config = BrokerConfig(
        listen_port=0,
        metrics_port=-1,
        broker_name="broker-a",
        wait_time_mills_in_send_queue=5000,
        authentication_enabled=True,
        authorization_enabled=True,
        init_authentication_user='{"username":"goldenRoot","password":"rootSecret1"}',
        failed_login_wait_mills=0,
    )
    met: set[str] = set()
    compared = 0
    async with broker(config, store_config(tmp_path)) as running:
        for name in STORY:
            rows = scenarios("auth-533.tar.xz")[f"auth-533/{name}"]
            replies = {(row.connection, row.opaque): decode(row.frame) for row in rows if row.is_response}
            wires: dict[int, Wire] = {}
            refused: Counter[int] = Counter()
            for row in rows:
                if row.is_response or row.receiver != "broker":
                    continue
                if row.connection not in wires:
                    wires[row.connection] = await Wire.open(running.server.port)
                wires[row.connection].write(row.frame)
                theirs = replies.get((row.connection, row.opaque))
                if theirs is None:  # a oneway request, or a pull that waited until its client left
                    continue
                ours = await wires[row.connection].reply_to(row.opaque)
                assert ours is not None, f"{row.place}: no answer"
                compare(row, theirs, ours)
                met |= {row.place} & EXPECTED.keys()
                compared += 1
                if ours.code == ResponseCode.NO_PERMISSION:
                    refused[row.connection] += 1
                    if refused[row.connection] % MOST_REFUSALS_IN_A_ROW == MOST_REFUSALS_IN_A_ROW - 1:
                        await wires.pop(row.connection).close()  # before our broker does; 5.3.3 never did
            for wire in wires.values():
                await wire.close()
    assert met == EXPECTED.keys()
    assert compared > 200


def compare(row: Row, theirs: Command, ours: Command) -> None:
    request = decode(row.frame)
    about = f"{row.place} {row.note}: {ours.code} {ours.remark}"
    expected = EXPECTED.get(row.place)
    if expected is not None:
        user = request.ext_fields["AccessKey"]
        assert ours.code == expected.code, about
        assert (ours.remark or "").startswith(expected.remark.format(user)), about
        assert (ours.code, ours.remark) != (theirs.code, theirs.remark), f"no difference: {about}"
    elif theirs.code != ResponseCode.SUCCESS:
        assert ours.code == theirs.code, about
        # Sentences of ACL 2.0 may go on: ours then say what would be right.
        assert (ours.remark or "").startswith(theirs.remark or ""), about
    else:
        assert ours.code == ResponseCode.SUCCESS, about
        if request.code in ACCOUNT_CODES:
            assert told(ours.body_bytes) == told_without_passwords(theirs.body_bytes), about


def told(body: bytes) -> object:
    return msgspec.json.decode(body) if body else None


def told_without_passwords(body: bytes) -> object:
    """The users and ACLs of an answer of 5.3.3; dave has the unknown type with which nobody can be made here."""
    answer = told(body)
    if isinstance(answer, dict):
        return {name: value for name, value in answer.items() if name != "password"}
    if isinstance(answer, list):
        return [
            {name: value for name, value in one.items() if name != "password"}
            for one in answer
            if one.get("username") != "dave"
        ]
    return answer


def test_every_request_about_users_was_captured() -> None:
    captured = {row.code for name in STORY for row in scenarios("auth-533.tar.xz")[f"auth-533/{name}"]}
    assert captured >= ACCOUNT_CODES
