"""Hashes of message keys for the index."""

from __future__ import annotations

from collections.abc import Sequence

from downrange.model.hashing import HashCache, java_hash_unsigned
from downrange.store.index.index_file import MAX_INT

# topic, unique id, KEYS, physical offset
Keyed = tuple[str, str | None, str | None, int]


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

    def of_message(self, topic: str, unique_key: str | None, keys: str | None) -> list[int]:
        """The hash of the unique id, then the hashes of the words of KEYS."""
        hashes: list[int] = []
        if unique_key is not None:
            if len(unique_key) == 32 and unique_key.isascii():
                known = self._heads_of_ids[unique_key[:30]] + self._ends_of_ids[unique_key[30:]]
                hashes.append(self._topics_of_ids[topic] + known & 0xFFFFFFFF)
            else:
                hashes.append(java_hash_unsigned(unique_key, self._topics[topic]))
        if keys:
            start = self._topics[topic]
            if " " in keys:
                hashes += [java_hash_unsigned(key, start) for key in keys.split(" ") if key]
            else:
                hashes.append(java_hash_unsigned(keys, start))
        return hashes

    def of_run(self, keyed: Sequence[Keyed]) -> list[tuple[int, int]]:
        """The hashes of many messages, each with the physical offset of its message."""
        topics_of_ids, heads_of_ids, ends_of_ids = self._topics_of_ids, self._heads_of_ids, self._ends_of_ids
        hashed: list[tuple[int, int]] = []
        for topic, unique_key, keys, physical_offset in keyed:
            if unique_key is not None and keys is None and len(unique_key) == 32 and unique_key.isascii():
                h = topics_of_ids[topic] + heads_of_ids[unique_key[:30]] + ends_of_ids[unique_key[30:]] & 0xFFFFFFFF
                hashed.append((h, physical_offset))
            else:
                hashed += [(h, physical_offset) for h in self.of_message(topic, unique_key, keys)]
        return hashed


def positive_hash(unsigned_hash: int) -> int:
    """The absolute value of the hash as a signed number; 0 for -2³¹, whose absolute value does not fit."""
    if unsigned_hash <= MAX_INT:
        return unsigned_hash
    return (0x1_0000_0000 - unsigned_hash) & MAX_INT
