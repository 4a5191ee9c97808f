"""The transaction producer for code without an event loop."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, TypeVar

from downrange.client.config import ClientConfig, ProducerConfig
from downrange.client.consumer.listener import is_async
from downrange.client.errors import ClientClosed
from downrange.client.producer.blocking.producer import Producer
from downrange.client.producer.hooks import SendHook
from downrange.client.producer.producer import AsyncProducer
from downrange.client.producer.transaction_producer import AsyncTransactionProducer
from downrange.client.producer.transactions import (
    Check,
    Execute,
    HalfSent,
    LocalTransactionState,
    TransactionResult,
    executed,
)
from downrange.model.message import Message, MessageQueue

T = TypeVar("T")


class TransactionProducer(Producer):
    """`AsyncTransactionProducer` with calls that wait. Plain local work runs on the thread that called; checks run on
    threads of their own, several at a time.
    """

    def __init__(
        self,
        group: str,
        namesrv: str | ClientConfig | None = None,
        config: ProducerConfig | None = None,
        *,
        check: Check,
        topics: Iterable[str] = (),
        max_concurrent_checks: int = 8,
        hooks: Iterable[SendHook] = (),
    ) -> None:
        self._check = check
        self._topics = tuple(topics)
        self._max_concurrent_checks = max_concurrent_checks
        super().__init__(group, namesrv, config, hooks=hooks)

    def _new(self) -> AsyncTransactionProducer:
        return AsyncTransactionProducer(
            self._group,
            self._client_config,
            self.config,
            check=self._check,
            topics=self._topics,
            max_concurrent_checks=self._max_concurrent_checks,
            hooks=self._hooks,
        )

    def send_in_transaction(
        self,
        message: Message,
        execute: Execute,
        *,
        queue: MessageQueue | None = None,
        check_immunity_seconds: int | None = None,
        timeout: float | None = None,
    ) -> TransactionResult:
        """Send the half message, run `execute` in this thread, tell the broker how it ended.

        Raises only when the half message could not be sent; then `execute` was not called. An exception of `execute`
        becomes the `error` of the result, whose state is UNKNOWN: the check must find out whether the work was done.
        """
        if is_async(execute):
            return self._transact(
                lambda producer: producer.send_in_transaction(
                    message, execute, queue=queue, check_immunity_seconds=check_immunity_seconds, timeout=timeout
                )
            )
        half = self.send_half(message, queue, check_immunity_seconds=check_immunity_seconds, timeout=timeout)
        # Here, not in another thread: a database connection often belongs to the thread that opened it.
        state, error = executed(execute, half)
        with suppress(ClientClosed):  # closed during the local work: the broker will ask another producer
            self._transact(lambda producer: producer.try_to_end(half, state, error))
        return TransactionResult(half, state, error)

    def send_half(
        self,
        message: Message,
        queue: MessageQueue | None = None,
        *,
        check_immunity_seconds: int | None = None,
        timeout: float | None = None,
    ) -> HalfSent:
        """Send a half message. `end` must follow, here or in another process; otherwise the broker asks how it ended.

        `check_immunity_seconds` is how long the broker waits before it asks; its own setting if not given.
        """
        return self._transact(
            lambda producer: producer.send_half(
                message, queue, check_immunity_seconds=check_immunity_seconds, timeout=timeout
            )
        )

    def end(
        self,
        half: HalfSent,
        state: LocalTransactionState,
        *,
        from_check: bool = False,
        confirm: bool = False,
        remark: str | None = None,
    ) -> None:
        """Tell the broker how a transaction ended.

        Waits for no answer, as RocketMQ's clients do, unless `confirm` is set. With `confirm` a BrokerError says that
        the broker does not know the half message, or that the transaction ended before.
        """
        self._transact(
            lambda producer: producer.end(half, state, from_check=from_check, confirm=confirm, remark=remark)
        )

    def _transact(self, call: Callable[[AsyncTransactionProducer], Coroutine[Any, Any, T]]) -> T:
        def on_loop(producer: AsyncProducer) -> Coroutine[Any, Any, T]:
            assert isinstance(producer, AsyncTransactionProducer)
            return call(producer)

        return self._run(on_loop)
