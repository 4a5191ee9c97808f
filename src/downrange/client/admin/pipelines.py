"""Pipelines: their last status and their history, from the messages that they send about themselves."""

from __future__ import annotations

from downrange.client.admin.messages import MessageAdmin
from downrange.client.admin.search import Budget
from downrange.client.compression import plain_body
from downrange.client.errors import ClientError, NoRoute
from downrange.client.pipeline_status import PIPELINES_TOPIC, PipelineStatus, key_of
from downrange.client.session import Session
from downrange.model.text import Text

DAY_MILLIS = 86_400_000
MOST_LOOKED_AT = 20_000


class PipelineNotFound(ClientError):
    """No pipeline of this name has told its status lately."""


class PipelineAdmin:
    """Looks at pipelines, Spark queries above all."""

    def __init__(self, session: Session, messages: MessageAdmin) -> None:
        self._session = session
        self._messages = messages

    async def list(self, *, within_millis: int = DAY_MILLIS) -> tuple[PipelineStatus, ...]:
        """The last status of each pipeline that told one within this time, sorted by name."""
        found: dict[str, PipelineStatus] = {}
        for status in await self._told(within_millis):
            if status.timestamp >= (found.get(status.name) or status).timestamp:
                found[status.name] = status  # queues are read side by side: only the pipeline knows its own order
        return tuple(found[name] for name in sorted(found))

    async def history(self, name: str, *, within_millis: int = DAY_MILLIS) -> tuple[PipelineStatus, ...]:
        """The statuses that one pipeline told within this time, oldest first."""
        told = [status for status in await self._told(within_millis) if status.name == name]
        return tuple(sorted(told, key=lambda status: status.timestamp))

    async def _told(self, within_millis: int) -> tuple[PipelineStatus, ...]:
        budget = Budget(messages=MOST_LOOKED_AT, looked_at=MOST_LOOKED_AT, seconds=10)
        begin = self._session.clock.now() - within_millis
        try:
            page = await self._messages.between(PIPELINES_TOPIC, begin, backwards=True, budget=budget)
        except NoRoute:
            return ()
        statuses = (PipelineStatus.decode(message.body) for message in page.messages)
        return tuple(status for status in statuses if status is not None)

    async def status(self, name: str, *, most: int = 64) -> tuple[PipelineStatus, ...]:
        """The last messages of one pipeline about itself, oldest first; raises PipelineNotFound."""
        try:
            found = await self._messages.by_key(PIPELINES_TOPIC, key_of(name), max_messages=most)
        except NoRoute:
            raise PipelineNotFound(
                Text(
                    "no pipeline has told its status: there is no topic {topic}",
                    topic=PIPELINES_TOPIC,
                )
            ) from None
        found.raise_if_none()
        told = [
            status
            for messages in found.done.values()
            for message in messages
            if (status := PipelineStatus.decode(plain_body(message))) is not None and status.name == name
        ]
        if not told:
            raise PipelineNotFound(
                Text("no pipeline {name} has told its status; `downrange pipeline list` shows which did", name=name)
            )
        return tuple(sorted(told, key=lambda status: status.timestamp))
