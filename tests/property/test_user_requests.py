"""Whatever stands in the fields and bodies of requests about users: an answer, and accounts that can be read again."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from downrange.auth.accounts import Accounts
from downrange.auth.guard import Guard
from downrange.auth.needs import BROKER_NEEDS
from downrange.auth.user_access_control import ACCOUNT_CODES, AccessSettings, UserAccessControl
from downrange.auth.users import User, UserType
from downrange.protocol.codes import ResponseCode, SerializeType
from downrange.protocol.command import request
from downrange.protocol.errors import RemoteProtocolError
from downrange.protocol.framing import Frame, FrameDecoder, decode_frame, encode
from downrange.protocol.signing import ACCESS_KEY, SIGNATURE, Signer
from tests.support.user_requests import UserDesk

NAMES = (
    "root brokers alice User:alice User:root Super Normal enable disable Topic:T Topic:* * Topic:a*b All Pub Any Allow "
    "Deny Custom Default 10.0.0.0/8 true"
)
WORDS = st.sampled_from([*NAMES.split(), "", " ", "\0"])
TEXTS = st.one_of(WORDS, st.text(max_size=12))
HALVES = st.text(alphabet='\ud800\udfff\x00"\\', max_size=4)  # halves of characters, which JSON can spell
FIELDS = st.dictionaries(
    st.sampled_from(["username", "subject", "filter", "policyType", "resource", "subjectFilter", "challenge", "x"]),
    TEXTS,
    max_size=4,
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(TEXTS, HALVES, st.none(), st.integers(), st.booleans()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
ENTRY = st.fixed_dictionaries({}, optional=dict.fromkeys(("resource", "actions", "decision", "sourceIps", "x"), VALUES))
GOOD_ENTRY = st.fixed_dictionaries(
    {
        "resource": st.sampled_from(["Topic:T", "Topic:p*", "Group:*", "*", "cluster:c"]),
        "actions": st.lists(st.sampled_from(["Pub", "sub", "All", "Get"]), min_size=1),
        "decision": st.sampled_from(["Allow", "DENY"]),
    }
)
POLICY = st.fixed_dictionaries(
    {"entries": st.lists(ENTRY | GOOD_ENTRY, max_size=3) | VALUES}, optional={"policyType": TEXTS | st.none()}
)
BODIES = st.one_of(
    st.binary(max_size=40),
    VALUES.map(lambda value: json.dumps(value).encode()),
    st.fixed_dictionaries({}, optional=dict.fromkeys(("password", "userType", "userStatus", "username"), VALUES)).map(
        lambda value: json.dumps(value).encode()
    ),
    st.fixed_dictionaries({"policies": st.lists(POLICY, max_size=2)}, optional={"subject": TEXTS}).map(
        lambda value: json.dumps(value).encode()
    ),
)
ASKED = st.tuples(
    st.sampled_from(sorted(ACCOUNT_CODES)), FIELDS, BODIES, st.sampled_from(["root", "brokers", "alice", "nosuch"])
)


@given(asked=st.lists(ASKED, max_size=12))
@settings(max_examples=150)
def test_every_request_gets_an_answer_and_the_accounts_stay_readable(
    asked: list[tuple[int, dict[str, str], bytes, str]],
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        desk = UserDesk(Path(directory))
        assert desk.ask(3001, {"username": "alice"}, b'{"password":"aliceSecret"}').code == 0
        for code, fields, body, by in asked:
            reply = desk.ask(code, fields, body, by=by)
            known = {0, ResponseCode.SYSTEM_ERROR, ResponseCode.NO_PERMISSION, ResponseCode.INVALID_PARAMETER}
            assert reply.code in known
            assert "Error:" not in (reply.remark or ""), reply.remark  # that would be a bug of ours
            assert b"Secret" not in reply.body_bytes
        again = UserDesk(Path(directory), init_authentication_user="")
        assert desk.access is not None
        assert again.access is not None
        assert again.access.accounts.users == desk.access.accounts.users
        assert again.access.accounts.acls == desk.access.accounts.acls
        assert again.access.accounts.users["brokers"].is_super
        assert "Topic:a*b" not in json.dumps(desk.ask(3010).body_bytes.decode())


class Peer:
    peer = "127.0.0.1:5"
    peer_host = b"\x7f\0\0\1\0\0\0\5"


class Stored:
    def topic_at(self, physical_offset: int) -> str | None:
        return None

    def topic_of_half_message(self, physical_offset: int) -> str | None:
        return None


def signed_rightly(frame: Frame) -> bool:
    """Whether a frame is a request that one of the two users signed; computed from its fields, in plain steps."""
    command = decode_frame(frame)
    fields = command.ext_fields
    secret = {"root": b"rootSecret", "alice": b"aliceSecret"}.get(fields.get(ACCESS_KEY, ""))
    if secret is None or command.is_response:
        return False
    ignored = {SIGNATURE, "__ZONE_NAME", "__ZONE_MODE"}
    if command.code == 12:
        ignored.add("_UNIQUE_KEY_QUERY")
    for left_out in ({SIGNATURE}, ignored):
        content = "".join(fields[name] for name in sorted(fields) if name not in left_out).encode() + command.body_bytes
        if base64.b64encode(hmac.new(secret, content, hashlib.sha1).digest()) == fields.get(SIGNATURE, "").encode():
            return True
    return False


@given(
    code=st.sampled_from([12, 26, 34, 310, 3001, 3005, 9999]),
    by=st.sampled_from(["root", "alice"]),
    fields=FIELDS,
    body=BODIES,
    is_binary=st.booleans(),
    changed=st.dictionaries(st.sampled_from([ACCESS_KEY, SIGNATURE, "b", "accesskey"]), st.none() | TEXTS, max_size=2),
    flips=st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 255)), max_size=2),
)
@settings(max_examples=400)
def test_nothing_passes_the_guard_that_was_not_signed(
    code: int,
    by: str,
    fields: dict[str, str],
    body: bytes,
    is_binary: bool,
    changed: dict[str, str | None],
    flips: list[tuple[int, int]],
) -> None:
    """Fields are changed after signing, then bytes of the header."""
    kind = SerializeType.ROCKETMQ if is_binary else SerializeType.JSON
    command = Signer(by, f"{by}Secret").sign(request(code, ext_fields=fields, body=body, serialize_type=kind))
    ext = {name: text for name, text in {**command.ext_fields, **changed}.items() if text is not None}
    ((serialize_type, header, rest),) = FrameDecoder().frames(encode(msgspec.structs.replace(command, raw_ext=ext), 1))
    spoiled = bytearray(header)
    for place, mask in flips:
        spoiled[place % len(spoiled)] ^= mask
    frame = serialize_type, bytes(spoiled), rest
    try:
        is_signed = signed_rightly(frame)
    except RemoteProtocolError:
        is_signed = False
    refusal = guard().refusal(frame, Peer())
    if not is_signed:
        assert refusal is not None
        assert refusal.code == ResponseCode.NO_PERMISSION
    elif decode_frame(frame).ext_fields[ACCESS_KEY] == "root" and decode_frame(frame).code != 34:
        assert refusal is None  # a Super user may everything; a heartbeat that cannot be read is refused
    assert refusal is None or "Secret" not in str(refusal)


@pytest.mark.parametrize("text", ["\\ud800", "a\\udfff", "\\ud800\\ud800", "\\u0000"])
@pytest.mark.parametrize("name", [ACCESS_KEY, SIGNATURE, "b"])
def test_halves_of_characters_in_a_header_are_refused(name: str, text: str) -> None:
    fields = {ACCESS_KEY: "root", SIGNATURE: "x", "b": "T", name: text}
    ext = ",".join(f'"{key}":"{value}"' for key, value in fields.items())
    header = f'{{"code":310,"language":"JAVA","version":479,"opaque":1,"flag":0,"extFields":{{{ext}}}}}'
    refusal = guard().refusal((0, header.encode(), b""), Peer())
    assert refusal is not None
    assert refusal.code == ResponseCode.NO_PERMISSION


def guard() -> Guard:
    accounts = Accounts()
    accounts.replace_all([User("root", "rootSecret", UserType.SUPER), User("alice", "aliceSecret")], [])
    access = UserAccessControl(accounts, AccessSettings("c"))
    return Guard(access, BROKER_NEEDS, Stored(), frozenset(BROKER_NEEDS), lambda outcome: None)
