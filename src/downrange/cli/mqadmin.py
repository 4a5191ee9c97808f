"""`downrange mqadmin NAME …`: the names and option letters of RocketMQ's own tool.

Each mqadmin command is translated into one of our commands and run as that. Output and exit codes are those of our
command.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import typer

from downrange.cli.options import UsageError


@dataclass(frozen=True)
class Alias:
    """How one command of mqadmin is translated into one of ours.

    Keys are mqadmin's option letters. `arguments` become positional, in this order; letters in `optional` may be left
    out. `options` have a value, `switches` have none, `booleans` turn mqadmin's `true`/`false` into one of our two
    switches. `instead` names the alias that is used when its letter is given.
    """

    command: tuple[str, ...]
    arguments: Sequence[str] = ()
    optional: frozenset[str] = frozenset()
    options: Mapping[str, str] = field(default_factory=dict)
    switches: Mapping[str, str] = field(default_factory=dict)
    booleans: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    instead: Mapping[str, Alias] = field(default_factory=dict)
    queue: str = ""
    """The letters of a broker's name and of a queue's number, which become one `--queue BROKER:NUMBER`."""
    always: Sequence[str] = ()
    """Options that mqadmin's command implies."""
    fixed: Sequence[str] = ()
    """Words that stand before the arguments."""
    joined: bool = False
    """The last two arguments are a key and its value; our command takes them as one `key=value`."""
    ignored: str = ""
    """Letters whose value changes nothing here."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Long spellings that stand for another letter here than elsewhere."""


_WHERE = {"b": "--broker", "c": "--cluster"}

_CONSUME_DIRECTLY = Alias(
    ("message", "consume-directly"), "i", options={"g": "--group", "d": "--client", "t": "--topic"}
)
_RESEND = Alias(("message", "resend"), "i", options={"t": "--topic"}, ignored="sug")
_CONTROLLER = {"a": "--controller"}
_OVERVIEW = Alias(("group", "list"))

_SET_RULES = Alias(("acl", "set"), "sra", options={**_WHERE, "i": "--source-ip", "d": "--decision"})

