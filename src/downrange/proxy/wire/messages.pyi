"""Written by stub.py from schema.py; not to be changed by hand."""

from collections.abc import Iterable, MutableMapping, MutableSequence, Sequence
from typing import Self, TypeVar, overload

M = TypeVar("M")

class ProtobufMessage:
    @classmethod
    def FromString(cls, data: bytes) -> Self: ...
    def SerializeToString(self) -> bytes: ...
    def HasField(self, name: str) -> bool: ...
    def ClearField(self, name: str) -> None: ...
    def WhichOneof(self, name: str) -> str | None: ...
    def CopyFrom(self, other: Self) -> None: ...
    def MergeFrom(self, other: Self) -> None: ...

class Repeated(Sequence[M]):
    def add(self) -> M: ...
    def append(self, message: M) -> None: ...
    def extend(self, messages: Iterable[M]) -> None: ...
    @overload
    def __getitem__(self, at: int) -> M: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[M]: ...
    def __len__(self) -> int: ...

class Ts(ProtobufMessage):
    seconds: int
    nanos: int
    def __init__(self, *, seconds: int = ..., nanos: int = ...) -> None: ...

class Dur(ProtobufMessage):
    seconds: int
    nanos: int
    def __init__(self, *, seconds: int = ..., nanos: int = ...) -> None: ...

class Status(ProtobufMessage):
    code: int
    message: str
    def __init__(
        self,
        *,
        code: int = ...,
        message: str = ...,
    ) -> None: ...

class Resource(ProtobufMessage):
    resource_namespace: str
    name: str
    def __init__(
        self,
        *,
        resource_namespace: str = ...,
        name: str = ...,
    ) -> None: ...

class FilterExpression(ProtobufMessage):
    type: int
    expression: str
    def __init__(
        self,
        *,
        type: int = ...,
        expression: str = ...,
    ) -> None: ...

class SubscriptionEntry(ProtobufMessage):
    topic: Resource
    expression: FilterExpression
    def __init__(
        self,
        *,
        topic: Resource = ...,
        expression: FilterExpression = ...,
    ) -> None: ...

class Address(ProtobufMessage):
    host: str
    port: int
    def __init__(
        self,
        *,
        host: str = ...,
        port: int = ...,
    ) -> None: ...

class Endpoints(ProtobufMessage):
    scheme: int
    addresses: Repeated[Address]
    def __init__(
        self,
        *,
        scheme: int = ...,
        addresses: Iterable[Address] = ...,
    ) -> None: ...

class Broker(ProtobufMessage):
    name: str
    id: int
    endpoints: Endpoints
    def __init__(
        self,
        *,
        name: str = ...,
        id: int = ...,
        endpoints: Endpoints = ...,
    ) -> None: ...

class MessageQueue(ProtobufMessage):
    topic: Resource
    id: int
    permission: int
    broker: Broker
    accept_message_types: MutableSequence[int]
    def __init__(
        self,
        *,
        topic: Resource = ...,
        id: int = ...,
        permission: int = ...,
        broker: Broker = ...,
        accept_message_types: Iterable[int] = ...,
    ) -> None: ...

class Assignment(ProtobufMessage):
    message_queue: MessageQueue
    def __init__(
        self,
        *,
        message_queue: MessageQueue = ...,
    ) -> None: ...

class Digest(ProtobufMessage):
    type: int
    checksum: str
    def __init__(
        self,
        *,
        type: int = ...,
        checksum: str = ...,
    ) -> None: ...

class DeadLetterQueue(ProtobufMessage):
    topic: str
    message_id: str
    def __init__(
        self,
        *,
        topic: str = ...,
        message_id: str = ...,
    ) -> None: ...

class Message(ProtobufMessage):
    topic: Resource
    user_properties: MutableMapping[str, str]
    system_properties: SystemProperties
    body: bytes
    def __init__(
        self,
        *,
        topic: Resource = ...,
        user_properties: MutableMapping[str, str] = ...,
        system_properties: SystemProperties = ...,
        body: bytes = ...,
    ) -> None: ...

