"""Pull requests of one group for one topic, encoded once; the offset is filled in."""

from __future__ import annotations

from typing import Final

from downrange.protocol.bodies.fields import encode_fields
from downrange.protocol.bodies.pull import PullMessageRequest, PullSysFlag
from downrange.protocol.codes import RequestCode, SerializeType
from downrange.protocol.command import Command
from downrange.protocol.framing import encode

GROUP: Final = "downrange-bench"
_REMEMBERED: Final = 4096


class PullRequests:
    """Makes frames from templates; requests share one if they differ only in an offset with equally many digits."""

    def __init__(
        self, topic: str, header: SerializeType, broker_name: str = "", *, hold_millis: int = 0, tags: str = "*"
    ) -> None:
        self._header = header
        flags = PullSysFlag.SUBSCRIPTION | (PullSysFlag.SUSPEND if hold_millis else PullSysFlag(0))
        self._fields = encode_fields(
            PullMessageRequest(
                consumer_group=GROUP,
                topic=topic,
                queue_id=0,
                queue_offset=0,
                max_msg_nums=0,
                sys_flag=int(flags),
                commit_offset=0,
                suspend_timeout_millis=hold_millis,
                subscription=tags,
                sub_version=0,
                expression_type="TAG",
                bname=broker_name or None,
            )
        )
        self._templates: dict[tuple[int, int, int, int], bytes] = {}

    def frame(self, opaque: int, queue_id: int, offset: int, count: int) -> bytes:
        digits = b"%d" % offset
        key = opaque, queue_id, count, len(digits)
        template = self._templates.get(key)
        if template is None:
            if len(self._templates) >= _REMEMBERED:
                self._templates.clear()
            template = self._templates[key] = self._template(opaque, queue_id, count, "9" * len(digits))
        return template % digits

    def _template(self, opaque: int, queue_id: int, count: int, offset: str) -> bytes:
        fields = self._fields | {"queueId": str(queue_id), "queueOffset": offset, "maxMsgNums": str(count)}
        frame = encode(Command(RequestCode.PULL_MESSAGE, opaque, raw_ext=fields, serialize_type=int(self._header)))
        between = b'":"' if self._header is SerializeType.JSON else len(offset).to_bytes(4, "big")
        before = b"queueOffset" + between
        assert frame.count(before) == 1, "no name of a topic or tag can contain this"
        # The name of a topic and the bytes of a length may contain percent signs.
        start, end = (part.replace(b"%", b"%%") for part in frame.split(before + offset.encode()))
        return start + before.replace(b"%", b"%%") + b"%b" + end
