"""Hashes of message keys for the index."""

from __future__ import annotations

from collections.abc import Sequence

from downrange.model.hashing import HashCache, java_hash_unsigned
from downrange.store.index.index_file import MAX_INT
from downrange.store.new_messages import Keyed


class KeyHashes:
    """Unsigned hashes of topic, "#" and key, which remember hashes of parts that are needed again soon."""

    __slots__ = ("_ends_of_ids", "_heads_of_ids", "_topics", "_topics_of_ids")

    def __init__(self) -> None:
        self._topics = HashCache(20_000, suffix="#")
        # A unique id has 32 characters and ends in a counter: within a millisecond the ids of one producer share the
        # first 30. So its hash is the sum of three remembered hashes.
        self._topics_of_ids = HashCache(20_000, suffix="#", room=32)
        self._heads_of_ids = HashCache(4_096, room=2)
        self._ends_of_ids = HashCache(4_096)

    def of_key(self, topic: str, key: str) -> int:
        return java_hash_unsigned(key, self._topics[topic])

    def of_messages(self, keyed: Sequence[Keyed]) -> list[tuple[int, int, int]]:
        """The hashes that the index keeps for messages, each with offset and store time of its message.

        A message has one for its unique id and one for each word of its KEYS.
        """
        topics, topics_of_ids = self._topics, self._topics_of_ids
        heads_of_ids, ends_of_ids = self._heads_of_ids, self._ends_of_ids
        hashed: list[tuple[int, int, int]] = []
        for topic, unique_key, keys, physical_offset, timestamp in keyed:
            if unique_key is not None:
                if len(unique_key) == 32 and unique_key.isascii():
                    known = heads_of_ids[unique_key[:30]] + ends_of_ids[unique_key[30:]]
                    key_hash = topics_of_ids[topic] + known & 0xFFFFFFFF
                else:
                    key_hash = java_hash_unsigned(unique_key, topics[topic])
                if key_hash > MAX_INT:
                    key_hash = positive_hash(key_hash)
                hashed.append((key_hash, physical_offset, timestamp))
            if keys:
                start = topics[topic]
                hashes = [positive_hash(java_hash_unsigned(key, start)) for key in keys.split(" ") if key]
                hashed += [(key_hash, physical_offset, timestamp) for key_hash in hashes]
        return hashed


def positive_hash(unsigned_hash: int) -> int:
    """The absolute value of the hash as a signed number; 0 for -2³¹, whose absolute value does not fit."""
    if unsigned_hash <= MAX_INT:
        return unsigned_hash
    return (0x1_0000_0000 - unsigned_hash) & MAX_INT
