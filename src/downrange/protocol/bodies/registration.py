"""The registration of a broker with a name server."""

from __future__ import annotations

import struct
import zlib
from typing import Final

import msgspec

from downrange.model.topics import TopicConfig
from downrange.protocol.bodies.body import Body, BodyError, decode_body, encode_body
from downrange.protocol.bodies.data_version import DataVersion
from downrange.protocol.bodies.fields import Header, Int32, Int64
from downrange.protocol.bodies.topics import TopicConfigTable, TopicQueueMappingInfo

# Brokers from this version on add queue mappings to the deflated form.
MAPPINGS_SINCE_VERSION: Final = 413
# A registration of 100,000 topics inflates to about 5 MB, but an attacker can make a few bytes inflate to gigabytes.
MAX_INFLATED: Final = 64 * 1024 * 1024


class RegisterBrokerRequest(Header, frozen=True, kw_only=True):
    """Request 103. `body_crc32` is the CRC of the body as sent, without its top bit; 0 means that it is not checked."""

    broker_name: str
    broker_addr: str
    cluster_name: str
    ha_server_addr: str
    broker_id: Int64
    compressed: bool = False
    body_crc32: Int32 = msgspec.field(name="bodyCrc32", default=0)
    heartbeat_timeout_millis: Int64 | None = None
    enable_acting_master: bool | None = None


class RegisterBrokerResponse(Header, frozen=True):
    """The answer to request 103; only slaves whose master is alive get the two addresses."""

    ha_server_addr: str | None = None
    master_addr: str | None = None


class BrokerIdentityRequest(Header, frozen=True, kw_only=True):
    """Requests 104 UNREGISTER_BROKER and 322 QUERY_DATA_VERSION."""

    broker_name: str
    broker_addr: str
    cluster_name: str
    broker_id: Int64


class QueryDataVersionResponse(Header, frozen=True):
    """The answer to request 322: whether the broker has to send its topics again."""

    changed: bool


class RegisterBrokerBody(Body, frozen=True, kw_only=True):
    """The body of request 103: all topics of the broker, or only those that changed."""

    topic_config_serialize_wrapper: TopicConfigTable = TopicConfigTable()
    filter_server_list: tuple[str, ...] = ()


# Deflated form: a zlib stream of length-prefixed pieces (all lengths and counts 4 bytes):
#   data version JSON | count, topics `name read write perm filterType[ attributes]` | filter server JSON
#   | from senders since 413: count, mapping JSON
_LENGTH: Final = struct.Struct(">i")


def encode_registration(body: RegisterBrokerBody, sender_version: int) -> bytes:
    """The deflated form, for a request with `compressed=true`."""
    topics = body.topic_config_serialize_wrapper
    pieces = [_piece(encode_body(topics.data_version)), _LENGTH.pack(len(topics.topic_config_table))]
    for config in topics.topic_config_table.values():
        # Exactly five words: a 4.9 name server refuses the whole registration if there is a sixth (attributes of 5.x).
        text = (
            f"{config.topic_name} {config.read_queue_nums} {config.write_queue_nums}"
            f" {config.perm} {config.topic_filter_type}"
        )
        pieces.append(_piece(text.encode()))
    pieces.append(_piece(msgspec.json.encode(body.filter_server_list)))
    if sender_version >= MAPPINGS_SINCE_VERSION:
        mappings = topics.topic_queue_mapping_info_map or {}
        pieces.append(_LENGTH.pack(len(mappings)))
        pieces += [_piece(encode_body(mapping)) for mapping in mappings.values()]
    return zlib.compress(b"".join(pieces), 9)


def _piece(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def decode_registration(data: bytes, max_inflated: int = MAX_INFLATED) -> RegisterBrokerBody:
    """Read the deflated form; raises BodyError if it is wrong or inflates to more than `max_inflated` bytes."""
    reader = _PieceReader(_inflate(data, max_inflated))
    data_version = decode_body(DataVersion, reader.piece())
    configs = [_topic_config(reader.text()) for _ in range(reader.count())]
    servers = decode_body(tuple[str, ...], reader.piece())
    mappings = None
    # Mappings follow if the data does not end here; the version of the sender is not needed to know this.
    if not reader.is_at_end:
        mappings = [decode_body(TopicQueueMappingInfo, reader.piece()) for _ in range(reader.count())]
    return RegisterBrokerBody(
        topic_config_serialize_wrapper=TopicConfigTable(
            data_version=data_version,
            topic_config_table={config.topic_name: config for config in configs},
            topic_queue_mapping_info_map=None if mappings is None else {each.topic: each for each in mappings},
        ),
        filter_server_list=servers,
    )


def _inflate(data: bytes, max_inflated: int) -> bytes:
    inflater = zlib.decompressobj()
    try:
        inflated = inflater.decompress(data, max_inflated)
    except zlib.error as error:
        raise BodyError(f"registration is not a zlib stream: {error}") from None
    if inflater.unconsumed_tail:
        raise BodyError(f"registration inflates to more than {max_inflated} bytes")
    if not inflater.eof:
        raise BodyError("registration is a zlib stream cut off")
    return inflated


class _PieceReader:
    """Reads length-prefixed pieces one after the other; refuses a length that leads beyond the data."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def is_at_end(self) -> bool:
        return self._at == len(self._data)

    def count(self) -> int:
        """A number of pieces; each needs at least four bytes, so a number that cannot fit is refused."""
        number = self._number()
        if number < 0 or number > (len(self._data) - self._at) // _LENGTH.size:
            raise BodyError(f"registration announces {number} pieces at byte {self._at}; so many cannot follow")
        return number

    def piece(self) -> bytes:
        length = self._number()
        start, end = self._at, self._at + length
        if length < 0 or end > len(self._data):
            raise BodyError(f"registration has a piece of {length} bytes at byte {start}, beyond its end")
        self._at = end
        return self._data[start:end]

    def text(self) -> str:
        start = self._at
        try:
            return self.piece().decode()
        except UnicodeDecodeError:
            raise BodyError(f"registration has text at byte {start} that is not UTF-8") from None

    def _number(self) -> int:
        if len(self._data) - self._at < _LENGTH.size:
            raise BodyError(f"registration is cut off at byte {self._at}")
        (number,) = _LENGTH.unpack_from(self._data, self._at)
        self._at += _LENGTH.size
        return int(number)


def _topic_config(text: str) -> TopicConfig:
    try:
        name, read, write, perm, filter_type, *_attributes = text.split(" ")
        return TopicConfig(
            topic_name=name,
            read_queue_nums=int(read),
            write_queue_nums=int(write),
            perm=int(perm),
            topic_filter_type=filter_type,
        )
    except ValueError:
        raise BodyError(f"registration has a topic that cannot be read: {text[:200]!r}") from None
