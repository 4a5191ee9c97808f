"""The writers of `df.write.format("rocketmq")` and `df.writeStream.format("rocketmq")`.

A writer is made on the driver. `write` runs in a worker for each task, `commit` and `abort` in a process beside the
driver. The promises of the levels and the order of the steps are in delivery.py.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from downrange.client.producer.transaction_producer import LocalTransactionState
from downrange.model.errors import MQError
from downrange.spark.delivery import Level, Marker, Step, commit_steps, is_delivered, may_roll_back
from downrange.spark.errors import OptionError, one_line_errors
from downrange.spark.frozen_imports import freeze_imports
from downrange.spark.half_message_lists import Half, halves_of
from downrange.spark.half_sending import HalfSending, end_halves
from downrange.spark.mirror_rows import QueueMap, check_mirror_columns, mirror_rows
from downrange.spark.mirror_sending import MirrorSending
from downrange.spark.sink_client import SinkClient, client_of
from downrange.spark.sink_options import SinkOptions, sink_options
from downrange.spark.sink_rows import RowKey, RowReader, check_columns
from downrange.spark.sink_sending import Sending

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TaskSent(WriterCommitMessage):
    """The report of one task attempt to the driver."""

    query: str
    batch: int
    token: str
    rows: int
    pages: tuple[bytes, ...] = ()
    """The half messages of the task, see half_message_lists.py."""


def batch_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
    """The writer of `df.write`; raises an error if options or columns are wrong."""
    return BatchSink(_checked(options, schema, overwrite))


def stream_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
    """The writer of `df.writeStream`; raises an error if options or columns are wrong."""
    found = _checked(options, schema, overwrite)
    if found.write_id is not None:
        raise OptionError("writeId is for batch writes: a stream is identified by its checkpoint")
    return StreamSink(found)


def _checked(options: Mapping[str, str], schema: StructType, overwrite: bool) -> SinkOptions:
    found = sink_options(options)
    if found.mirror is not None:
        QueueMap.parse(found.mirror)
        check_mirror_columns(schema.fieldNames())
    else:
        check_columns(schema, found)
    if overwrite:
        raise OptionError("a topic cannot be overwritten: use mode append, and output mode append or update")
    return found


class Delivery:
    """The work of one batch at its level. `perform` does one step of the commit; a crash may come between any two."""

    def __init__(self, client: SinkClient, query: str, batch: int) -> None:
        self._client = client
        self._level = client.options.delivery_level
        self.query = query
        self.batch = batch

    # --- in a task ------------------------------------------------------------------------------------------------

    def send(self, batches: Iterator[pa.RecordBatch], partition: int) -> TaskSent:
        client, options = self._client, self._client.options
        token = uuid.uuid4().hex
        if options.mirror is not None:
            return TaskSent(self.query, self.batch, token, self._mirror(batches, QueueMap.parse(options.mirror)))
        if self._level is not Level.AT_LEAST_ONCE:
            marker = client.run(client.markers.newest(self.query))
            if is_delivered(marker, self.batch):
                log.info("batch was delivered before query=%s batch=%d", self.query, self.batch)
                return TaskSent(self.query, self.batch, token, 0)
        rows = RowReader(
            options.topic,
            RowKey(self.query, self.batch, partition, 0),
            token if self._level is Level.TRANSACTIONAL else None,
        )
        sending = self._sending()
        try:
            for batch in batches:
                client.run(sending.put(rows.messages(batch)))
            client.run(sending.finish())
        except BaseException:
            self._undo(sending)
            raise
        pages = sending.sent.pages() if isinstance(sending, HalfSending) else ()
        return TaskSent(self.query, self.batch, token, rows.count, pages)

    def _mirror(self, batches: Iterator[pa.RecordBatch], queues: QueueMap) -> int:
        """Send messages of another cluster; returns how many were read."""
        client, options = self._client, self._client.options
        sending = MirrorSending(
            client.producer,
            client.session,
            queues,
            batch_bytes=options.batch_bytes,
            max_in_flight=options.max_in_flight,
        )
        count = 0
        try:
            for batch in batches:
                client.run(sending.put_rows(mirror_rows(batch, queues)))
                count += batch.num_rows
            client.run(sending.finish())
        except BaseException:
            client.run(sending.give_up())
            raise
        return count

    def _sending(self) -> Sending | HalfSending:
        options = self._client.options
        if self._level is Level.TRANSACTIONAL:
            return HalfSending(
                self._client.transactions,
                max_in_flight=options.max_in_flight,
                check_after_seconds=options.check_after_seconds,
            )
        return Sending(self._client.producer, batch_bytes=options.batch_bytes, max_in_flight=options.max_in_flight)

    def _undo(self, sending: Sending | HalfSending) -> None:
        """Undo the sends of a failed task: messages cannot be taken back, but half messages can be rolled back."""
        self._client.run(sending.give_up())
        if isinstance(sending, HalfSending):
            self.roll_back(halves_of(sending.sent.pages()))

    def roll_back(self, halves: Sequence[Half]) -> None:
        """Roll back half messages as far as possible: the broker asks about the others and gets the same answer."""
        client = self._client
        try:
            client.run(end_halves(client.transactions, halves, LocalTransactionState.ROLLBACK))
        except MQError as error:
            log.warning("half messages left for the check query=%s batch=%d reason=%s", self.query, self.batch, error)

    # --- on the driver --------------------------------------------------------------------------------------------

    def commit(self, tasks: Sequence[TaskSent]) -> None:
        if self._level is Level.AT_LEAST_ONCE:
            return
        marker = self._client.run(self._client.markers.newest(self.query))
        for step in commit_steps(self._level, marker, self.batch, rows=sum(task.rows for task in tasks)):
            marker = self.perform(step, marker, tasks)

    def perform(self, step: Step, marker: Marker | None, tasks: Sequence[TaskSent]) -> Marker | None:
        """Do one step; return the marker that counts after it."""
        client, markers = self._client, self._client.markers
        pages = [page for task in tasks for page in task.pages]
        match step:
            case Step.ROLL_BACK:
                self.roll_back(halves_of(pages))
            case Step.DECIDE:
                ids = client.run(markers.write_pages(self.query, pages))
                tokens = tuple(task.token for task in tasks if task.rows)
                marker = Marker(self.query, self.batch, is_closed=False, tokens=tokens, pages=ids)
                client.run(markers.write(marker))
            case Step.END:
                client.run(end_halves(client.transactions, halves_of(pages), LocalTransactionState.COMMIT))
            case Step.SETTLE:
                assert marker is not None
                left = client.run(self._settle(marker))
                log.info("finished an interrupted batch query=%s batch=%d halves=%d", self.query, self.batch, left)
            case Step.CLOSE:
                if marker is None or marker.batch < self.batch:
                    marker = Marker(self.query, self.batch, is_closed=True)
                else:
                    marker = replace(marker, is_closed=True)
                client.run(markers.write(marker))
        return marker

    async def _settle(self, marker: Marker) -> int:
        client = self._client
        halves = await client.markers.read_pages(marker.pages)
        return await end_halves(client.transactions, halves, LocalTransactionState.COMMIT, client.is_half)

    def abort(self, tasks: Sequence[TaskSent | None]) -> None:
        ended = [task for task in tasks if task is not None]
        if self._level is Level.TRANSACTIONAL and may_roll_back(all_tasks_ended=len(ended) == len(tasks)):
            self.roll_back(halves_of(page for task in ended for page in task.pages))


class BatchSink(DataSourceArrowWriter):
    """The sink of one `df.write`. Spark pickles it: driver, tasks and commit work with copies."""

    def __init__(self, options: SinkOptions) -> None:
        if options.delivery_level is Level.IDEMPOTENT and options.write_id is None:
            raise OptionError(
                "deliveryLevel=idempotent needs the option writeId in a batch write: "
                "a name for this write, the same when it is repeated"
            )
        self._options = options
        self._query = options.write_id or str(uuid.uuid4())

    def delivery(self) -> Delivery:
        freeze_imports()
        return Delivery(client_of(self._options), self._query, 0)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        with one_line_errors():
            return self.delivery().send(iterator, _task().partitionId())

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        with one_line_errors():
            self.delivery().commit(_sent(messages))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self.delivery().abort([message if isinstance(message, TaskSent) else None for message in messages])


class StreamSink(DataSourceStreamArrowWriter):
    """The sink of a streaming query. Spark makes a new one for every commit, so it has only options."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    def delivery(self, query: str, batch: int) -> Delivery:
        freeze_imports()
        return Delivery(client_of(self._options), query, batch)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        task = _task()
        query = task.getLocalProperty("sql.streaming.queryId")
        batch = task.getLocalProperty("streaming.sql.batchId")
        assert query is not None, "Spark gives every task of a stream the id of its query"
        assert batch is not None, "Spark gives every task of a stream the number of its batch"
        with one_line_errors():
            return self.delivery(query, int(batch)).send(iterator, task.partitionId())

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  Spark's name
        tasks = _sent(messages)
        if tasks:  # a batch without partitions sent nothing
            with one_line_errors():
                self.delivery(tasks[0].query, batchId).commit(tasks)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  Spark's name
        tasks = [message if isinstance(message, TaskSent) else None for message in messages]
        if ended := [task for task in tasks if task is not None]:
            self.delivery(ended[0].query, batchId).abort(tasks)


def _task() -> TaskContext:
    task = TaskContext.get()
    assert task is not None, "`write` runs in a task"
    return task


def _sent(messages: list[WriterCommitMessage | None]) -> list[TaskSent]:
    """The reports of all tasks; Spark commits only when every task has succeeded."""
    sent = [message for message in messages if isinstance(message, TaskSent)]
    assert len(sent) == len(messages), "a commit without the report of every task"
    return sent
