from __future__ import annotations

import random

import pytest

from downrange.broker.bloom_filter import BloomFilter, mask_of
from downrange.broker.murmur3 import murmur3_low


@pytest.mark.parametrize(
    ("text", "expected"),
    [  # the first half of the published hashes of these texts, bytes in order
        (b"", "0000000000000000"),
        (b"hello", "029bbd41b3a7d8cb"),
        (b"The quick brown fox jumps over the lazy dog", "6c1b07bc7bbc4be3"),
    ],
)
def test_the_hash_of_known_texts(text: bytes, expected: str) -> None:
    assert murmur3_low(text).to_bytes(8, "little").hex() == expected


@pytest.mark.parametrize(
    ("consumers", "percent", "bits", "hashes"), [(32, 20, 112, 3), (1, 50, 8, 1), (1, 99, 8, 1), (64, 1, 616, 7)]
)
def test_the_size_follows_from_consumers_and_error_rate(consumers: int, percent: int, bits: int, hashes: int) -> None:
    assert BloomFilter.sized_for(consumers, percent) == BloomFilter(bits, hashes)


@pytest.mark.parametrize(
    ("text", "positions"),
    [
        ("g#T", (90, 68, 28)),
        ("CID_abc#TopicTest", (103, 61, 29)),
        ("gscg_sql1#gsAlpha", (65, 6, 78)),
        ("gscg_sql2#gsAlpha", (24, 59, 94)),
        ("gscg_sql3#gsBeta", (36, 15, 5)),
    ],
)
def test_a_consumer_has_the_bits_java_gives_it(text: str, positions: tuple[int, ...]) -> None:
    assert BloomFilter(112, 3).positions(text) == positions


def test_bits_are_counted_from_the_least_of_each_byte() -> None:
    bloom = BloomFilter(16, 2)
    assert bloom.bitmap(mask_of((0, 9))) == b"\x01\x02"
    assert bloom.bitmap(mask_of((15, 15))) == b"\x00\x80"
    assert bloom.bitmap(0) == b"\x00\x00"


def test_who_matched_is_never_missed_and_a_map_of_another_size_says_nothing() -> None:
    bloom = BloomFilter.sized_for(32, 20)
    masks = [mask_of(bloom.positions(f"group{number}#topic")) for number in range(64)]
    rng = random.Random(7)
    offered = wanted = 0
    for _ in range(200):
        matching = set(rng.sample(range(64), 16))
        bitmap = bloom.bitmap(sum({1 << bit for number in matching for bit in range(112) if masks[number] >> bit & 1}))
        found = {number for number in range(64) if bloom.may_want(bitmap, masks[number])}
        assert matching <= found
        offered += len(found)
        wanted += len(matching)
    assert wanted < offered < 2 * wanted  # a Bloom filter errs, but not much
    assert bloom.may_want(b"", masks[0])
    assert bloom.may_want(bytes(13), masks[0])
    assert not bloom.may_want(bytes(14), masks[0])
