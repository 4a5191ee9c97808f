"""A broker whose disk fills up refuses messages, goes on serving, and takes messages again when there is room."""

from __future__ import annotations

import asyncio
from pathlib import Path

from downrange.protocol.codes import ResponseCode
from tests.support.requests import connected, create_topic, drain
from tests.support.standalone_process import standalone_process

SETTINGS = {
    "mappedFileSizeCommitLog": 4 << 20,
    "maxHashSlotNum": 1000,
    "maxIndexNum": 50_000,
    # The disk itself shall say no, not the watermarks.
    "diskMaxUsedSpaceRatio": 95,
    "diskSpaceCleanForciblyRatio": 99,
    "diskSpaceWarningLevelRatio": 100,
    "cleanFileForciblyEnable": "false",
}


async def test_a_broker_outlives_a_full_disk(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(12 << 20))
    with standalone_process(small_disk, SETTINGS, log_level="ERROR") as running:
        async with connected(running.broker) as client:
            await create_topic(client, "orders", 4)
            acknowledged: list[bytes] = []
            refusal = None
            while refusal is None:
                body = b"%d " % len(acknowledged) + bytes(4000)
                reply = await client.connection.request(
                    client.send_command("orders", body, queue_id=len(acknowledged) % 4), 10
                )
                if reply.code == ResponseCode.SUCCESS:
                    acknowledged.append(body)
                else:
                    refusal = reply
            assert refusal.code == ResponseCode.SERVICE_NOT_AVAILABLE
            assert "No space left on device" in (refusal.remark or "")
            await asyncio.sleep(2.5)  # the services that write and flush run into the full disk too
            stored = [message.body for message in await drain(client, "orders", 4)]
            assert sorted(stored) == sorted(acknowledged)
            ballast.unlink()
            async with asyncio.timeout(30):
                while (await client.connection.request(client.send_command("orders", b"again"), 10)).code != 0:
                    await asyncio.sleep(0.1)
        assert running.process.stop() == 0