ALIASES: dict[str, Alias] = {
    "allocateMQ": Alias(("group", "allocate"), "t", options={"i": "--clients"}),
    "addWritePerm": Alias(("namesrv-admin", "add-write-perm"), "b"),
    "brokerConsumeStats": Alias(
        ("cluster", "consume-stats"),
        "b",
        options={"l": "--level"},
        booleans={"o": ("--order", "--no-order")},
        ignored="t",
    ),
    "brokerStatus": Alias(("cluster", "broker-status"), options=_WHERE),
    "checkMsgSendRT": Alias(("topic", "send-rt"), "t", options={"a": "--count", "s": "--size"}),
    "cleanBrokerMetadata": Alias(
        ("controller", "clean"),
        "B",
        options={**_CONTROLLER, "b": "--ids", "c": "--cluster"},
        booleans={"l": ("--living", "--no-living")},
    ),
    "cleanExpiredCQ": Alias(("cluster", "clean-queues"), options=_WHERE),
    "cleanUnusedTopic": Alias(("cluster", "clean-topics"), options=_WHERE),
    "cloneGroupOffset": Alias(("group", "clone"), "sdt", booleans={"o": ("", "")}),
    "clusterAclConfigVersion": Alias(("plain-acl", "versions"), options=_WHERE),
    "clusterList": Alias(
        ("cluster", "list"),
        options={"c": "--cluster", "i": "--watch"},
        instead={"m": Alias(("cluster", "stats"), options={"c": "--cluster", "i": "--watch"}, switches={"m": ""})},
    ),
    "clusterRT": Alias(
        ("cluster", "rt"),
        options={"c": "--cluster", "a": "--count", "s": "--size", "i": "--watch"},
        ignored="mp",
    ),
    "consumeMessage": Alias(  # mqadmin reads with the name of the group, and commits nothing
        ("consume",),
        "t",
        queue="bi",
        options={"o": "--offset", "s": "--from", "e": "--to", "c": "--limit"},
        ignored="g",
        names={"beginTimestamp": "s"},
    ),
    "consumerConnection": Alias(("group", "connections"), "g", options={"b": "--broker"}),
    "consumerProgress": Alias(
        _OVERVIEW.command,
        instead={
            "g": Alias(
                ("group", "progress"), "g", options={"t": "--topic"}, booleans={"s": ("--clients", "--no-clients")}
            )
        },
        ignored="s",
    ),
    "consumerStatus": Alias(
        ("group", "status"), "g", options={"i": "--client", "b": "--broker"}, switches={"s": "--stack"}
    ),
    "copyAcl": Alias(("acl", "copy"), "fts", optional=frozenset("s")),
    "copyUser": Alias(("user", "copy"), "ftu", optional=frozenset("u")),
    "createAcl": _SET_RULES,
    "createUser": Alias(("user", "create"), "u", options={**_WHERE, "p": "--password", "t": "--type"}),
    "deleteAcl": Alias(("acl", "delete"), "s", options={**_WHERE, "r": "--resource"}),
    "deleteAclConfig": Alias(("plain-acl", "delete"), "a", options=_WHERE),
    "deleteExpiredCommitLog": Alias(("cluster", "delete-expired-log"), options=_WHERE),
    "deleteKvConfig": Alias(("namesrv-admin", "kv-delete"), "sk"),
    "deleteSubGroup": Alias(("group", "delete"), "g", options=_WHERE, booleans={"r": ("--offsets", "--keep-offsets")}),
    "deleteTopic": Alias(("topic", "delete"), "t", options={"c": "--cluster"}),
    "deleteUser": Alias(("user", "delete"), "u", options=_WHERE),
    "electMaster": Alias(("controller", "elect"), "nb", options={**_CONTROLLER, "c": "--cluster"}),
    "exportConfigs": Alias(("cluster", "export"), options={"c": "--cluster", "f": "--directory"}, fixed=("configs",)),
    "exportMetadata": Alias(
        ("cluster", "export"),
        options={**_WHERE, "f": "--directory"},
        switches={"t": "--topics", "g": "--groups", "s": ""},
        fixed=("metadata",),
    ),
    "exportMetrics": Alias(("cluster", "export"), options={"c": "--cluster", "f": "--directory"}, fixed=("metrics",)),
    "getAcl": Alias(("acl", "show"), "s", options=_WHERE),
    "getBrokerConfig": Alias(("config", "get"), options=_WHERE),
    "getBrokerEpoch": Alias(("controller", "epochs"), options=_WHERE),
    "getConsumerConfig": Alias(("group", "config"), "g"),
    "getControllerConfig": Alias(("controller", "config"), options=_CONTROLLER),
    "getControllerMetaData": Alias(("controller", "metadata"), options=_CONTROLLER),
    "getNamesrvConfig": Alias(("namesrv-admin", "config")),
    "getSyncStateSet": Alias(
        ("controller", "status"), "b", optional=frozenset("b"), options={**_CONTROLLER, "c": "--cluster"}
    ),
    "getUser": Alias(("user", "show"), "u", options=_WHERE),
    "haStatus": Alias(("controller", "ha-status"), options=_WHERE),
    "listAcl": Alias(("acl", "list"), options={**_WHERE, "s": "--subject", "r": "--resource"}),
    "listUser": Alias(("user", "list"), options={**_WHERE, "f": "--filter"}),
    "printMsg": Alias(
        ("message", "search"),
        "t",
        options={"s": "--tag", "b": "--begin", "e": "--end", "c": "--charset"},
        booleans={"d": ("--body", "--no-body")},
        always=("--body",),
    ),
    "printMsgByQueue": Alias(
        ("consume",),
        "t",
        queue="ai",
        options={"s": "--tag", "b": "--from", "e": "--to", "c": "--charset"},
        booleans={"f": ("--count-tags", "--no-count-tags")},
        ignored="pd",
        names={"brokerName": "a"},
    ),
    "producer": Alias(("cluster", "producers"), options={"b": "--broker"}),
    "producerConnection": Alias(("group", "producers"), "g", options={"t": "--topic"}),
    "queryCq": Alias(("topic", "queue-entries"), "tqi", options={"b": "--broker", "c": "--count", "g": "--group"}),
    "queryMsgById": Alias(
        ("message", "view"),
        "i",
        options={"t": "--topic"},
        instead={"d": _CONSUME_DIRECTLY, "s": _RESEND},
        ignored="gu",
    ),
    "queryMsgByKey": Alias(
        ("message", "query"), "tk", options={"c": "--max", "m": "--max", "b": "--begin", "e": "--end"}
    ),
    "queryMsgByOffset": Alias(("message", "at"), "tbio"),
    "queryMsgByUniqueKey": Alias(
        ("message", "view"),
        "i",
        options={"t": "--topic"},
        switches={"a": "--all"},
        instead={"d": replace(_CONSUME_DIRECTLY, switches={"a": ""})},
        ignored="g",
    ),
    "queryMsgTraceById": Alias(("trace",), "i", options={"t": "--topic"}),
    "resetOffsetByTime": Alias(
        ("group", "reset-offset"),
        "gt",
        options={"s": "--time"},
        booleans={"f": ("--force", "--no-force")},
        switches={"c": "--cpp"},
    ),
    "sendMessage": Alias(
        ("message", "send"),
        "tp",
        options={"k": "--keys", "c": "--tags", "b": "--broker", "i": "--queue"},
        booleans={"m": ("--trace", "--no-trace")},
    ),
    "sendMsgStatus": Alias(("topic", "send-rt"), "b", options={"s": "--size", "c": "--count"}),
    "setConsumeMode": Alias(("group", "set-consume-mode"), "gt", options={**_WHERE, "m": "--mode", "q": "--share"}),
    "skipAccumulatedMessage": Alias(("group", "skip"), "gt", booleans={"f": ("", "")}),
    "startMonitoring": Alias(("group", "list"), options={"i": "--watch"}),
    "statsAll": Alias(("topic", "stats"), "t", optional=frozenset("t"), switches={"a": "--active"}),
    "topicClusterList": Alias(("topic", "clusters"), "t"),
    "topicList": Alias(("topic", "list"), switches={"c": "--groups"}, always=("--all",)),
    "topicRoute": Alias(("topic", "route"), "t", switches={"l": ""}),
    "topicStatus": Alias(("topic", "status"), "t"),
    "updateAcl": _SET_RULES,
    "updateAclConfig": Alias(
        ("plain-acl", "update"),
        "a",
        options={
            **_WHERE,
            "s": "--secret-key",
            "w": "--white-address",
            "i": "--default-topic-perm",
            "u": "--default-group-perm",
            "t": "--topics",
            "g": "--groups",
        },
        booleans={"m": ("--admin", "--no-admin")},
    ),
    "updateBrokerConfig": Alias(("config", "update"), "kv", options=_WHERE, joined=True),
    "updateControllerConfig": Alias(("controller", "update-config"), "kv", options=_CONTROLLER, joined=True),
    "updateGlobalWhiteAddr": Alias(("plain-acl", "white-list"), "g", options={**_WHERE, "p": "--file"}),
    "updateKvConfig": Alias(("namesrv-admin", "kv-put"), "skv"),
    "updateNamesrvConfig": Alias(("namesrv-admin", "update-config"), "kv", joined=True),
    "updateOrderConf": Alias(("topic", "order-conf"), "t", options={"m": "--method", "v": "--value"}),
    "updateSubGroup": Alias(
        ("group", "create"),
        "g",
        options={
            **_WHERE,
            "q": "--retry-queues",
            "r": "--retry-max-times",
            "i": "--broker-id",
            "w": "--slow-broker-id",
            "p": "--retry-policy",
        },
        booleans={
            "s": ("--consume", "--no-consume"),
            "m": ("--from-min", "--no-from-min"),
            "d": ("--broadcast", "--no-broadcast"),
            "a": ("--notify", "--no-notify"),
        },
    ),
    "updateTopic": Alias(
        ("topic", "create"),
        "t",
        options={**_WHERE, "r": "--read-queues", "w": "--write-queues", "p": "--perm"},
        booleans={
            "o": ("--order", "--no-order"),
            "u": ("--unit", "--no-unit"),
            "s": ("--unit-sub", "--no-unit-sub"),
        },
    ),
    "updateTopicPerm": Alias(("topic", "perm"), "tp", options=_WHERE),
    "updateUser": Alias(("user", "update"), "u", options={**_WHERE, "p": "--password", "t": "--type", "s": "--status"}),
    "wipeWritePerm": Alias(("namesrv-admin", "wipe-write-perm"), "b"),
}

