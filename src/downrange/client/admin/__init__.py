"""Every operator action as a method that returns data.

    async with Admin("127.0.0.1:9876") as admin:
        await admin.topics.create(TopicConfig("orders", 8, 8), cluster="DefaultCluster")
        progress = await admin.groups.progress("billing")

An action that touches several servers returns `PerServer`: the answer or the error of each.
"""

from __future__ import annotations

from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Self

from downrange.client.admin.cluster import ClusterAdmin
from downrange.client.admin.controllers import ControllerAdmin
from downrange.client.admin.delayed import DelayedAdmin
from downrange.client.admin.groups import GroupAdmin
from downrange.client.admin.namesrv import NamesrvAdmin
from downrange.client.admin.offsets import OffsetAdmin
from downrange.client.admin.topics import TopicAdmin
from downrange.client.admin.transactions import TransactionAdmin
from downrange.client.admin.users import AclAdmin, UserAdmin
from downrange.client.config import ClientConfig
from downrange.client.session import Session

if TYPE_CHECKING:
    from downrange.client.admin.messages import MessageAdmin
    from downrange.client.admin.pipelines import PipelineAdmin
    from downrange.client.admin.plain_acl import PlainAclAdmin
    from downrange.client.admin.planning import PlanAdmin
    from downrange.client.admin.trials import TrialAdmin

__all__ = ["Admin"]


class Admin:
    """The operator's client: one session, and the actions on topics, groups, messages, offsets, users and servers."""

    def __init__(self, namesrv: str | ClientConfig | None = None, session: Session | None = None) -> None:
        self.session = session or Session(ClientConfig.of(namesrv))
        self.cluster = ClusterAdmin(self.session)
        self.namesrv = NamesrvAdmin(self.session)
        self.controllers = ControllerAdmin(self.session)
        self.topics = TopicAdmin(self.session, self.namesrv)
        self.groups = GroupAdmin(self.session)
        self.offsets = OffsetAdmin(self.session, self.groups)
        self.delayed = DelayedAdmin(self.session)
        self.transactions = TransactionAdmin(self.session)
        self.users = UserAdmin(self.session)
        self.acls = AclAdmin(self.session)

    # What follows is imported with its first use: it brings many modules, and most processes need little of it.

    @cached_property
    def messages(self) -> MessageAdmin:
        from downrange.client.admin.messages import MessageAdmin

        return MessageAdmin(self.session)

    @cached_property
    def pipelines(self) -> PipelineAdmin:
        from downrange.client.admin.pipelines import PipelineAdmin

        return PipelineAdmin(self.session, self.messages)

    @cached_property
    def plans(self) -> PlanAdmin:
        from downrange.client.admin.planning import PlanAdmin

        return PlanAdmin(self)

    @cached_property
    def trials(self) -> TrialAdmin:
        from downrange.client.admin.trials import TrialAdmin

        return TrialAdmin(self.session)

    @cached_property
    def plain_acl(self) -> PlainAclAdmin:
        from downrange.client.admin.plain_acl import PlainAclAdmin

        return PlainAclAdmin(self.session)

    def __repr__(self) -> str:
        return f"<Admin {self.session!r}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.session.close()
