"""What a controller asks of brokers: it tells them of elections, reads their settings, looks whether they are there."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from downrange.controller.liveness import PROBE_SECONDS
from downrange.controller.state import BrokerSet
from downrange.model.errors import MQError
from downrange.protocol.bodies.body import encode_body
from downrange.protocol.bodies.controller import NotifyBrokerRoleChangedRequest
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import request
from downrange.settings import parse_properties
from downrange.transport.errors import ConnectFailed
from downrange.transport.pool import Pool, split_address

log = logging.getLogger(__name__)

ASK_SECONDS: Final = 1.0
NOTICE_SECONDS: Final = 1.0
REFUSALS_OF_A_DEAD_BROKER: Final = 2
PROBE_PAUSE: Final = 0.05


class BrokerLinks:
    """The connections of a controller to brokers. Every method outlasts a broker that does not answer."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def tell(self, broker_set: BrokerSet) -> None:
        """Send request 1008 to all replicas: a hint, which a broker that misses it makes up for by request 1004."""
        header = NotifyBrokerRoleChangedRequest(
            master_address=broker_set.master_address,
            master_broker_id=broker_set.master,
            master_epoch=broker_set.master_epoch,
            sync_state_set_epoch=broker_set.sync_state_set_epoch,
        )
        notice = request(
            RequestCode.CONTROLLER_NOTIFY_BROKER_ROLE_CHANGED,
            header,
            body=encode_body(broker_set.members),
            oneway=True,
        )

        async def one(address: str) -> None:
            try:
                async with asyncio.timeout(NOTICE_SECONDS):
                    await self._pool.oneway(address, notice, NOTICE_SECONDS)
            except (MQError, OSError, TimeoutError) as error:
                log.info("broker was not told of an election address=%s reason=%s", address, error)

        await asyncio.gather(*(one(replica.address) for replica in broker_set.replicas.values()))

    async def acknowledges_safely(self, address: str) -> bool | None:
        """Whether a broker has allAckInSyncStateSet=true, or does not say; None when it cannot be asked."""
        try:
            asked = request(RequestCode.GET_BROKER_CONFIG)
            reply = await self._pool.request(address, asked, ASK_SECONDS)
            if reply.code != ResponseCode.SUCCESS:
                return True
            given = parse_properties(reply.body_bytes.decode("utf-8", "replace")).get("allAckInSyncStateSet")
        except (MQError, OSError):
            return None
        return given is None or given.value.strip().lower() == "true"

    async def is_there(self, address: str) -> bool:
        """Whether something accepts connections at an address: refused twice, or no answer in time, is no."""
        try:
            host, port = split_address(address)
        except ConnectFailed:
            return False
        refusals = 0
        while refusals < REFUSALS_OF_A_DEAD_BROKER:
            try:
                async with asyncio.timeout(PROBE_SECONDS):
                    _, writer = await asyncio.open_connection(host, port)
            except TimeoutError:
                return False
            except OSError:
                refusals += 1
                await asyncio.sleep(PROBE_PAUSE)
                continue
            writer.transport.abort()
            return True
        return False
