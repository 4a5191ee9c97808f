"""mqadmin's names and letters, translated to our commands."""

from __future__ import annotations

import shlex
from functools import cache
from pathlib import Path

import pytest

from downrange.cli.main import app
from downrange.cli.mqadmin import ALIASES, LONG_NAMES, Alias, letters_of, translate
from downrange.cli.options import UsageError
from tests.unit.cli.conftest import Command
from tests.unit.client.fake_cluster import TOPIC, FakeCluster, reply

OPERATORS_KNOW = (
    "clusterList brokerStatus statsAll topicList topicRoute topicStatus updateTopic deleteTopic updateTopicPerm",
    "consumerProgress consumerConnection consumerStatus producerConnection updateSubGroup deleteSubGroup",
    "resetOffsetByTime skipAccumulatedMessage queryMsgById queryMsgByKey queryMsgByUniqueKey queryMsgTraceById",
    "sendMessage getBrokerConfig updateBrokerConfig wipeWritePerm addWritePerm",
    "updateAclConfig deleteAclConfig clusterAclConfigVersion updateGlobalWhiteAddr",
    "getControllerMetaData getSyncStateSet getBrokerEpoch electMaster cleanBrokerMetadata haStatus",
    "getControllerConfig updateControllerConfig",
    "createUser updateUser deleteUser getUser listUser copyUser createAcl updateAcl deleteAcl getAcl listAcl copyAcl",
)


@pytest.mark.parametrize("name", " ".join(OPERATORS_KNOW).split())
def test_every_name_operators_know_is_there(name: str) -> None:
    assert name in ALIASES


