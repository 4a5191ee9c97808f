"""What clients with accounts once sent to a genuine 4.9.8 broker, sent to ours over sockets: same codes, same remarks.

One broker plays all scenarios in the order in which they were captured. Requests go out byte for byte: they are signed.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple

from downrange.broker.app import RunningBroker, broker
from downrange.broker.config import BrokerConfig
from downrange.model.topics import TopicConfig
from downrange.protocol.command import Command
from downrange.store.config import StoreConfig
from tests.support.golden import Row, captured_file, scenarios
from tests.support.replay import Wire, decode, plain_remark

ARCHIVE: Final = "acl-498.tar.xz"
# The genuine broker had answered the first list of requests before, in an attempt that was not captured.
SCENARIOS: Final = ("acl_requests", "acl_requests", "acl_clients", "acl_admin_codes", "acl_config")
JAVA: Final = ", org.apache"


class Difference(NamedTuple):
    note: str
    code: int
    golden: tuple[int, str]
    ours: tuple[int, str] | None

    def __str__(self) -> str:
        return f"{self.code} {self.note}: 4.9.8 {self.golden}, ours {self.ours}"


class OnPurpose(NamedTuple):
    """A difference that we want, and why. Empty or zero fields fit everything."""

    because: str
    note: str
    codes: frozenset[int] = frozenset()
    ours: str = ""


_NEEDS_ADMIN: Final = "AclException: Need admin permission for request code="
_WHITE: Final = "a white list stands in for a signature, but never makes an administrator here"
ON_PURPOSE: Final = (
    OnPurpose(
        "nobody reads this remark of a success", r"^(mqadmin updateTopic|admin: create topic)", frozenset({17}), r"^0 $"
    ),
    OnPurpose("open to every account in 4.9.8; it shows or changes the whole broker", r"^user: ", ours=_NEEDS_ADMIN),
    OnPurpose(
        "open to every account in 4.9.8; it shows the whole broker", r"^white address elsewhere", ours=_NEEDS_ADMIN
    ),
    OnPurpose(_WHITE, r"^account with white address", ours=f"{_NEEDS_ADMIN}.*not enough, sign the request"),
    OnPurpose(
        _WHITE, r"^no key, address on the global white list", ours=f"{_NEEDS_ADMIN}.*not enough, sign the request"
    ),
    OnPurpose("offsets of a topic are shown to those who may read it", r"^user: max offset", ours="topic:AclOther$"),
    OnPurpose("queues are locked by those who may consume with the group", r"^user: lock", ours="group:AclDenied$"),
    OnPurpose(
        "4.9.8 repeats the secret in its answer", r"^mqadmin updateAclConfig", frozenset({50}), r"secretKey=\*{6} "
    ),
    OnPurpose(
        "such a pattern keeps 4.9.8 from starting again",
        r"^mqadmin update(AclConfig|GlobalWhiteAddr)",
        frozenset({50, 53}),
        "is no address pattern",
    ),
    OnPurpose("Java lets a pull overtake the heartbeat before it", r"^push consumer", frozenset({11}), "^0 FOUND"),
    OnPurpose("an account is gone at once; 4.9.8 reads its file again after some seconds", r"^deleted user: send"),
)


def reason_of(difference: Difference) -> OnPurpose | None:
    ours = "" if difference.ours is None else f"{difference.ours[0]} {difference.ours[1]}"
    for wanted in ON_PURPOSE:
        fits_code = not wanted.codes or difference.code in wanted.codes
        if fits_code and re.search(wanted.note, difference.note) and ours and re.search(wanted.ours, ours):
            return wanted
    return None


@asynccontextmanager
async def captured_broker(directory: Path) -> AsyncIterator[RunningBroker]:
    file = directory / "plain_acl.yml"
    file.write_bytes(captured_file(ARCHIVE, "frames/acl-498/plain_acl.before.yml"))
    file.chmod(0o600)
    config = BrokerConfig(
        broker_name="broker-a", listen_port=0, namesrv_addr="", bind_address="127.0.0.1", metrics_port=-1,
        acl_enable=True, acl_file=file, failed_login_wait_mills=0,
    )  # fmt: skip
    store = StoreConfig(store_path_root_dir=directory / "store", mapped_file_size_commit_log=1 << 22)
    async with broker(config, store) as running:
        yield running


def outcome(reply: Command) -> tuple[int, str]:
    """Code and remark, without the Java method that a remark ends with."""
    return reply.code, plain_remark(reply.remark).partition(JAVA)[0]


async def play(port: int, rows: tuple[Row, ...]) -> list[Difference]:
    """Send the requests of a scenario, each over its connection, and compare the answers."""
    wires: dict[int, Wire] = {}
    requests: dict[tuple[int, int], Row] = {}
    found = []
    for row in rows:
        if "namesrv" in (row.sender, row.receiver):
            continue
        wire = wires.get(row.connection)
        if wire is None:
            wire = wires[row.connection] = await Wire.open(port)
        if row.sender != "broker" and not row.is_response:
            requests[row.connection, row.opaque] = row
            wire.write(row.frame)
        elif row.is_response and row.sender == "broker":
            asked = requests[row.connection, row.opaque]
            reply = await wire.reply_to(row.opaque)
            if reply is None and wire.is_closed:  # by 20 refusals in a row; 4.9.8 goes on for ever
                await wire.close()
                wire = wires[row.connection] = await Wire.open(port)
                wire.write(asked.frame)
                reply = await wire.reply_to(row.opaque)
            golden, ours = outcome(decode(row.frame)), None if reply is None else outcome(reply)
            if golden != ours:
                found.append(Difference(asked.note.removeprefix("request; "), asked.code, golden, ours))
    for wire in wires.values():
        await wire.close()
    return found


async def test_answers_are_those_of_4_9_8(tmp_path: Path) -> None:
    found: list[Difference] = []
    async with captured_broker(tmp_path) as running:
        for scenario in SCENARIOS:
            if scenario == "acl_clients":  # when they came, the topic had four queues
                running.topics.put(TopicConfig("AclTopic", 4, 4))
            found += await play(running.server.port, scenarios(ARCHIVE)[f"acl-498/{scenario}"])
    wrong = [str(difference) for difference in found if reason_of(difference) is None]
    assert not wrong, "\n".join(wrong)
    gone = set(ON_PURPOSE) - {reason_of(difference) for difference in found}
    assert not gone, f"these answers are the same now: {gone}"