# mqadmin's long spellings of its letters; of several letters, the first that the command knows is meant.
LONG_NAMES = {
    name: letters
    for letters, names in {
        "n": ("namesrvAddr",),
        "b": ("broker", "brokerAddr", "beginTimestamp", "brokerControllerIdsToClean"),
        "Bb": ("brokerName",),
        "B": ("bn",),
        "l": ("cleanLivingBroker", "level", "list"),
        "c": (
            "MessageNumber",
            "charsetName",
            "cluster",
            "clusterModel",
            "clusterName",
            "count",
            "cplus",
            "maxNum",
            "tags",
        ),
        "t": ("topic", "traceTopic", "topicPerms", "userType", "toBroker", "timeoutMillis"),
        "g": (
            "consumer",
            "consumerGroup",
            "globalWhiteRemoteAddresses",
            "group",
            "groupName",
            "groupPerms",
            "producerGroup",
            "subscriptionGroup",
        ),
        "i": (
            "brokerId",
            "defaultTopicPerm",
            "index",
            "interval",
            "ipList",
            "msgId",
            "qid",
            "queueId",
            "sourceIp",
        ),
        "k": ("msgKey", "key", "keys"),
        "r": ("readQueueNums", "retryMaxTimes", "removeOffset", "resources", "resource"),
        "w": ("writeQueueNums", "whichBrokerWhenConsumeSlowly", "whiteRemoteAddress"),
        "p": ("perm", "body", "aclFileFullPath", "password"),
        "o": ("order", "offline", "offset"),
        "v": ("value", "orderConf"),
        "s": (
            "namespace",
            "timestamp",
            "jstack",
            "consumeEnable",
            "srcGroup",
            "secretKey",
            "userStatus",
            "subject",
            "subjects",
            "hasUnitSub",
            "messageSize",
            "sendMessage",
            "showClientIP",
            "size",
            "specialTopic",
            "subExpression",
        ),
        "f": ("force", "filter", "fromBroker", "calculate", "filePath"),
        "di": ("clientId",),
        "m": ("moreStats", "consumeFromMinEnable", "admin", "method", "msgTraceEnable"),
        "a": (
            "accessKey",
            "actions",
            "activeTopic",
            "amount",
            "controllerAddress",
            "notifyConsumerIdsChanged",
            "showAll",
        ),
        "d": ("consumeBroadcastEnable", "destGroup", "decision", "printBody"),
        "q": ("retryQueueNums", "queue"),
        "e": ("endTimestamp",),
        "u": ("defaultGroupPerm", "username", "usernames", "unit", "unitName"),
    }.items()
    for name in names
}


