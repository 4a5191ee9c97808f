"""The right to consume a queue in order: granted by its broker to one client of a group, for a while."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping

from downrange.client.consumer.addresses import address_of
from downrange.client.session import Session
from downrange.model.errors import MQError
from downrange.model.message import MessageQueue
from downrange.protocol.bodies.body import decode_body, encode_body
from downrange.protocol.bodies.groups import LockBatchBody, LockedQueues
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import request

log = logging.getLogger(__name__)

LOCK_TIMEOUT_SECONDS = 1.0


class QueueLocks:
    """Asks brokers for locks and gives them back. Remembers nothing: a broker's last word counts."""

    def __init__(self, session: Session, group: str) -> None:
        self._session = session
        self._group = group

    async def lock(self, queues: Collection[MessageQueue]) -> Mapping[MessageQueue, str]:
        """Take or renew; the queues that are ours now, and which address says so. Silent brokers grant nothing."""
        held: dict[MessageQueue, str] = {}
        for address, wanted in (await self._by_broker(queues)).items():
            try:
                reply = await self._session.invoke(
                    address, request(RequestCode.LOCK_BATCH_MQ, body=self._body(wanted)), LOCK_TIMEOUT_SECONDS
                )
                granted = decode_body(LockedQueues, reply.body_bytes).lock_ok_mq_set & wanted
                held.update(dict.fromkeys(granted, address))
            except MQError as error:
                for topic in {queue.topic for queue in wanted}:
                    self._session.refresh_soon(topic)
                log.warning("queues not locked broker=%s group=%s reason=%s", address, self._group, error)
        return held

    async def unlock(self, queues: Collection[MessageQueue]) -> None:
        """Give back, so that another consumer can go on at once; without it the locks run out after a minute."""
        for address, given_up in (await self._by_broker(queues)).items():
            try:
                await self._session.invoke(
                    address, request(RequestCode.UNLOCK_BATCH_MQ, body=self._body(given_up)), LOCK_TIMEOUT_SECONDS
                )
            except MQError as error:
                log.warning("queues not unlocked broker=%s group=%s reason=%s", address, self._group, error)

    async def _by_broker(self, queues: Iterable[MessageQueue]) -> dict[str, frozenset[MessageQueue]]:
        found: dict[str, set[MessageQueue]] = {}
        for queue in queues:
            try:
                target = await address_of(self._session, queue)
            except MQError as error:
                log.warning("broker of a queue not found queue=%s reason=%s", queue, error)
                continue
            if target.is_master:  # slaves grant no locks
                found.setdefault(target.address, set()).add(queue)
        return {address: frozenset(queues) for address, queues in found.items()}

    def _body(self, queues: frozenset[MessageQueue]) -> bytes:
        return encode_body(LockBatchBody(consumer_group=self._group, client_id=self._session.client_id, mq_set=queues))
