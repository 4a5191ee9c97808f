"""`downrange plain-acl …`: accounts and white lists of brokers with access control 4.x."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from downrange.cli.cluster import told
from downrange.cli.cluster_actions import asks, broker_row
from downrange.cli.options import Broker, Cluster, UsageError, command_family
from downrange.cli.output import Answer, Column, Table
from downrange.cli.times import time_text

if TYPE_CHECKING:
    from downrange.client.admin import Admin

app = command_family("Accounts of brokers with access control 4.x (aclEnable=true).")

AccessKey = Annotated[str, typer.Argument(help="Access key of the account.")]
Permission = "DENY, PUB, SUB or PUB|SUB"


@app.command("update")
@asks
async def update(
    admin: Admin,
    access_key: AccessKey,
    secret_key: Annotated[
        str | None,
        typer.Option(
            "--secret-key",
            help="The secret; without it you are asked for it, or it is read from standard input: others on this "
            "machine can see the arguments of a command.",
        ),
    ] = None,
    is_admin: Annotated[
        bool, typer.Option("--admin/--no-admin", help="The account may administer the broker.")
    ] = False,
    white_address: Annotated[
        str | None, typer.Option("--white-address", help="Addresses that need no signature to send and receive.")
    ] = None,
    topic_perm: Annotated[
        str | None, typer.Option("--default-topic-perm", help=f"For topics not listed: {Permission}.")
    ] = None,
    group_perm: Annotated[
        str | None, typer.Option("--default-group-perm", help=f"For groups not listed: {Permission}.")
    ] = None,
    topics: Annotated[str | None, typer.Option("--topics", help="TOPIC=PERM, several separated by commas.")] = None,
    groups: Annotated[str | None, typer.Option("--groups", help="GROUP=PERM, several separated by commas.")] = None,
    broker: Broker = None,
    cluster: Cluster = None,
) -> Answer:
    """Add or change an account. Options that are not given keep their value, except --admin."""
    from downrange.client.admin.plain_acl import AccountChange

    change = AccountChange(
        access_key=access_key,
        secret_key=_secret() if secret_key is None else secret_key,
        admin=is_admin,
        white_remote_address=white_address,
        default_topic_perm=topic_perm,
        default_group_perm=group_perm,
        topic_perms=topics,
        group_perms=groups,
    )
    return told(f"account {access_key} updated", await admin.plain_acl.update(change, cluster, broker))


def _secret() -> str:
    if sys.stdin.isatty():
        return str(typer.prompt("Secret key", hide_input=True, err=True))
    secret = sys.stdin.readline().rstrip("\r\n")
    if not secret:
        raise UsageError("no secret: give it on standard input or with --secret-key")
    return secret


@app.command("delete")
@asks
async def delete(admin: Admin, access_key: AccessKey, broker: Broker = None, cluster: Cluster = None) -> Answer:
    """Delete an account."""
    return told(f"account {access_key} deleted", await admin.plain_acl.delete(access_key, cluster, broker))


@app.command("white-list")
@asks
async def white_list(
    admin: Admin,
    addresses: Annotated[str, typer.Argument(help="Address patterns, separated by commas; empty for none.")],
    file: Annotated[str, typer.Option("--file", help="File as `versions` shows it. [plain_acl.yml]")] = "",
    broker: Broker = None,
    cluster: Cluster = None,
) -> Answer:
    """Replace the global white list: addresses that need no signature to send and receive."""
    outcomes = await admin.plain_acl.update_white_list([addresses], file, cluster, broker)
    return told("global white list updated", outcomes)


@app.command("versions")
@asks
async def versions(admin: Admin, broker: Broker = None, cluster: Cluster = None) -> Answer:
    """Show the files with accounts, how often each was changed by command, and when it was changed last."""
    found = await admin.plain_acl.versions(cluster, broker)
    rows = [
        {
            "cluster": one.cluster or None,
            **broker_row(one),
            "file": name,
            "version": version.counter,
            "timestamp": version.timestamp,
        }
        for one, files in found.done.items()
        for name, version in files.items()
    ]
    columns = [
        Column("Cluster Name", "cluster"),
        Column("Broker Name", "broker"),
        Column("Addr", "address"),
        Column("ACL File", "file"),
        Column("Version", "version"),
        Column("Last Update", "timestamp", time_text),
    ]
    return Answer({"files": rows}, [Table(columns, rows)], found.failed)
