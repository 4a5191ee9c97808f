"""Timer messages that are taken back before they are due."""

from __future__ import annotations

from downrange.protocol.bodies.fields import Header


class RecallMessageRequest(Header, frozen=True, kw_only=True):
    """Request 370. `recall_handle` is what the answer to the send had."""

    topic: str
    recall_handle: str
    producer_group: str | None = None
    bname: str | None = None


class RecallMessageResponse(Header, frozen=True, kw_only=True):
    """The id of the message that was taken back."""

    msg_id: str = ""
