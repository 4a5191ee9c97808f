"""Entry point of the `downrange` command.

An MQError or an error of a file ends a command with one line and an exit code: 2 when the command was wrong (usage,
configuration, a name that breaks a rule, an address that cannot be listened on), 1 when it failed.
"""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import NoReturn

import typer

from downrange import __version__
from downrange.cli import (
    acl,
    bench,
    broker,
    cluster,
    cluster_up,
    config,
    console,
    consume,
    controller,
    dlq,
    group,
    group_members,
    group_offsets,
    grpc_port,
    message,
    message_search,
    mqadmin,
    namesrv,
    namesrv_admin,
    pipeline,
    pipeline_dlq,
    pipeline_latest,
    pipeline_mirror,
    pipeline_run,
    pipeline_status,
    pipeline_trace,
    plain_acl,
    produce,
    simulate,
    store,
    tls,
    topic,
    trace,
    trials,
    user,
    waiting,
)
from downrange.cli.help_by_task import HelpByTask
from downrange.cli.options import UsageError, connect_with_tls
from downrange.cli.output import one_line
from downrange.cli.shown_warnings import show_warnings
from downrange.compiled import VARIANT
from downrange.model.errors import MessageError, MQError
from downrange.settings import ConfigError
from downrange.transport.errors import ListenFailed

app = typer.Typer(
    name="downrange",
    cls=HelpByTask,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="A message platform that speaks Apache RocketMQ.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"downrange {__version__} ({VARIANT})")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", help="Show the version.", callback=_show_version, is_eager=True),
    use_tls: bool = typer.Option(False, "--tls", help="Connect with TLS. [$ROCKETMQ_TLS_ENABLE]"),
    tls_config: Path | None = typer.Option(
        None,
        "--tls-config",
        help="Connect with TLS; properties file with tls.client keys. [$ROCKETMQ_TLS_CONFIG_FILE]",
    ),
) -> None:
    connect_with_tls(use_tls, tls_config)


app.command("namesrv")(namesrv.run)
app.command("broker")(broker.run_broker)
app.command("proxy")(grpc_port.run)
app.command("standalone")(broker.run_standalone)
app.command("shutdown")(broker.run_shutdown)
app.command("produce")(produce.run)
app.command("consume")(consume.run)
app.command("simulate")(simulate.run)
app.command("trace")(trace.run)
app.command("bench")(bench.run)

app.add_typer(controller.app, name="controller")
topic.app.command("send-rt")(trials.send_rt)
topic.app.command("queue-entries")(trials.queue_entries)
topic.app.command("order-conf")(trials.order_conf)
app.add_typer(topic.app, name="topic")
group.app.command("connections")(group_members.show_connections)
group.app.command("producers")(group_members.show_producers)
group.app.command("status")(group_members.show_status)
group.app.command("reset-offset")(group_offsets.reset_offset)
group.app.command("skip")(group_offsets.skip)
group.app.command("clone")(group_offsets.clone)
group.app.command("set-offset")(group_offsets.set_offset)
group.app.command("ages")(group_offsets.ages)
group.app.command("allocate")(trials.allocate)
app.add_typer(group.app, name="group")
for command in (cluster_up.up, cluster_up.status, cluster_up.kill, cluster_up.down):
    cluster.app.command()(command)
cluster.app.command("rt")(trials.cluster_rt)
cluster.app.command("export")(trials.export)
app.add_typer(cluster.app, name="cluster")
message.app.command("search")(message_search.search)
message.app.command("fate")(message_search.fate)
message.app.command("delayed")(waiting.delayed)
message.app.command("half")(waiting.half)
app.add_typer(message.app, name="message")
app.add_typer(dlq.app, name="dlq")
app.add_typer(config.app, name="config")
app.add_typer(console.app, name="console")
app.add_typer(user.app, name="user")
app.add_typer(acl.app, name="acl")
app.add_typer(namesrv_admin.app, name="namesrv-admin")
app.add_typer(plain_acl.app, name="plain-acl")
app.add_typer(store.app, name="store")
pipeline.app.command("mirror")(pipeline_mirror.mirror)
pipeline.app.command("trace")(pipeline_trace.trace)
pipeline.app.command("dlq")(pipeline_dlq.dlq)
pipeline.app.command("latest")(pipeline_latest.latest)
pipeline.app.command("run")(pipeline_run.run)
pipeline.app.command("list")(pipeline_status.list_pipelines)
pipeline.app.command("status")(pipeline_status.show_status)
app.add_typer(pipeline.app, name="pipeline")
app.add_typer(tls.app, name="tls")
app.command(
    "mqadmin",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)(mqadmin.run)


def main() -> NoReturn:
    _open_standard_streams()
    show_warnings()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # here, where a full disk can still be reported
    except MQError as error:
        print(f"downrange: {one_line(error)}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError | ListenFailed | MessageError | UsageError) else 1)
    except UnicodeEncodeError as error:
        print(f"downrange: {error.object!r} is not UTF-8 text", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python would try the failed write again at exit
        if not isinstance(error, BrokenPipeError):  # a closed pipe only says that its reader has seen enough
            where = f"{error.filename}: " if error.filename else ""
            print(f"downrange: {where}{error.strerror or error}", file=sys.stderr)
        sys.exit(1)
    sys.exit(0)


def _open_standard_streams() -> None:
    """Open streams that were closed, as by `>&-`: else a socket would get the number, and then all that is printed.

    Characters that the encoding of the terminal does not have are printed as question marks.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  until the end
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


if __name__ == "__main__":
    main()