@pytest.mark.parametrize(
    ("line", "ours"),
    [
        ("topicRoute -t T", "topic route -- T"),
        ("topicRoute --topic T -n a:1", "topic route --namesrv a:1 -- T"),
        ("topicRoute -n=a:1 -t=T --json", "topic route --namesrv a:1 --json -- T"),
        ("topicList", "topic list --all --"),
        ("electMaster -a h:1 -b 2 -n set -c C", "controller elect --controller h:1 --cluster C -- set 2"),
        ("getSyncStateSet -a h:1 -b set", "controller status --controller h:1 -- set"),
        ("getBrokerEpoch -n a:1 -b set", "controller epochs --namesrv a:1 --broker set --"),
        (
            "cleanBrokerMetadata -a h:1 -b 1;2 -bn set -c C -l true",
            "controller clean --controller h:1 --ids '1;2' --cluster C --living -- set",
        ),
        ("updateControllerConfig -a h:1 -k K -v V", "controller update-config --controller h:1 -- K=V"),
        ("topicList -c", "topic list --all --groups --"),
        ("clusterList", "cluster list --"),
        ("clusterList -m", "cluster stats --"),
        ("clusterList -i 2", "cluster list --watch 2 --"),
        ("clusterRT -a 5 -i 10 -p true -m room", "cluster rt --count 5 --watch 10 --"),
        ("consumeMessage -t T -b B -i 1 -o 5 -c 3 -g G", "consume --queue B:1 --offset 5 --limit 3 -- T"),
        ("consumeMessage -t T --beginTimestamp 1 -e 2", "consume --from 1 --to 2 -- T"),
        (
            "printMsgByQueue -t T --brokerName B -i 1 -p true -d true -f true -c GBK -e 2",
            "consume --queue B:1 --count-tags --charset GBK --to 2 -- T",
        ),
        ("printMsg -t T -s A -d false", "message search --body --tag A --no-body -- T"),
        ("exportMetadata -b B -t -s -f D", "cluster export --broker B --topics --directory D -- metadata"),
        ("queryMsgByUniqueKey -i ID -t T -a", "message view --topic T --all -- ID"),
        ("queryMsgById -i ID -s true -u unit", "message resend -- ID"),
        ("resetOffsetByTime -g G -t T -s now -c", "group reset-offset --time now --cpp -- G T"),
        ("sendMessage -t T -p x -m true", "message send --trace -- T x"),
        ("brokerConsumeStats -b B -t 5000 -l 10", "cluster consume-stats --level 10 -- B"),
        ("updateTopic -t T -c C -u true -s true", "topic create --cluster C --unit --unit-sub -- T"),
        (
            "updateTopic -c C -t T -r 4 -w 8 -p 6 -o true",
            "topic create --cluster C --read-queues 4 --write-queues 8 --perm 6 --order -- T",
        ),
        ("updateTopicPerm -t T -b h:1 -p 4", "topic perm --broker h:1 -- T 4"),
        ("deleteTopic -c C -t T", "topic delete --cluster C -- T"),
        ("statsAll -a -t T", "topic stats --active -- T"),
        ("statsAll", "topic stats --"),
        ("consumerProgress", "group list --"),
        ("consumerProgress -g G -t T", "group progress --topic T -- G"),
        ("consumerProgress -g G -s true", "group progress --clients -- G"),
        ("consumerConnection -g G -b h:1", "group connections --broker h:1 -- G"),
        ("consumerStatus -g G -i C -s", "group status --client C --stack -- G"),
        ("consumerStatus -g G --clientId C", "group status --client C -- G"),
        ("deleteSubGroup -b h:1 -g G -r false", "group delete --broker h:1 --keep-offsets -- G"),
        (
            "updateSubGroup -b h:1 -g G -s true -m false -d false -q 2 -r 3 -i 0 -w 1 -a true",
            "group create --broker h:1 --consume --no-from-min --no-broadcast --retry-queues 2 --retry-max-times 3 "
            "--broker-id 0 --slow-broker-id 1 --notify -- G",
        ),
        ("setConsumeMode -b B -t T -g G -m POP -q 2", "group set-consume-mode --broker B --mode POP --share 2 -- G T"),
        ("resetOffsetByTime -g G -t T -s now -f false", "group reset-offset --time now --no-force -- G T"),
        (
            "updateAclConfig -c C -a K -s S -w 10.0.0.* -i DENY -u SUB -t A=PUB,B=SUB -g G=SUB -m true",
            "plain-acl update --cluster C --secret-key S --white-address 10.0.0.* --default-topic-perm DENY "
            "--default-group-perm SUB --topics A=PUB,B=SUB --groups G=SUB --admin -- K",
        ),
        (
            "updateAclConfig --accessKey K --secretKey S --admin false",
            "plain-acl update --secret-key S --no-admin -- K",
        ),
        ("deleteAclConfig -b h:1 -a K", "plain-acl delete --broker h:1 -- K"),
        ("clusterAclConfigVersion -c C", "plain-acl versions --cluster C --"),
        (
            "updateGlobalWhiteAddr -b h:1 -g 1.1.1.1,2.2.2.2 -p F",
            "plain-acl white-list --broker h:1 --file F -- 1.1.1.1,2.2.2.2",
        ),
        ("skipAccumulatedMessage -g G -t T -f true", "group skip -- G T"),
        ("cloneGroupOffset -s A -d B -t T -o false", "group clone -- A B T"),
        ("createUser -c C -u alice -p pass -t Super", "user create --cluster C --password pass --type Super -- alice"),
        (
            "updateUser --brokerAddr h:1 --username alice --userStatus disable --userType Normal",
            "user update --broker h:1 --status disable --type Normal -- alice",
        ),
        ("deleteUser -b h:1 -u alice", "user delete --broker h:1 -- alice"),
        ("getUser -c C -u alice", "user show --cluster C -- alice"),
        ("listUser -c C --filter al", "user list --cluster C --filter al --"),
        ("copyUser -f h:1 -t h:2", "user copy -- h:1 h:2"),
        ("copyUser --fromBroker h:1 --toBroker h:2 --usernames a,b", "user copy -- h:1 h:2 a,b"),
        (
            "createAcl -c C -s User:a -r Topic:*,Group:* -a Pub,Sub -i 10.0.0.0/8 -d Deny",
            "acl set --cluster C --source-ip 10.0.0.0/8 --decision Deny -- User:a Topic:*,Group:* Pub,Sub",
        ),
        (
            "updateAcl -b h:1 --subject User:a --resources Topic:T --actions All --decision Allow",
            "acl set --broker h:1 --decision Allow -- User:a Topic:T All",
        ),
        ("deleteAcl -c C -s User:a -r Topic:T", "acl delete --cluster C --resource Topic:T -- User:a"),
        ("getAcl -c C -s User:a", "acl show --cluster C -- User:a"),
        ("listAcl -c C -s ali -r Auth", "acl list --cluster C --subject ali --resource Auth --"),
        ("copyAcl -f h:1 -t h:2 -s User:a", "acl copy -- h:1 h:2 User:a"),
        ("queryMsgById -i ID", "message view -- ID"),
        ("queryMsgById -i ID -g G -d C", "message consume-directly --group G --client C -- ID"),
        ("queryMsgByKey -t T -k K -b 1 -e 2", "message query --begin 1 --end 2 -- T K"),
        ("queryMsgByOffset -t T -b B -i 0 -o 5", "message at -- T B 0 5"),
        (
            "sendMessage -t T -p 'a body' -k K -c Tag -b B -i 1",
            "message send --keys K --tags Tag --broker B --queue 1 -- T 'a body'",
        ),
        ("updateBrokerConfig -b h:1 -k key -v -1", "config update --broker h:1 -- key=-1"),
        ("updateNamesrvConfig -k a -v b", "namesrv-admin update-config -- a=b"),
        ("updateKvConfig -s N -k K -v V", "namesrv-admin kv-put -- N K V"),
        ("wipeWritePerm -b broker-a", "namesrv-admin wipe-write-perm -- broker-a"),
        ("topicStatus -h", "topic status --help"),
    ],
)
def test_a_line_is_translated(line: str, ours: str) -> None:
    assert translate(shlex.split(line)) == shlex.split(ours)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("topiclst", "did you mean topicList"),
        ("TOPICLIST", "did you mean topicList"),
        ("qqqqqqqqqq", "lists the names"),
        ("topicRoute", "needs -t"),
        ("queryMsgByKey", "needs -t and -k"),
        ("topicRoute -t", "-t needs a value"),
        ("topicRoute -x 1 -t T", "no option -x"),
        ("topicRoute T", "'T' is not an option"),
        ("topicRoute --tpoic T", "'--tpoic' is not an option"),
        ("updateSubGroup -g G -s yes", "expected true or false"),
    ],
)
def test_a_line_that_cannot_be_translated_says_what_would_be_right(line: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        translate(line.split())


@cache
def commands() -> dict[tuple[str, ...], set[str]]:
    """Every command of ours, and its options."""
    found: dict[tuple[str, ...], set[str]] = {}

    def walk(path: tuple[str, ...], node: object) -> None:
        children = getattr(node, "commands", None)
        if children is None:
            found[path] = {name for one in node.params for name in (*one.opts, *one.secondary_opts)}  # type: ignore[attr-defined]
            return
        for name, child in children.items():
            walk((*path, name), child)

    walk((), _root())
    return found


@pytest.mark.parametrize("name", ALIASES)
def test_an_alias_names_a_command_and_options_that_exist(name: str) -> None:
    for alias in (ALIASES[name], *ALIASES[name].instead.values()):
        known = commands()[alias.command]
        ours = {*alias.options.values(), *alias.switches.values()}
        ours |= {switch for pair in alias.booleans.values() for switch in pair}
        assert ours - {""} <= known


# Commands of mqadmin 4.9.8 with their options: letter, long name if it is one word, `=` if the option has a value.
OF_4_9 = [line.split() for line in (Path(__file__).parent / "mqadmin_498.txt").read_text().splitlines()]


@pytest.mark.parametrize(("name", "options"), [(name, options) for name, *options in OF_4_9])
def test_every_option_of_4_9_is_known(name: str, options: list[str]) -> None:
    """Each option alone, by letter and by its long name, beside those that the command cannot do without."""
    alias = ALIASES[name]
    needed = {letter: "1" for letter in alias.arguments if letter not in alias.optional}
    for option in options:
        letter, _, long_name = option.rstrip("=").partition(":")
        words = (["true"] if letter in _booleans(alias) else ["1"]) if option.endswith("=") else []
        others = [word for one, value in needed.items() if one != letter for word in (f"-{one}", value)]
        by_letter = translate([name, f"-{letter}", *words, *others])
        if long_name:
            assert translate([name, f"--{long_name}", *words, *others]) == by_letter


def _booleans(alias: Alias) -> set[str]:
    return {letter for one in (alias, *alias.instead.values()) for letter in one.booleans}


def test_long_names_stand_for_letters() -> None:
    assert all(len(letter) == 1 for letters in LONG_NAMES.values() for letter in letters)


FAMILIES = {"topic", "group", "cluster", "message", "config", "namesrv-admin", "plain-acl", "user", "acl", "controller"}
RUN_SERVERS = {("cluster", "up"), ("cluster", "kill"), ("cluster", "down")}


def test_every_command_takes_json_and_a_name_server() -> None:
    operators = {path: one for path, one in commands().items() if path[0] in FAMILIES and path not in RUN_SERVERS}
    assert len(operators) > 35
    for path, options in operators.items():
        assert {"--json", "--namesrv", "-n"} <= options, path


def test_every_command_and_alias_stands_in_the_operators_page() -> None:
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "operate.md").read_text("utf-8")
    missing = [
        " ".join(path) for path in commands() if path[0] in FAMILIES and f"`downrange {' '.join(path)}" not in page
    ]
    missing += [name for name in ALIASES if f"`{name}`" not in page]
    assert missing == []


