"""Probes: small requests that find out whether an avoided broker is well again, so that no message has to."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from typing import Final

from downrange.client.producer.fault import PROBE_TIMEOUT_MILLIS, QueueChooser
from downrange.client.producer.publish_info import PublishInfo
from downrange.client.session import Session
from downrange.model.errors import MQError
from downrange.protocol.bodies.offsets import GetMaxOffsetRequest
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import request

LOOK_SECONDS: Final = 0.1
"""How often to look for a broker that came to be avoided."""
ROUTES_AT_ONCE: Final = 8
"""A probe looks up no more routes than this. Any route finds the broker for all topics, and the next probe is near."""


async def run_probes(chooser: QueueChooser, session: Session, topics: Callable[[], Iterable[PublishInfo]]) -> None:
    """Probe the brokers that `chooser` names, until cancelled."""
    clock = session.clock
    async with asyncio.TaskGroup() as tasks:
        while True:
            for broker in chooser.probes(clock.monotonic() * 1000):
                tasks.create_task(_probe(chooser, session, broker, topics()))
            await clock.sleep(LOOK_SECONDS)


async def _probe(chooser: QueueChooser, session: Session, broker: str, topics: Iterable[PublishInfo]) -> None:
    begun = session.clock.monotonic()
    is_well = False
    infos = tuple(topics)
    known = next((info for info in infos if broker in info.addresses), None)
    try:
        if known is not None:
            # Cheap for the broker, and it takes the same way in as a send.
            command = request(RequestCode.GET_MAX_OFFSET, GetMaxOffsetRequest(topic=known.topic, queue_id=0))
            await session.invoke(known.addresses[broker], command, PROBE_TIMEOUT_MILLIS / 1000)
            is_well = True
    except MQError:
        pass  # any error means that the broker is not well
    finally:
        now = session.clock.monotonic()
        chooser.probed(now * 1000, broker, is_well, (now - begun) * 1000)
    if is_well or known is None:
        # A crash takes a broker out of the routes: before they are looked up again it can be neither probed nor used.
        lacking = [info.topic for info in infos if broker not in info.addresses]
        for topic in random.sample(lacking, min(len(lacking), ROUTES_AT_ONCE)):
            session.refresh_soon(topic)
