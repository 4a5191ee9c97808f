"""`downrange acl …`: access rules of users in clusters with ACL 2.0."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from downrange.cli.cluster import told
from downrange.cli.cluster_actions import asks, broker_row, shows
from downrange.cli.options import Broker, Cluster, command_family
from downrange.cli.output import Answer, Column, Table, cell

if TYPE_CHECKING:
    from downrange.client.admin import Admin
    from downrange.client.admin.users import AclInfo
    from downrange.client.brokers import Broker as BrokerProcess

app = command_family("Access rules of users in clusters with ACL 2.0 (authorizationEnabled=true).")

Subject = Annotated[str, typer.Argument(help="Name of the user, or User:NAME.")]
Policy = Annotated[str | None, typer.Option("--policy", help="Custom, or Default for rules that are checked last.")]


@app.command("set")
@asks
async def set_rules(
    admin: Admin,
    subject: Subject,
    resources: Annotated[
        str, typer.Argument(help="Topic:NAME, Group:PREFIX*, Cluster:*, or * for all; separated by commas.")
    ],
    actions: Annotated[
        str, typer.Argument(help="All, or Pub, Sub, Create, Update, Delete, Get, List; separated by commas.")
    ],
    decision: Annotated[str, typer.Option("--decision", "-d", help="Allow or Deny.")] = "Allow",
    source_ips: Annotated[
        str, typer.Option("--source-ip", "-i", help="Only from these addresses or networks; separated by commas.")
    ] = "",
    policy: Policy = None,
    broker: Broker = None,
    cluster: Cluster = None,
) -> Answer:
    """Allow or deny a user actions on resources. This replaces the user's rules about the same resources."""
    from downrange.client.admin.users import AclInfo, PolicyEntryInfo, PolicyInfo

    entries = tuple(
        PolicyEntryInfo(
            resource=resource, actions=_split(actions), source_ips=_split(source_ips) or None, decision=decision
        )
        for resource in _split(resources)
    )
    acl = AclInfo(subject=_subject(subject), policies=(PolicyInfo(policy_type=policy, entries=entries),))
    return told(f"rules of {_subject(subject)} set", await admin.acls.put(acl, cluster, broker))


@app.command("delete")
@asks
async def delete(
    admin: Admin,
    subject: Subject,
    resource: Annotated[
        str | None, typer.Option("--resource", "-r", help="Delete only the rule about this resource. [all]")
    ] = None,
    policy: Policy = None,
    broker: Broker = None,
    cluster: Cluster = None,
) -> Answer:
    """Delete rules of a user."""
    from downrange.client.admin.users import DeleteAclRequest

    rules = DeleteAclRequest(subject=_subject(subject), resource=resource, policy_type=policy)
    return told(f"rules of {_subject(subject)} deleted", await admin.acls.delete(rules, cluster, broker))


@app.command("show")
@shows
async def show(admin: Admin, subject: Subject, broker: Broker = None, cluster: Cluster = None) -> Answer:
    """Show the rules of a user."""
    found = await admin.acls.get(_subject(subject), cluster, broker)
    rows = [row for one, acl in found.done.items() if acl is not None for row in _rows(one, acl)]
    parts = [Table(_COLUMNS, rows)] if rows or found.failed else [f"{_subject(subject)} has no rules"]
    return Answer({"rules": rows}, parts, found.failed)


@app.command("list")
@shows
async def list_rules(
    admin: Admin,
    subject: Annotated[str | None, typer.Option("--subject", "-s", help="Only subjects with this text.")] = None,
    resource: Annotated[str | None, typer.Option("--resource", "-r", help="Only resources with this text.")] = None,
    broker: Broker = None,
    cluster: Cluster = None,
) -> Answer:
    """List rules."""
    from downrange.client.admin.users import ListAclsRequest

    wanted = ListAclsRequest(subject_filter=subject, resource_filter=resource)
    found = await admin.acls.list(wanted, cluster, broker)
    rows = [row for one, acls in found.done.items() for acl in acls for row in _rows(one, acl)]
    return Answer({"rules": rows}, [Table(_COLUMNS, rows)], found.failed)


@app.command("copy")
@asks
async def copy(
    admin: Admin,
    source: Annotated[str, typer.Argument(help="Broker to copy from: its name or host:port.")],
    target: Annotated[str, typer.Argument(help="Broker to copy to.")],
    subjects: Annotated[str, typer.Argument(help="Users, separated by commas. [all]")] = "",
) -> Answer:
    """Copy rules from one broker to another, where the users must exist."""
    names = await admin.acls.copy(source, target, [_subject(name) for name in _split(subjects)])
    return Answer({"copied": names}, [f"rules of {name} copied to {target}" for name in names])


def _split(text: str) -> tuple[str, ...]:
    return tuple(part for piece in text.split(",") if (part := piece.strip()))


def _subject(text: str) -> str:
    return text if ":" in text else f"User:{text}"


def _rows(broker: BrokerProcess, acl: AclInfo) -> list[dict[str, Any]]:
    return [
        {
            **broker_row(broker),
            "subject": acl.subject,
            "policyType": policy.policy_type,
            "resource": entry.resource,
            "actions": entry.actions,
            "sourceIps": entry.source_ips,
            "decision": entry.decision,
        }
        for policy in acl.policies
        for entry in policy.entries
    ]


_COLUMNS = [
    Column("Broker Name", "broker"),
    Column("Subject", "subject"),
    Column("PolicyType", "policyType"),
    Column("Resource", "resource"),
    Column("Actions", "actions", cell),
    Column("SourceIp", "sourceIps", cell),
    Column("Decision", "decision"),
]
