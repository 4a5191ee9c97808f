"""Decisions of access control 4.x: who asks, and may they?"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from downrange.auth.access_control import ANY_NAME, Account, Action, Need, ResourceType
from downrange.auth.acl_yaml import read_yaml
from downrange.auth.guard import Guard, Outcome
from downrange.auth.needs import BROKER_NEEDS
from downrange.auth.plain_accounts import read_acl
from downrange.auth.plain_acl import PlainAccessControl
from downrange.model.topics import TRACE_TOPIC
from downrange.protocol.bodies.fields import Header
from downrange.protocol.codes import RequestCode, SerializeType
from downrange.protocol.command import Command, request
from downrange.protocol.errors import BrokerError, LocalProtocolError
from downrange.protocol.framing import FrameDecoder, encode
from downrange.protocol.signing import ACCESS_KEY, SIGNATURE, Signer, signature

ACCOUNTS = b"""
globalWhiteRemoteAddresses: [10.0.0.*]
accounts:
- {accessKey: root-key, secretKey: root-secret, admin: true}
- {accessKey: limited-root, secretKey: limited-secret, admin: true, topicPerms: [orders=SUB]}
- accessKey: shop-key
  secretKey: shop-secret
  whiteRemoteAddress: 192.168.0.*
  defaultTopicPerm: SUB
  topicPerms: [orders=PUB, audit=DENY]
  groupPerms: [billing=SUB]
