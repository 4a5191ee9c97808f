"""Transactional messages: how a transaction ends, and how a broker asks the producer about it."""

from __future__ import annotations

from downrange.protocol.bodies.fields import Header, Int32, Int64


class EndTransactionRequest(Header, frozen=True, kw_only=True):
    """Request 37: commit or roll back a half message.

    `commit_or_rollback` has the transaction bits of a sysFlag: 8 commit, 12 rollback, 0 unknown.
    """

    producer_group: str
    tran_state_table_offset: Int64
    commit_log_offset: Int64
    commit_or_rollback: Int32
    msg_id: str
    from_transaction_check: bool = False
    transaction_id: str | None = None
    topic: str | None = None
    bname: str | None = None


class CheckTransactionStateRequest(Header, frozen=True, kw_only=True):
    """Request 39, from broker to producer: how a transaction ended. The body is the half message as a record."""

    tran_state_table_offset: Int64
    commit_log_offset: Int64
    msg_id: str | None = None
    transaction_id: str | None = None
    offset_msg_id: str | None = None
    topic: str | None = None
    bname: str | None = None


class ResumeCheckHalfMessageRequest(Header, frozen=True):
    """Request 323: ask producers again about a half message that was given up."""

    msg_id: str | None = None
    topic: str | None = None
