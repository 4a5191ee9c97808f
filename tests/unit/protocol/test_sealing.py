"""A sealed text can be read with the secret and the challenge, and with nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from downrange.protocol.sealing import NONCE_SIZE, SealError, seal, unseal

NONCE = bytes(range(NONCE_SIZE))


@given(text=st.binary(max_size=300), secret=st.binary(min_size=1, max_size=80), challenge=st.text(max_size=40))
def test_a_sealed_text_is_read_back(text: bytes, secret: bytes, challenge: str) -> None:
    sealed = seal(text, secret, challenge, NONCE)
    assert unseal(sealed, secret, challenge) == text
    assert text not in sealed[NONCE_SIZE + 32 :] or len(text) < 8


@given(data=st.data())
def test_one_changed_bit_is_noticed(data: st.DataObject) -> None:
    sealed = bytearray(seal(b"the passwords", b"secret", "challenge", NONCE))
    place = data.draw(st.integers(0, len(sealed) - 1))
    sealed[place] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(SealError):
        unseal(bytes(sealed), b"secret", "challenge")


@pytest.mark.parametrize("size", [0, 1, NONCE_SIZE, NONCE_SIZE + 31, NONCE_SIZE + 32])
def test_a_short_answer_is_no_sealed_text(size: int) -> None:
    with pytest.raises(SealError):
        unseal(bytes(size), b"secret", "challenge")


def test_another_secret_or_an_old_answer_is_refused() -> None:
    sealed = seal(b"the passwords", b"secret", "challenge", NONCE)
    for secret, challenge in ((b"another", "challenge"), (b"secret", "another"), (b"secret", "")):
        with pytest.raises(SealError):
            unseal(sealed, secret, challenge)


def test_equal_texts_look_different() -> None:
    first, second = (seal(b"x" * 64, b"secret", "c", bytes([number]) * NONCE_SIZE) for number in (1, 2))
    assert first[NONCE_SIZE:] != second[NONCE_SIZE:]
    assert first[-32:] != first[-64:-32]