- {accessKey: white-root, secretKey: white-secret, admin: true, whiteRemoteAddress: 192.168.0.7}
- {accessKey: nobody-key, secretKey: nobody-secret}
"""
SECRETS = {
    "root-key": "root-secret", "limited-root": "limited-secret", "shop-key": "shop-secret",
    "white-root": "white-secret", "nobody-key": "nobody-secret",
}  # fmt: skip
FAR, GLOBAL, OWN = "172.16.0.1", "10.0.0.9", "192.168.0.7"


def control() -> PlainAccessControl:
    acl = read_acl(read_yaml(ACCOUNTS))
    made = PlainAccessControl()
    made.put({account.access_key: account for account in acl.accounts}, acl.white_addresses)
    return made


def signed(key: str, secret: str | None = None, code: int = 10, fields: Mapping[str, str] | None = None) -> Command:
    return Signer(key, secret or SECRETS[key]).sign(request(code, ext_fields=fields or {"topic": "t"}, body=b"body"))


def sentence(error: BrokerError) -> str:
    prefix = "org.apache.rocketmq.acl.common.AclException: "
    assert error.code == 1
    assert error.remark.startswith(prefix)
    return error.remark.removeprefix(prefix)


@pytest.mark.parametrize(
    ("command", "address", "account"),
    [
        (signed("shop-key"), FAR, Account("shop-key")),
        (signed("root-key"), FAR, Account("root-key", is_admin=True)),
        (signed("shop-key"), OWN, Account("shop-key", is_white=True)),
        (signed("shop-key", "wrong"), OWN, Account("shop-key", is_white=True)),
        (request(10, ext_fields={ACCESS_KEY: "shop-key"}), OWN, Account("shop-key", is_white=True)),
        (signed("shop-key", "wrong"), GLOBAL, Account("", is_white=True)),
        (request(10), GLOBAL, Account("", is_white=True)),
        (signed("stranger", "any"), GLOBAL, Account("", is_white=True)),
        (signed("root-key"), GLOBAL, Account("root-key", is_admin=True, is_white=True)),
        (signed("root-key", "wrong"), GLOBAL, Account("", is_white=True)),
        (signed("white-root"), OWN, Account("white-root", is_admin=True, is_white=True)),
        (signed("white-root", "wrong"), OWN, Account("white-root", is_white=True)),
    ],
)
def test_who_asks(command: Command, address: str, account: Account) -> None:
    assert control().authenticate(command, address) == account


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (request(10), "No accessKey is configured"),
        (request(10, ext_fields={"accesskey": "shop-key", "signature": "x"}), "No accessKey is configured"),
        (signed("stranger", "any"), "No acl config for stranger"),
        (request(10, ext_fields={ACCESS_KEY: ""}), "No acl config for "),
        (request(10, ext_fields={ACCESS_KEY: "x" * 60_000}), f"No acl config for {'x' * 255}"),
        (request(10, ext_fields={ACCESS_KEY: "SHOP-KEY"}), "No acl config for SHOP-KEY"),
        (signed("shop-key", "wrong"), "Check signature failed for accessKey=shop-key"),
        (request(10, ext_fields={ACCESS_KEY: "shop-key"}), "Check signature failed for accessKey=shop-key"),
        (
            request(10, ext_fields={ACCESS_KEY: "shop-key", SIGNATURE: ""}),
            "Check signature failed for accessKey=shop-key",
        ),
        (
            request(10, ext_fields={ACCESS_KEY: "shop-key", SIGNATURE: "ä"}),
            "Check signature failed for accessKey=shop-key",
        ),
    ],
)
def test_who_is_not_known(command: Command, words: str) -> None:
    with pytest.raises(BrokerError) as refused:
        control().authenticate(command, FAR)
    assert sentence(refused.value) == words


def test_the_test_vector_of_rocketmq() -> None:
    assert signature({"field": "abc"}, b"", b"12345678") == "BOigG5+Fiv0354g5bQuwOUOPMp0="


def test_a_query_is_accepted_from_old_and_new_clients() -> None:
    fields = {"topic": "t", "key": "k", "_UNIQUE_KEY_QUERY": "true", ACCESS_KEY: "shop-key"}
    for left_out in ({"_UNIQUE_KEY_QUERY"}, set[str]()):
        text = signature({name: fields[name] for name in fields.keys() - left_out}, b"", b"shop-secret")
        command = request(RequestCode.QUERY_MESSAGE, ext_fields={**fields, SIGNATURE: text})
        assert control().authenticate(command, FAR).name == "shop-key"


PUB, SUB, GET, UPDATE = (frozenset({action}) for action in (Action.PUB, Action.SUB, Action.GET, Action.UPDATE))
TOPIC, GROUP, CLUSTER = ResourceType.TOPIC, ResourceType.GROUP, ResourceType.CLUSTER
ADMIN_ONLY = "Need admin permission for request code=17, but accessKey={} is not"
BY_ADDRESS = ADMIN_ONLY + "; an address on a white list is not enough, sign the request"


@pytest.mark.parametrize(
    ("key", "address", "needs", "words"),
    [
        ("shop-key", FAR, [], None),
        ("shop-key", FAR, [Need(TOPIC, "orders", PUB)], None),
        ("shop-key", FAR, [Need(TOPIC, "orders", SUB)], "No default permission for topic:orders"),
        ("shop-key", FAR, [Need(TOPIC, "other", SUB)], None),
        ("shop-key", FAR, [Need(TOPIC, "other", PUB)], "No default permission for topic:other"),
        ("shop-key", FAR, [Need(TOPIC, "audit", SUB)], "No default permission for topic:audit"),
        ("shop-key", FAR, [Need(TOPIC, "ORDERS", PUB)], "No default permission for topic:ORDERS"),
        ("shop-key", FAR, [Need(TOPIC, "orders ", PUB)], "No default permission for topic:orders "),
        ("shop-key", FAR, [Need(TOPIC, "ns%orders", PUB)], "No default permission for topic:ns%orders"),
        ("shop-key", FAR, [Need(GROUP, "billing", SUB)], None),
        ("shop-key", FAR, [Need(GROUP, "orders", SUB)], "No default permission for group:orders"),
        ("shop-key", FAR, [Need(TOPIC, "audit", SUB), Need(GROUP, "x", SUB)], "No default permission for group:x"),
        ("shop-key", FAR, [Need(TOPIC, ANY_NAME, PUB | SUB)], None),
        ("nobody-key", FAR, [Need(TOPIC, ANY_NAME, PUB | SUB)], "No default permission for topic:*"),
        ("nobody-key", FAR, [Need(TOPIC, TRACE_TOPIC, PUB)], None),
        ("nobody-key", FAR, [Need(TOPIC, TRACE_TOPIC, SUB)], f"No default permission for topic:{TRACE_TOPIC}"),
        (
            "nobody-key",
            FAR,
            [Need(TOPIC, TRACE_TOPIC, PUB), Need(TOPIC, "t", PUB)],
            "No default permission for topic:t",
        ),
        ("shop-key", FAR, [Need(TOPIC, "orders", SUB | GET)], "No default permission for topic:orders"),
        ("shop-key", FAR, [Need(TOPIC, "orders", GET)], ADMIN_ONLY.format("shop-key")),
        ("shop-key", FAR, [Need(TOPIC, "orders", PUB), Need(CLUSTER, ANY_NAME, UPDATE)], ADMIN_ONLY.format("shop-key")),
        ("shop-key", OWN, [Need(TOPIC, "audit", PUB), Need(GROUP, "x", SUB)], None),
        ("shop-key", OWN, [Need(CLUSTER, ANY_NAME, GET)], BY_ADDRESS.format("shop-key")),
        ("nobody-key", GLOBAL, [Need(TOPIC, "audit", PUB)], None),
        ("nobody-key", GLOBAL, [Need(CLUSTER, ANY_NAME, UPDATE)], BY_ADDRESS.format("nobody-key")),
        ("root-key", FAR, [Need(CLUSTER, ANY_NAME, UPDATE), Need(TOPIC, "t", PUB), Need(GROUP, "g", SUB)], None),
        ("root-key", GLOBAL, [Need(CLUSTER, ANY_NAME, UPDATE)], None),
        ("white-root", OWN, [Need(CLUSTER, ANY_NAME, UPDATE)], None),
        ("limited-root", FAR, [Need(CLUSTER, ANY_NAME, UPDATE), Need(TOPIC, "t", GET | SUB)], None),
        ("limited-root", FAR, [Need(TOPIC, "orders", SUB)], None),
        ("limited-root", FAR, [Need(TOPIC, "orders", PUB)], "No default permission for topic:orders"),
    ],
)
def test_what_an_account_may(key: str, address: str, needs: list[Need], words: str | None) -> None:
    access = control()
    command = signed(key, code=17)
    account = access.authenticate(command, address)
    if words is None:
        access.authorize(account, needs, command, address)
        return
    with pytest.raises(BrokerError) as refused:
        access.authorize(account, needs, command, address)
    assert sentence(refused.value) == words


def test_an_address_alone_never_administers() -> None:
    access = control()
    for command, address in ((request(17), GLOBAL), (signed("white-root", "wrong"), OWN)):
        account = access.authenticate(command, address)
        with pytest.raises(BrokerError, match="a white list is not enough"):
            access.authorize(account, [Need(CLUSTER, ANY_NAME, UPDATE)], command, address)


def test_new_accounts_are_in_force_at_once() -> None:
    access = control()
    before, secrets = access.generation, access.secrets
    assert secrets == {key: secret.encode() for key, secret in SECRETS.items()}
    access.put({}, ())
    assert (access.generation, access.secrets) == (before + 1, {})
    with pytest.raises(BrokerError, match="No acl config for shop-key"):
        access.authenticate(signed("shop-key"), FAR)
    with pytest.raises(BrokerError, match="No acl config for shop-key"):
        access.authorize(Account("shop-key"), [Need(TOPIC, "orders", PUB)], signed("shop-key"), FAR)


class Peer:
    peer = f"{FAR}:1"
    peer_host = b"\xac\x10\0\x01\0\0\0\x01"


class Nothing:
    def topic_at(self, physical_offset: int) -> str | None:
        return None

    def topic_of_half_message(self, physical_offset: int) -> str | None:
        return None


names = st.sampled_from(
    [ACCESS_KEY, SIGNATURE, "SecurityToken", "accesskey", "topic", "b", "a", "consumerGroup", "_UNIQUE_KEY_QUERY", ""]
)
texts = st.sampled_from(["shop-key", "root-key", "orders", "", "\0"]) | st.text(max_size=20)
commands = st.builds(
    Command,
    code=st.sampled_from(sorted(int(code) for code in RequestCode)) | st.integers(-(2**15), 2**15 - 1),
    raw_ext=st.dictionaries(names | st.text(max_size=8), texts, max_size=6),
    body=st.binary(max_size=50) | st.just(b'{"clientID":"c","consumerDataSet":[]}'),
    serialize_type=st.sampled_from([int(SerializeType.JSON), int(SerializeType.ROCKETMQ)]),
)


@given(commands)
@settings(max_examples=500)
def test_whatever_the_fields_say_no_request_passes_without_a_signature(command: Command) -> None:
    """Random auth fields, in both header encodings, against the guard with accounts of 4.x."""
    outcomes: list[Outcome] = []
    guard = Guard(control(), BROKER_NEEDS, Nothing(), BROKER_NEEDS.keys(), outcomes.append)
    try:
        frame = encode(command, 1)
    except LocalProtocolError:  # a field that this encoding cannot express
        return
    frames = FrameDecoder().frames(b"".join([frame] if isinstance(frame, bytes) else frame))
    for one in frames:
        assert guard.passed([one], [Peer()], 0, 1) == 0
        assert guard.refusal(one, Peer()) is not None


class _Fields(Header, frozen=True):
    topic: str
    b: str


@given(st.data())
@settings(max_examples=300)
def test_a_signature_protects_every_byte_of_fields_and_body(data: st.DataObject) -> None:
    """Change one byte of the values or the body of a signed request: the signature is wrong."""
    good = Signer("shop-key", "shop-secret").sign(request(10, _Fields("orders", "other"), body=b"some body"))
    access = control()
    assert access.authenticate(good, FAR).name == "shop-key"
    fields, body = dict(good.ext_fields), bytearray(good.body_bytes)
    place = data.draw(st.sampled_from(["body", *fields]))
    if place == "body":
        body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    else:
        value = fields[place]
        at = data.draw(st.integers(0, len(value) - 1))
        fields[place] = value[:at] + data.draw(st.characters(codec="utf-8").filter(value[at].__ne__)) + value[at + 1 :]
    with pytest.raises(BrokerError):
        access.authenticate(Command(10, raw_ext=fields, body=bytes(body)), FAR)
