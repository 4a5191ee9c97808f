"""Where a slave finds its master's port for slaves: the master says so itself, in the answer to request 906.

A slave of RocketMQ learns this from the name servers; then it cannot replicate while none is there.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from downrange.broker.replication.auto_switch import AutoSwitchReplication
from downrange.broker.services.registration import Registration
from downrange.clock import Clock
from downrange.model.errors import MQError
from downrange.protocol.bodies.controller import ExchangeHAInfo
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import request
from downrange.protocol.errors import broker_error
from downrange.transport.pool import Pool

log = logging.getLogger(__name__)

_TIMEOUT_SECONDS: Final = 1.0
_RETRY_SECONDS: Final = 0.1
_PERIOD_SECONDS: Final = 5.0


@dataclass(eq=False)
class MasterPort:
    """Keeps telling the replication of a slave where its master is."""

    _registration: Registration
    _replication: AutoSwitchReplication
    _pool: Pool
    _clock: Clock

    async def run(self) -> None:
        trouble = ""
        while True:
            pause = _PERIOD_SECONDS
            try:
                self._replication.set_master_ha_address(await self._ask())
                trouble = ""
            except MQError as error:
                if str(error) != trouble:
                    trouble = str(error)
                    log.info("master's port for slaves not known yet reason=%s", trouble)
                pause = _RETRY_SECONDS
            await self._clock.sleep(pause)

    async def _ask(self) -> str:
        master = self._registration.master_address
        if master is None:
            raise MQError("no master is known")
        if self._pool.connected(master) is None:
            self._pool.drop(master)  # no pause after a failure: the master has just been elected
        command = request(RequestCode.EXCHANGE_BROKER_HA_INFO, ExchangeHAInfo())
        reply = await self._pool.request(master, command, _TIMEOUT_SECONDS)
        if reply.code != 0:
            raise broker_error(reply.code, reply.remark)
        address = reply.header(ExchangeHAInfo).master_ha_address
        if not address:
            raise MQError(f"{master} does not say where slaves find it: it is no master yet")
        return address
