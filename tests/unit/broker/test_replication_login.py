"""The login between brokers: who proves what, whatever the pieces in which the bytes come."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from downrange.broker.replication.login import (
    GREETING,
    LoginFailed,
    MasterLogin,
    SlaveLogin,
    read_secret,
    slave_access,
)
from downrange.broker.replication.wire import REPORT
from downrange.settings import ConfigError
from downrange.store.config import StoreConfig

SECRET = b"a secret of many characters"
REPORTS = REPORT.pack(0) + REPORT.pack(1 << 40)


def master(secret: bytes | None = SECRET, *, is_required: bool = True, nonce: bytes = b"m" * 32) -> MasterLogin:
    return MasterLogin(secret, nonce, is_required=is_required)


def slave(secret: bytes = SECRET, broker_id: int = 3, nonce: bytes = b"s" * 32) -> SlaveLogin:
    return SlaveLogin(secret, broker_id, nonce)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    return [data[start:end] for start, end in itertools.pairwise(places)]


@given(st.lists(st.integers(0, 70)), st.integers(-(2**63), 2**63 - 1))
def test_both_sides_prove_who_they_are_in_whatever_pieces_the_bytes_come(cuts: list[int], broker_id: int) -> None:
    ours, theirs = master(), slave(broker_id=broker_id)
    answers = [ours.feed(piece) for piece in pieces(theirs.greeting, cuts)]
    assert not ours.is_done
    proofs = [theirs.feed(piece) for piece in pieces(b"".join(answer for answer, _ in answers), cuts)]
    assert all(one is None for one in proofs[:-1])
    assert proofs[-1] is not None
    behind = [ours.feed(piece)[1] if not ours.is_done else piece for piece in pieces(proofs[-1] + REPORTS, cuts)]
    assert (ours.is_done, ours.broker_id, b"".join(behind)) == (True, broker_id, REPORTS)


def test_a_wrong_secret_fails_on_both_sides() -> None:
    ours, theirs = master(), slave(b"another secret, as long")
    answer, _ = ours.feed(theirs.greeting)
    with pytest.raises(LoginFailed, match="another haSecretFile"):
        theirs.feed(answer)
    proof = slave(b"another secret, as long", nonce=b"s" * 32)
    with pytest.raises(LoginFailed, match="its proof is wrong"):
        ours.feed(proof._nonce)  # any 32 bytes
    assert not ours.is_done


def test_a_proof_is_worth_nothing_for_another_login_or_the_other_side() -> None:
    first, theirs = master(), slave()
    proof = theirs.feed(first.feed(theirs.greeting)[0])
    assert proof is not None
    second = master(nonce=b"n" * 32)
    own_proof = second.feed(theirs.greeting)[0][32:]
    for replayed in (proof, own_proof):
        with pytest.raises(LoginFailed):
            second.feed(replayed)
        second = master(nonce=b"n" * 32)
        second.feed(theirs.greeting)
    other_id = master()
    other_id.feed(slave(broker_id=4).greeting)
    with pytest.raises(LoginFailed):
        other_id.feed(proof)


@given(st.binary(min_size=1, max_size=200))
def test_no_bytes_of_a_stranger_end_a_login(data: bytes) -> None:
    for beginning in (b"", GREETING, slave().greeting):
        ours = master()
        try:
            for at in range(len(beginning)):
                ours.feed(beginning[at : at + 1])
            _, rest = ours.feed(data)
            assert rest == b""
        except LoginFailed:
            pass
        assert not ours.is_done


def test_an_allowed_address_need_not_log_in_but_may() -> None:
    ours = master(is_required=False)
    assert ours.feed(REPORTS) == (b"", REPORTS)
    assert (ours.is_done, ours.broker_id) == (True, None)
    ours, theirs = master(is_required=False), slave()
    proof = theirs.feed(ours.feed(theirs.greeting)[0])
    assert proof is not None
    ours.feed(proof)
    assert ours.broker_id == 3


def test_a_master_without_a_secret_says_so() -> None:
    with pytest.raises(LoginFailed, match="has no haSecretFile"):
        master(None, is_required=False).feed(slave().greeting)


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "No such file"), (b"short  \n", "16 characters"), (b"x" * 5000, "no secret")]
)
def test_a_file_without_a_secret_is_one_line(tmp_path: Path, content: bytes | None, reason: str) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=reason) as raised:
        read_secret(file)
    assert "short" not in str(raised.value)


def test_who_may_follow() -> None:
    everybody = slave_access(StoreConfig())
    assert not everybody.is_limited
    assert everybody.may_follow("10.9.9.9")
    listed = slave_access(StoreConfig(ha_allowed_slave_addresses="10.1.2.3; 10.1.3.*"))
    assert [listed.may_connect(one) for one in ("10.1.2.3", "10.1.3.9", "10.1.2.4", "")] == [True, True, False, False]
    with pytest.raises(ConfigError, match="haAllowedSlaveAddresses: 'nowhere' is no address pattern"):
        slave_access(StoreConfig(ha_allowed_slave_addresses="nowhere"))


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    access = slave_access(StoreConfig(ha_secret_file=file))
    assert access.secret == SECRET
    assert "a secret" not in repr(access)
    assert not access.may_follow("127.0.0.1")
    assert access.may_connect("127.0.0.1")
