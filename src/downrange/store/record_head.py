"""The head of a record: all that precedes the body; see docs/formats/record.md."""

from __future__ import annotations

import struct
from typing import Final

from downrange.model.message import SysFlag

# total size, magic, body CRC, queue id, flag, queue offset, physical offset, sysFlag, born timestamp, born host,
# store timestamp, store host, reconsume times, prepared transaction offset, body length.
HEAD_V4: Final = struct.Struct(">iIIiiqqiq8sq8siqi")
assert HEAD_V4.size == 88
V6_FLAGS: Final = int(SysFlag.BORN_HOST_V6 | SysFlag.STORE_HOST_V6)
# Lengths of (born host, store host) -> layout, and the host bits of sysFlag.
HEADS: Final = {
    (8, 8): (HEAD_V4, 0),
    (20, 8): (struct.Struct(">iIIiiqqiq20sq8siqi"), int(SysFlag.BORN_HOST_V6)),
    (8, 20): (struct.Struct(">iIIiiqqiq8sq20siqi"), int(SysFlag.STORE_HOST_V6)),
    (20, 20): (struct.Struct(">iIIiiqqiq20sq20siqi"), V6_FLAGS),
}
HEAD_BY_FLAGS: Final = {flags: layout for layout, flags in HEADS.values()}
SIZE_AND_MAGIC: Final = struct.Struct(">iI")
CRC_MASK: Final = 0x7FFFFFFF  # RocketMQ's checksums are never negative