class SystemProperties(ProtobufMessage):
    tag: str
    keys: MutableSequence[str]
    message_id: str
    body_digest: Digest
    body_encoding: int
    message_type: int
    born_timestamp: Ts
    born_host: str
    store_timestamp: Ts
    store_host: str
    delivery_timestamp: Ts
    receipt_handle: str
    queue_id: int
    queue_offset: int
    invisible_duration: Dur
    delivery_attempt: int
    message_group: str
    trace_context: str
    orphaned_transaction_recovery_duration: Dur
    dead_letter_queue: DeadLetterQueue
    def __init__(
        self,
        *,
        tag: str = ...,
        keys: Iterable[str] = ...,
        message_id: str = ...,
        body_digest: Digest = ...,
        body_encoding: int = ...,
        message_type: int = ...,
        born_timestamp: Ts = ...,
        born_host: str = ...,
        store_timestamp: Ts = ...,
        store_host: str = ...,
        delivery_timestamp: Ts = ...,
        receipt_handle: str = ...,
        queue_id: int = ...,
        queue_offset: int = ...,
        invisible_duration: Dur = ...,
        delivery_attempt: int = ...,
        message_group: str = ...,
        trace_context: str = ...,
        orphaned_transaction_recovery_duration: Dur = ...,
        dead_letter_queue: DeadLetterQueue = ...,
    ) -> None: ...

class RetryPolicy(ProtobufMessage):
    max_attempts: int
    exponential_backoff: ExponentialBackoff
    customized_backoff: CustomizedBackoff
    def __init__(
        self,
        *,
        max_attempts: int = ...,
        exponential_backoff: ExponentialBackoff = ...,
        customized_backoff: CustomizedBackoff = ...,
    ) -> None: ...

class ExponentialBackoff(ProtobufMessage):
    initial: Dur
    max: Dur
    multiplier: float
    def __init__(
        self,
        *,
        initial: Dur = ...,
        max: Dur = ...,
        multiplier: float = ...,
    ) -> None: ...

class CustomizedBackoff(ProtobufMessage):
    next: Repeated[Dur]
    def __init__(
        self,
        *,
        next: Iterable[Dur] = ...,
    ) -> None: ...

class UA(ProtobufMessage):
    language: int
    version: str
    platform: str
    hostname: str
    def __init__(
        self,
        *,
        language: int = ...,
        version: str = ...,
        platform: str = ...,
        hostname: str = ...,
    ) -> None: ...

class Metric(ProtobufMessage):
    on: bool
    endpoints: Endpoints
    def __init__(
        self,
        *,
        on: bool = ...,
        endpoints: Endpoints = ...,
    ) -> None: ...

class Publishing(ProtobufMessage):
    topics: Repeated[Resource]
    max_body_size: int
    validate_message_type: bool
    def __init__(
        self,
        *,
        topics: Iterable[Resource] = ...,
        max_body_size: int = ...,
        validate_message_type: bool = ...,
    ) -> None: ...

class Subscription(ProtobufMessage):
    group: Resource
    subscriptions: Repeated[SubscriptionEntry]
    fifo: bool
    receive_batch_size: int
    long_polling_timeout: Dur
    def __init__(
        self,
        *,
        group: Resource = ...,
        subscriptions: Iterable[SubscriptionEntry] = ...,
        fifo: bool = ...,
        receive_batch_size: int = ...,
        long_polling_timeout: Dur = ...,
    ) -> None: ...

class Settings(ProtobufMessage):
    client_type: int
    access_point: Endpoints
    backoff_policy: RetryPolicy
    request_timeout: Dur
    user_agent: UA
    metric: Metric
    publishing: Publishing
    subscription: Subscription
    def __init__(
        self,
        *,
        client_type: int = ...,
        access_point: Endpoints = ...,
        backoff_policy: RetryPolicy = ...,
        request_timeout: Dur = ...,
        user_agent: UA = ...,
        metric: Metric = ...,
        publishing: Publishing = ...,
        subscription: Subscription = ...,
    ) -> None: ...

class QueryRouteRequest(ProtobufMessage):
    topic: Resource
    endpoints: Endpoints
    def __init__(
        self,
        *,
        topic: Resource = ...,
        endpoints: Endpoints = ...,
    ) -> None: ...

