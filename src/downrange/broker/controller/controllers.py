"""The controllers of a broker: which of them leads, and requests to that one."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from msgspec import structs

from downrange.broker.live_config import LiveConfig
from downrange.model.errors import MQError
from downrange.protocol.bodies.controller import GetMetadataInfoResponse
from downrange.protocol.codes import LanguageCode, RequestCode, ResponseCode
from downrange.protocol.command import ONEWAY_FLAG, Command, request
from downrange.transport.pool import Pool

log = logging.getLogger(__name__)

TIMEOUT_SECONDS: Final = 1.0


class NoController(MQError):
    """No controller leads at present, or none can be reached."""


class Controllers:
    """Finds the leading controller and asks it; a controller that does not lead any more is not asked again."""

    def __init__(self, config: LiveConfig, pool: Pool) -> None:
        self._config = config
        self._pool = pool
        self._finding: asyncio.Task[str] | None = None
        self._telling: dict[str, asyncio.Task[None]] = {}
        self.leader: str | None = None
        """The address of the leading controller, as far as it is known."""
        self.is_java = False
        """Whether the leading controller is Apache RocketMQ's, which grants no leases."""

    def __repr__(self) -> str:
        return f"<Controllers leader={self.leader}>"

    async def ask(self, command: Command) -> Command:
        """The reply of the leading controller, whatever its code but 2007; raises MQError when there is none."""
        leader = self.leader or await self.find_leader()
        try:
            reply = await self._pool.request(leader, command, TIMEOUT_SECONDS)
        except MQError:
            self._lost(leader)
            raise
        if reply.code == ResponseCode.NOT_LEADER:
            self._lost(leader)
            raise NoController(f"the controller {leader} does not lead any more")
        return reply

    def tell_others(self, command: Command, *, with_leader: bool = False) -> None:
        """Send a request one-way to every controller that can be reached, to the leading one only if asked to."""
        oneway = structs.replace(command, flag=ONEWAY_FLAG)
        for address in self._config.broker.controller_addresses:
            if (with_leader or address != self.leader) and address not in self._telling:
                self._telling[address] = asyncio.create_task(self._tell(address, oneway))

    async def _tell(self, address: str, command: Command) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                await self._pool.oneway(address, command)
        except (MQError, TimeoutError) as error:
            log.debug("controller not told address=%s reason=%s", address, error)
        finally:
            del self._telling[address]

    async def find_leader(self) -> str:
        """Ask all controllers who leads; callers at the same time share the answer."""
        if self._finding is None:
            self._finding = asyncio.create_task(self._find())
            self._finding.add_done_callback(self._found)
        return await asyncio.shield(self._finding)

    def _found(self, task: asyncio.Task[str]) -> None:
        self._finding = None
        if not task.cancelled():
            task.exception()  # callers got it; one who was cancelled need not

    async def _find(self) -> str:
        asked = [asyncio.create_task(self._ask_who_leads(one)) for one in self._config.broker.controller_addresses]
        reasons = []
        try:
            for answer in asyncio.as_completed(asked):
                try:
                    leader, is_java = await answer
                except MQError as error:
                    reasons.append(str(error))
                    continue
                if leader != self.leader:
                    log.info("controller leads address=%s", leader)
                self.leader, self.is_java = leader, is_java
                return leader
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        raise NoController(f"no controller leads: {'; '.join(reasons)}")

    async def _ask_who_leads(self, address: str) -> tuple[str, bool]:
        self._forget_failures(address)
        reply = await self._pool.request(address, request(RequestCode.CONTROLLER_GET_METADATA_INFO), TIMEOUT_SECONDS)
        leader = reply.header(GetMetadataInfoResponse).controller_leader_address if reply.code == 0 else None
        if not leader:
            raise NoController(f"{address} knows no leader")
        if leader != address:  # it may be gone, and its followers may not have noticed yet
            self._forget_failures(leader)
            await self._pool.get(leader)
        return leader, reply.language == LanguageCode.JAVA

    def _forget_failures(self, address: str) -> None:
        """Let the pool try to connect again now: a lease is too short for its pauses."""
        if self._pool.connected(address) is None:
            self._pool.drop(address)

    def _lost(self, leader: str) -> None:
        if self.leader == leader:
            self.leader = None