def run(context: typer.Context) -> None:
    """Run a command by its mqadmin name, with mqadmin's option letters. Without a name, list the names."""
    if len(context.args) > 1 and context.args[0] == "help":
        context.args = [context.args[1], "--help"]
    if not context.args or context.args[0] in ("-h", "--help", "help"):
        for name, alias in ALIASES.items():
            typer.echo(f"{name:<26}downrange {' '.join(alias.command)}")
        return
    arguments = translate(context.args)
    root = context.find_root().command
    if arguments[-1] == "--help":
        for line in letters_of(context.args[0], root):
            typer.echo(line)
    # Not standalone: then errors are raised and reach `main`, and an exit code is returned.
    code = root.main(args=arguments, prog_name="downrange", standalone_mode=False)
    raise typer.Exit(code or 0)


def letters_of(name: str, root: Any) -> list[str]:
    """The meaning of each letter of an mqadmin command, one line for each, as its help shows them."""
    alias = ALIASES[name]
    meanings: dict[str, str] = {}
    for one in (alias, *alias.instead.values()):
        command = root
        for word in one.command:
            command = command.commands[word]
        named = [given.name for given in command.params if given.param_type_name == "argument"]
        for letter, argument in zip(one.arguments, named[len(one.fixed) :], strict=False):
            meanings.setdefault(letter, f"the argument {argument.upper()}")
        meanings |= {letter: ours for letter, ours in {**one.options, **one.switches}.items() if ours}
        meanings |= {letter: " or ".join(pair) for letter, pair in one.booleans.items() if pair[0]}
        meanings |= dict.fromkeys(one.queue, "--queue")
    for letter, other in alias.instead.items():
        if alias.command != other.command:
            meanings[letter] = f"{meanings.get(letter, '')}; runs downrange {' '.join(other.command)}".lstrip("; ")
    lines = [f"  -{letter}  {meaning}" for letter, meaning in sorted(meanings.items())]
    return [f"mqadmin {name} runs downrange {' '.join(alias.command)}. Its letters mean:", *lines, ""]