class QueryRouteResponse(ProtobufMessage):
    status: Status
    message_queues: Repeated[MessageQueue]
    def __init__(
        self,
        *,
        status: Status = ...,
        message_queues: Iterable[MessageQueue] = ...,
    ) -> None: ...

class HeartbeatRequest(ProtobufMessage):
    group: Resource
    client_type: int
    def __init__(
        self,
        *,
        group: Resource = ...,
        client_type: int = ...,
    ) -> None: ...

class HeartbeatResponse(ProtobufMessage):
    status: Status
    def __init__(
        self,
        *,
        status: Status = ...,
    ) -> None: ...

class SendMessageRequest(ProtobufMessage):
    messages: Repeated[Message]
    def __init__(
        self,
        *,
        messages: Iterable[Message] = ...,
    ) -> None: ...

class SendMessageResponse(ProtobufMessage):
    status: Status
    entries: Repeated[SendResultEntry]
    def __init__(
        self,
        *,
        status: Status = ...,
        entries: Iterable[SendResultEntry] = ...,
    ) -> None: ...

class SendResultEntry(ProtobufMessage):
    status: Status
    message_id: str
    transaction_id: str
    offset: int
    recall_handle: str
    def __init__(
        self,
        *,
        status: Status = ...,
        message_id: str = ...,
        transaction_id: str = ...,
        offset: int = ...,
        recall_handle: str = ...,
    ) -> None: ...

class QueryAssignmentRequest(ProtobufMessage):
    topic: Resource
    group: Resource
    endpoints: Endpoints
    def __init__(
        self,
        *,
        topic: Resource = ...,
        group: Resource = ...,
        endpoints: Endpoints = ...,
    ) -> None: ...

class QueryAssignmentResponse(ProtobufMessage):
    status: Status
    assignments: Repeated[Assignment]
    def __init__(
        self,
        *,
        status: Status = ...,
        assignments: Iterable[Assignment] = ...,
    ) -> None: ...

class ReceiveMessageRequest(ProtobufMessage):
    group: Resource
    message_queue: MessageQueue
    filter_expression: FilterExpression
    batch_size: int
    invisible_duration: Dur
    auto_renew: bool
    long_polling_timeout: Dur
    attempt_id: str
    def __init__(
        self,
        *,
        group: Resource = ...,
        message_queue: MessageQueue = ...,
        filter_expression: FilterExpression = ...,
        batch_size: int = ...,
        invisible_duration: Dur = ...,
        auto_renew: bool = ...,
        long_polling_timeout: Dur = ...,
        attempt_id: str = ...,
    ) -> None: ...

class ReceiveMessageResponse(ProtobufMessage):
    status: Status
    message: Message
    delivery_timestamp: Ts
    def __init__(
        self,
        *,
        status: Status = ...,
        message: Message = ...,
        delivery_timestamp: Ts = ...,
    ) -> None: ...

class AckMessageRequest(ProtobufMessage):
    group: Resource
    topic: Resource
    entries: Repeated[AckMessageEntry]
    def __init__(
        self,
        *,
        group: Resource = ...,
        topic: Resource = ...,
        entries: Iterable[AckMessageEntry] = ...,
    ) -> None: ...

class AckMessageEntry(ProtobufMessage):
    message_id: str
    receipt_handle: str
    def __init__(
        self,
        *,
        message_id: str = ...,
        receipt_handle: str = ...,
    ) -> None: ...

class AckMessageResponse(ProtobufMessage):
    status: Status
    entries: Repeated[AckMessageResultEntry]
    def __init__(
        self,
        *,
        status: Status = ...,
        entries: Iterable[AckMessageResultEntry] = ...,
    ) -> None: ...

class AckMessageResultEntry(ProtobufMessage):
    message_id: str
    receipt_handle: str
    status: Status
    def __init__(
        self,
        *,
        message_id: str = ...,
        receipt_handle: str = ...,
        status: Status = ...,
    ) -> None: ...

class ForwardMessageToDeadLetterQueueRequest(ProtobufMessage):
    group: Resource
    topic: Resource
    receipt_handle: str
    message_id: str
    delivery_attempt: int
    max_delivery_attempts: int
    def __init__(
        self,
        *,
        group: Resource = ...,
        topic: Resource = ...,
        receipt_handle: str = ...,
        message_id: str = ...,
        delivery_attempt: int = ...,
        max_delivery_attempts: int = ...,
    ) -> None: ...

