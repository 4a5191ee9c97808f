"""What genuine clients and slaves once asked a genuine master and slave, asked again of ours.

The bytes of the replication stream itself are compared in tests/unit/broker/test_replication_golden.py.
"""

from __future__ import annotations

from pathlib import Path

from downrange.model.record import decode_records
from downrange.protocol import java_json
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command
from downrange.store.config import BrokerRole
from tests.support.golden import Row, scenarios
from tests.support.replay import Wire, decode
from tests.support.replicas import caught_up, names, replica, until


async def play(rows: list[Row], port: int) -> int:
    """Send every request of the rows and compare what comes back; how many replies there were."""
    wires: dict[int, Wire] = {}
    asked: dict[tuple[int, int], Command] = {}
    compared = 0
    for row in rows:
        command = decode(row.frame)
        wire = wires.get(row.connection)
        if wire is None:
            wire = wires[row.connection] = await Wire.open(port)
        if not command.is_response:
            if row.sender in ("client", "slave") and row.receiver in ("broker", "slave", "master"):
                asked[row.connection, command.opaque] = command
                wire.write(row.frame)
            continue
        reply = await wire.reply_to(command.opaque)
        assert reply is not None, f"{row.place}: no reply"
        compare(row, asked[row.connection, command.opaque], command, reply)
        compared += 1
    for wire in wires.values():
        await wire.close()
    return compared


def compare(row: Row, request: Command, golden: Command, ours: Command) -> None:
    assert ours.code == golden.code, f"{row.place}: {ours.remark}"
    assert fields(ours) == fields(golden), row.place
    if request.code == RequestCode.PULL_MESSAGE:
        # Captured in another run than the sends: other bodies in the same places.
        assert places(ours.body_bytes) == places(golden.body_bytes), row.place
    elif golden.body_bytes:
        assert shape(ours.body_bytes) == shape(golden.body_bytes), row.place


def fields(command: Command) -> dict[str, str]:
    """A message id names the broker's address and the place of the message: the place must be the same."""
    return {name: value[-16:] if name == "msgId" else value for name, value in (command.ext_fields or {}).items()}


def places(body: bytes) -> list[tuple[str, int, int, int]]:
    return [
        (message.topic, message.queue_id, message.queue_offset, len(message.body)) for message in decode_records(body)
    ]


def shape(body: bytes) -> object:
    """The members of a table, without the topics and groups that only the genuine broker had."""
    table = java_json.loads(body)
    assert isinstance(table, dict)
    return table.keys() if "dataVersion" in table or "offsetTable" in table else table


def of(scenario: str, *parties: str) -> list[Row]:
    return [row for row in scenarios()[f"ha/{scenario}"] if row.sender in parties and row.receiver in parties]


async def test_a_sync_master_alone_and_then_its_slave_alone_answer_as_javas_did(tmp_path: Path) -> None:
    async with names(tmp_path) as namesrv:
        async with replica(tmp_path, namesrv, BrokerRole.SYNC_MASTER) as master:
            port = master.config.broker.listen_port
            assert await play(of("sync_master_alone", "client", "broker"), port) == 8
            # A Java slave asks for tables. What it asks on the VIP port is served on this one, too.
            assert await play(of("new_slave", "slave", "master"), port) == 12
            async with replica(tmp_path, namesrv, BrokerRole.SLAVE) as slave:
                await caught_up(master, slave)
                await until(lambda: slave.topics.data_version == master.topics.data_version)
        async with replica(tmp_path, namesrv, BrokerRole.SLAVE) as slave:
            port = slave.config.broker.listen_port
            assert await play(of("read_from_slave", "client", "slave"), port) == 11
