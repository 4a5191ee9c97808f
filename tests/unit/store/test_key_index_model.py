"""Random messages: the key index finds what a dict of lists holds. And the fast Java hash is the plain one."""

from __future__ import annotations

import struct
import tempfile
from collections import defaultdict
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from downrange.model.hashing import HashCache, java_hash_unsigned
from downrange.model.message import PhysicalOffset
from downrange.store.files import OS_FILES
from downrange.store.index.key_index import KeyIndex

T0 = 1_700_000_000_000
TOPICS = st.sampled_from(["orders", "payments", "%RETRY%g", "註文"])
KEY = st.text(st.characters(codec="utf-8", exclude_characters=" "), min_size=1, max_size=4) | st.sampled_from("abc")
MESSAGES = st.lists(st.tuples(TOPICS, st.none() | KEY, st.none() | st.lists(KEY, max_size=4), st.integers(0, 3_000)))


def plain_hash(text: str) -> int:
    raw = text.encode("utf-16-be", "surrogatepass")
    h = 0
    for unit in struct.unpack(f">{len(raw) // 2}H", raw):
        h = (31 * h + unit) % (1 << 32)
    return h


def index_at(directory: str) -> KeyIndex:
    index = KeyIndex(Path(directory), 7, 12, OS_FILES, lambda: T0)
    index.load()
    return index


@settings(deadline=None)  # it makes files: how long that takes depends on the machine
@given(messages=MESSAGES, restarts=st.sets(st.integers(0, 20)), dropped=st.integers(0, 20))
def test_lookups_are_those_of_a_dict_of_lists(
    messages: list[tuple[str, str | None, list[str] | None, int]], restarts: set[int], dropped: int
) -> None:
    expected: dict[int, list[int]] = defaultdict(list)  # the index knows keys by the value of their hash only
    texts = set()
    now = T0
    with tempfile.TemporaryDirectory() as directory:
        index = index_at(directory)
        for number, (topic, unique_key, keys, millis) in enumerate(messages):
            if number in restarts:
                index.close()
                index = index_at(directory)
            now += millis
            index.put_keys([(topic, unique_key, None if keys is None else " ".join(keys), number * 100, now)])
            for key in ([] if unique_key is None else [unique_key]) + (keys or []):
                texts.add((topic, key))
                expected[known_as(topic, key)].append(number * 100)
        for topic, key in texts:
            offsets = expected[known_as(topic, key)]
            assert index.query(topic, key, 10_000, 0, 1 << 60).physical_offsets == offsets[::-1]
            assert index.query(topic, key, 2, 0, 1 << 60).physical_offsets == offsets[::-1][:2]
        index.delete_expired(PhysicalOffset(dropped * 100))
        for topic, key in texts:
            found = index.query(topic, key, 10_000, 0, 1 << 60).physical_offsets
            offsets = expected[known_as(topic, key)]
            assert found == offsets[len(offsets) - len(found) :][::-1]
            assert {offset for offset in offsets if offset >= dropped * 100} <= set(found)
        index.destroy()


def known_as(topic: str, key: str) -> int:
    h = plain_hash(f"{topic}#{key}")
    return min(h, (1 << 32) - h) % (1 << 31)


@given(head=st.text(), text=st.text() | st.text("0123456789ABCDEF", min_size=20, max_size=600))
def test_the_hash_of_two_parts_is_that_of_the_whole(head: str, text: str) -> None:
    assert java_hash_unsigned(text, plain_hash(head)) == plain_hash(head + text)


@given(st.sampled_from([255, 256, 4095, 4096, 4097, 10_000]), st.sampled_from("a~\x00\x7f"))
def test_long_texts_hash_alike(length: int, character: str) -> None:
    assert java_hash_unsigned(character * length) == plain_hash(character * length)
    assert java_hash_unsigned(character * length, plain_hash("head")) == plain_hash("head" + character * length)


def test_a_hash_cache_never_holds_more_than_its_limit() -> None:
    cache = HashCache(10)
    for number in range(35):
        assert cache[f"k{number}"] == plain_hash(f"k{number}")
        assert len(cache) <= 10
    assert cache["k34"] == plain_hash("k34")