class ForwardMessageToDeadLetterQueueResponse(ProtobufMessage):
    status: Status
    def __init__(
        self,
        *,
        status: Status = ...,
    ) -> None: ...

class EndTransactionRequest(ProtobufMessage):
    topic: Resource
    message_id: str
    transaction_id: str
    resolution: int
    source: int
    trace_context: str
    def __init__(
        self,
        *,
        topic: Resource = ...,
        message_id: str = ...,
        transaction_id: str = ...,
        resolution: int = ...,
        source: int = ...,
        trace_context: str = ...,
    ) -> None: ...

class EndTransactionResponse(ProtobufMessage):
    status: Status
    def __init__(
        self,
        *,
        status: Status = ...,
    ) -> None: ...

class ThreadStackTrace(ProtobufMessage):
    nonce: str
    thread_stack_trace: str
    def __init__(
        self,
        *,
        nonce: str = ...,
        thread_stack_trace: str = ...,
    ) -> None: ...

class VerifyMessageResult(ProtobufMessage):
    nonce: str
    def __init__(
        self,
        *,
        nonce: str = ...,
    ) -> None: ...

class RecoverOrphanedTransactionCommand(ProtobufMessage):
    message: Message
    transaction_id: str
    def __init__(
        self,
        *,
        message: Message = ...,
        transaction_id: str = ...,
    ) -> None: ...

class PrintThreadStackTraceCommand(ProtobufMessage):
    nonce: str
    def __init__(
        self,
        *,
        nonce: str = ...,
    ) -> None: ...

class VerifyMessageCommand(ProtobufMessage):
    nonce: str
    message: Message
    def __init__(
        self,
        *,
        nonce: str = ...,
        message: Message = ...,
    ) -> None: ...

class TelemetryCommand(ProtobufMessage):
    status: Status
    settings: Settings
    thread_stack_trace: ThreadStackTrace
    verify_message_result: VerifyMessageResult
    recover_orphaned_transaction_command: RecoverOrphanedTransactionCommand
    print_thread_stack_trace_command: PrintThreadStackTraceCommand
    verify_message_command: VerifyMessageCommand
    def __init__(
        self,
        *,
        status: Status = ...,
        settings: Settings = ...,
        thread_stack_trace: ThreadStackTrace = ...,
        verify_message_result: VerifyMessageResult = ...,
        recover_orphaned_transaction_command: RecoverOrphanedTransactionCommand = ...,
        print_thread_stack_trace_command: PrintThreadStackTraceCommand = ...,
        verify_message_command: VerifyMessageCommand = ...,
    ) -> None: ...

class NotifyClientTerminationRequest(ProtobufMessage):
    group: Resource
    def __init__(
        self,
        *,
        group: Resource = ...,
    ) -> None: ...

class NotifyClientTerminationResponse(ProtobufMessage):
    status: Status
    def __init__(
        self,
        *,
        status: Status = ...,
    ) -> None: ...

class ChangeInvisibleDurationRequest(ProtobufMessage):
    group: Resource
    topic: Resource
    receipt_handle: str
    invisible_duration: Dur
    message_id: str
    def __init__(
        self,
        *,
        group: Resource = ...,
        topic: Resource = ...,
        receipt_handle: str = ...,
        invisible_duration: Dur = ...,
        message_id: str = ...,
    ) -> None: ...

class ChangeInvisibleDurationResponse(ProtobufMessage):
    status: Status
    receipt_handle: str
    def __init__(
        self,
        *,
        status: Status = ...,
        receipt_handle: str = ...,
    ) -> None: ...

class RecallMessageRequest(ProtobufMessage):
    topic: Resource
    recall_handle: str
    def __init__(
        self,
        *,
        topic: Resource = ...,
        recall_handle: str = ...,
    ) -> None: ...

class RecallMessageResponse(ProtobufMessage):
    status: Status
    message_id: str
    def __init__(
        self,
        *,
        status: Status = ...,
        message_id: str = ...,
    ) -> None: ...