def test_the_exit_code_of_the_translated_command_is_kept(cluster: FakeCluster, command: Command) -> None:
    cluster.brokers["broker-a"].answers[306] = reply()
    cluster.brokers["broker-b"].answers[306] = reply(1, "no")
    result = command("mqadmin", "cleanExpiredCQ", "-c", "DefaultCluster")
    assert result.code == 1
    assert "cleaned on broker-a" in result.out
    assert result.err.count("\n") == 1
    assert command("mqadmin", "cleanExpiredCQ", "-b", "broker-a").code == 0
    assert command("mqadmin", "topicRoute", "-t", TOPIC, "--json").document["topic"] == TOPIC
    assert command("mqadmin", "topicRoute", "-t", "nothere").code == 1
    assert command("mqadmin", "topicRut").code == 2


def test_without_a_name_the_names_are_listed(command: Command) -> None:
    result = command("mqadmin")
    assert result.code == 0
    assert "topicRoute                downrange topic route" in result.out


@pytest.mark.parametrize("name", ALIASES)
def test_the_help_of_a_name_says_what_its_letters_mean(name: str) -> None:
    first, *lines, _ = letters_of(name, _root())
    assert first.startswith(f"mqadmin {name} runs downrange {ALIASES[name].command[0]}")
    assert all(line.startswith("  -") for line in lines)
    if name == "consumerProgress":
        assert "  -g  the argument GROUP; runs downrange group progress" in lines


@cache
def _root() -> object:
    import typer

    return typer.main.get_command(app)
