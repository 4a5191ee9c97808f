"""Asking brokers that are avoided whether they are well again, so that no message has to find out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from downrange.client.fault import PROBE_TIMEOUT_MILLIS, QueueChooser
from downrange.client.publish_info import PublishInfo
from downrange.client.session import Session
from downrange.model.errors import MQError
from downrange.protocol.bodies.offsets import GetMaxOffsetRequest
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import request

LOOK_SECONDS: Final = 0.1
"""How often to look for a broker that came to be avoided."""


async def run_probes(chooser: QueueChooser, session: Session, topics: Callable[[], Iterable[PublishInfo]]) -> None:
    """Probe for ever whom `chooser` wants probed. Ends when cancelled, and its probes with it."""
    clock = session.clock
    async with asyncio.TaskGroup() as tasks:
        while True:
            for broker in chooser.probes(clock.monotonic() * 1000):
                tasks.create_task(_probe(chooser, session, broker, topics()))
            await clock.sleep(LOOK_SECONDS)


async def _probe(chooser: QueueChooser, session: Session, broker: str, topics: Iterable[PublishInfo]) -> None:
    begun = session.clock.monotonic()
    is_well = False
    try:
        for info in topics:
            address = info.addresses.get(broker)
            if address is not None:
                # Cheap for the broker, and it goes through the same door as a send.
                command = request(RequestCode.GET_MAX_OFFSET, GetMaxOffsetRequest(topic=info.topic, queue_id=0))
                await session.invoke(address, command, PROBE_TIMEOUT_MILLIS / 1000)
                is_well = True
                break
    except MQError:
        pass  # whatever it is, the broker is not well
    finally:
        now = session.clock.monotonic()
        chooser.probed(now * 1000, broker, is_well, (now - begun) * 1000)