def translate(line: Sequence[str]) -> list[str]:
    """Translate a command line of mqadmin into arguments of `downrange`."""
    name, *rest = line
    alias = ALIASES.get(name)
    if alias is None:
        by_case = {known.lower(): known for known in ALIASES}
        near = [by_case[found] for found in difflib.get_close_matches(name.lower(), by_case, n=3, cutoff=0.5)]
        hint = f"did you mean {' or '.join(near)}?" if near else "`downrange mqadmin` lists the names"
        raise UsageError(f"mqadmin has no command {name} here; {hint}")
    if "-h" in rest or "--help" in rest:
        return [*alias.command, "--help"]
    given, passed_on = _letters(name, alias, rest)
    for letter, other in alias.instead.items():
        if letter in given:
            alias = other
            break
    values = _arguments(name, alias, given)
    if alias.joined:
        values = [*values[:-2], f"{values[-2]}={values[-1]}"]
    ours = [*alias.command, *alias.always, *passed_on]
    if parts := [given.pop(letter) for letter in alias.queue if letter in given]:
        ours += ["--queue", ":".join(parts)]
    for letter, value in given.items():
        ours += _option(name, alias, letter, value)
    # Behind `--`, values are taken literally, even if they begin with a dash.
    return [*ours, "--", *alias.fixed, *values]


def _knows(alias: Alias, letter: str) -> bool:
    return letter == "n" or any(
        letter in letters
        for one in (alias, *alias.instead.values())
        for letters in (one.arguments, one.options, one.switches, one.booleans, one.queue, one.ignored)
    )


def _takes_no_value(alias: Alias, letter: str) -> bool:
    return any(letter in one.switches for one in (alias, *alias.instead.values()))


def _letters(name: str, alias: Alias, rest: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The given option letters with their values, and the arguments for options that all our commands have."""
    given: dict[str, str] = {}
    passed_on: list[str] = []
    words = iter(rest)
    for word in words:
        option, equals, value = word.partition("=")
        letter = option.lstrip("-")
        if word == "--json":
            passed_on.append(word)
            continue
        meant = alias.names.get(letter) or LONG_NAMES.get(letter, "")
        letter = next((one for one in meant if _knows(alias, one)), letter)
        if not word.startswith("-") or len(letter) != 1:
            raise UsageError(f"mqadmin {name}: {word!r} is not an option of this command")
        if not equals:
            value = "true" if _takes_no_value(alias, letter) else next(words, "")
        if not value and not _takes_no_value(alias, letter):
            raise UsageError(f"mqadmin {name}: -{letter} needs a value")
        if letter == "n" and "n" not in alias.arguments:
            passed_on += ["--namesrv", value]
        else:
            given[letter] = value.strip()
    return given, passed_on


def _arguments(name: str, alias: Alias, given: dict[str, str]) -> list[str]:
    """Take the values of the positional arguments out of `given`."""
    missing = [letter for letter in alias.arguments if letter not in given and letter not in alias.optional]
    if missing:
        named = (f"-{'bn' if letter == 'B' else letter}" for letter in missing)  # mqadmin has no -B
        raise UsageError(f"mqadmin {name} needs {' and '.join(named)}")
    return [given.pop(letter) for letter in alias.arguments if letter in given]


def _option(name: str, alias: Alias, letter: str, value: str) -> list[str]:
    if letter in alias.ignored:
        return []
    if letter in alias.options:
        return [alias.options[letter], value]
    if letter in alias.switches:
        return [alias.switches[letter]] if alias.switches[letter] else []
    if letter in alias.booleans:
        if value.lower() not in ("true", "false"):
            raise UsageError(f"mqadmin {name}: -{letter} {value}: expected true or false")
        switch = alias.booleans[letter][value.lower() == "false"]
        return [switch] if switch else []
    raise UsageError(f"mqadmin {name}: no option -{letter} here; see `downrange {' '.join(alias.command)} --help`")
