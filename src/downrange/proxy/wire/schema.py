"""The protobuf messages of the gRPC protocol (package apache.rocketmq.v2), and the classes made from them.

    Name  1 field:type  2 other:type?  3 many:type[]  4 by_key:map  | 5 one_of:type  6 these:type

`?` is a field whose presence counts, `[]` one that repeats, `map` texts by text; of the fields behind `|` a message has
one at most. `Ts` and `Dur` are google.protobuf's Timestamp and Duration. Fields that are not named here are skipped
when a message is read, as protobuf has it.

The classes live in a pool of their own, so that a process may use the official client beside them.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, duration_pb2, message_factory, timestamp_pb2

PACKAGE: Final = "apache.rocketmq.v2"
SERVICE: Final = f"{PACKAGE}.MessagingService"

MESSAGES: Final = """
Status                1 code:Code  2 message:string
Resource              1 resource_namespace:string  2 name:string
FilterExpression      1 type:FilterType  2 expression:string
SubscriptionEntry     1 topic:Resource  2 expression:FilterExpression
Address               1 host:string  2 port:int32
Endpoints             1 scheme:AddressScheme  2 addresses:Address[]
Broker                1 name:string  2 id:int32  3 endpoints:Endpoints
MessageQueue          1 topic:Resource  2 id:int32  3 permission:Permission  4 broker:Broker
                      5 accept_message_types:MessageType[]
Assignment            1 message_queue:MessageQueue
Digest                1 type:DigestType  2 checksum:string
DeadLetterQueue       1 topic:string  2 message_id:string
Message               1 topic:Resource  2 user_properties:map  3 system_properties:SystemProperties  4 body:bytes
SystemProperties      1 tag:string?  2 keys:string[]  3 message_id:string  4 body_digest:Digest
                      5 body_encoding:Encoding  6 message_type:MessageType  7 born_timestamp:Ts  8 born_host:string
                      9 store_timestamp:Ts?  10 store_host:string  11 delivery_timestamp:Ts?  12 receipt_handle:string?
                      13 queue_id:int32  14 queue_offset:int64?  15 invisible_duration:Dur?  16 delivery_attempt:int32?
                      17 message_group:string?  18 trace_context:string?
                      19 orphaned_transaction_recovery_duration:Dur?  20 dead_letter_queue:DeadLetterQueue?
RetryPolicy           1 max_attempts:int32  | 2 exponential_backoff:ExponentialBackoff
                      3 customized_backoff:CustomizedBackoff
ExponentialBackoff    1 initial:Dur  2 max:Dur  3 multiplier:float
CustomizedBackoff     1 next:Dur[]
UA                    1 language:Language  2 version:string  3 platform:string  4 hostname:string
Metric                1 on:bool  2 endpoints:Endpoints?
Publishing            1 topics:Resource[]  2 max_body_size:int32  3 validate_message_type:bool
Subscription          1 group:Resource?  2 subscriptions:SubscriptionEntry[]  3 fifo:bool?  4 receive_batch_size:int32?
                      5 long_polling_timeout:Dur?
Settings              1 client_type:ClientType?  2 access_point:Endpoints?  3 backoff_policy:RetryPolicy?
                      4 request_timeout:Dur?  7 user_agent:UA  8 metric:Metric
                      | 5 publishing:Publishing  6 subscription:Subscription

QueryRouteRequest     1 topic:Resource  2 endpoints:Endpoints
QueryRouteResponse    1 status:Status  2 message_queues:MessageQueue[]
HeartbeatRequest      1 group:Resource?  2 client_type:ClientType
HeartbeatResponse     1 status:Status
SendMessageRequest    1 messages:Message[]
SendMessageResponse   1 status:Status  2 entries:SendResultEntry[]
SendResultEntry       1 status:Status  2 message_id:string  3 transaction_id:string  4 offset:int64
                      5 recall_handle:string
QueryAssignmentRequest   1 topic:Resource  2 group:Resource  3 endpoints:Endpoints
QueryAssignmentResponse  1 status:Status  2 assignments:Assignment[]
ReceiveMessageRequest    1 group:Resource  2 message_queue:MessageQueue  3 filter_expression:FilterExpression
                         4 batch_size:int32  5 invisible_duration:Dur?  6 auto_renew:bool  7 long_polling_timeout:Dur?
                         8 attempt_id:string?
ReceiveMessageResponse   | 1 status:Status  2 message:Message  3 delivery_timestamp:Ts
AckMessageRequest        1 group:Resource  2 topic:Resource  3 entries:AckMessageEntry[]
AckMessageEntry          1 message_id:string  2 receipt_handle:string
AckMessageResponse       1 status:Status  2 entries:AckMessageResultEntry[]
AckMessageResultEntry    1 message_id:string  2 receipt_handle:string  3 status:Status
ForwardMessageToDeadLetterQueueRequest   1 group:Resource  2 topic:Resource  3 receipt_handle:string
                                         4 message_id:string  5 delivery_attempt:int32  6 max_delivery_attempts:int32
ForwardMessageToDeadLetterQueueResponse  1 status:Status
EndTransactionRequest    1 topic:Resource  2 message_id:string  3 transaction_id:string
                         4 resolution:TransactionResolution  5 source:TransactionSource  6 trace_context:string
EndTransactionResponse   1 status:Status
ThreadStackTrace         1 nonce:string  2 thread_stack_trace:string?
VerifyMessageResult      1 nonce:string
RecoverOrphanedTransactionCommand  1 message:Message  2 transaction_id:string
PrintThreadStackTraceCommand       1 nonce:string
VerifyMessageCommand     1 nonce:string  2 message:Message
TelemetryCommand         1 status:Status?  | 2 settings:Settings  3 thread_stack_trace:ThreadStackTrace
                         4 verify_message_result:VerifyMessageResult
                         5 recover_orphaned_transaction_command:RecoverOrphanedTransactionCommand
                         6 print_thread_stack_trace_command:PrintThreadStackTraceCommand
                         7 verify_message_command:VerifyMessageCommand
NotifyClientTerminationRequest   1 group:Resource?
NotifyClientTerminationResponse  1 status:Status
ChangeInvisibleDurationRequest   1 group:Resource  2 topic:Resource  3 receipt_handle:string  4 invisible_duration:Dur
                                 5 message_id:string
ChangeInvisibleDurationResponse  1 status:Status  2 receipt_handle:string
RecallMessageRequest     1 topic:Resource  2 recall_handle:string
RecallMessageResponse    1 status:Status  2 message_id:string
"""

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS: Final = {
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "bool": _Field.TYPE_BOOL,
    "float": _Field.TYPE_FLOAT,
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
}
ENUMS: Final = frozenset(
    {
        "AddressScheme", "ClientType", "Code", "DigestType", "Encoding", "FilterType", "Language", "MessageType",
        "Permission", "TransactionResolution", "TransactionSource",
    }
)  # fmt: skip
"""Numbers on the wire; enums.py has their names."""
_WELL_KNOWN: Final = {"Ts": "google.protobuf.Timestamp", "Dur": "google.protobuf.Duration"}


def definitions(text: str) -> dict[str, list[str]]:
    """The words behind each name; a line that begins with a blank goes on with the definition above it."""
    found: dict[str, list[str]] = {}
    words: list[str] = []
    for line in text.splitlines():
        if line.startswith(" "):
            words += line.split()
        elif line:
            name, *rest = line.split()
            words = found[name] = rest
    return found


def message_classes() -> dict[str, Any]:
    """The class of each message by its name."""
    file = descriptor_pb2.FileDescriptorProto(name="downrange/grpc.proto", package=PACKAGE, syntax="proto3")
    file.dependency.extend(("google/protobuf/timestamp.proto", "google/protobuf/duration.proto"))
    messages = definitions(MESSAGES)
    for name, words in messages.items():
        _add_fields(file.message_type.add(name=name), words)
    pool = descriptor_pool.DescriptorPool()
    for known in (timestamp_pb2, duration_pb2):
        pool.AddSerializedFile(known.DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(file.SerializeToString())
    full_names = {**{name: f"{PACKAGE}.{name}" for name in messages}, **_WELL_KNOWN}
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(full)) for name, full in full_names.items()
    }


def _add_fields(message: descriptor_pb2.DescriptorProto, words: list[str]) -> None:
    is_one_of = False
    optional: list[descriptor_pb2.FieldDescriptorProto] = []
    rest = iter(words)
    for word in rest:
        if word == "|":
            is_one_of = True
            message.oneof_decl.add(name="kind")
            continue
        name, _, kind = next(rest).partition(":")
        field = message.field.add(name=name, number=int(word), label=_Field.LABEL_OPTIONAL)
        if kind.endswith("[]") or kind == "map":
            field.label = _Field.LABEL_REPEATED
        _set_type(message, field, kind.rstrip("[]?"))
        if is_one_of:
            field.oneof_index = 0
        elif kind.endswith("?"):
            field.proto3_optional = True
            optional.append(field)
    for field in optional:  # protobuf keeps presence in a one-of of its own, behind the true ones
        field.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{field.name}")


def _set_type(message: descriptor_pb2.DescriptorProto, field: Any, kind: str) -> None:
    if kind == "map":
        entry = message.nested_type.add(name=f"{field.name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        for number, name in enumerate(("key", "value"), start=1):
            entry.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL, type=_Field.TYPE_STRING)
        field.type = _Field.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{message.name}.{entry.name}"
    elif kind in _SCALARS:
        field.type = _SCALARS[kind]
    elif kind in ENUMS:
        field.type = _Field.TYPE_INT32
    else:
        field.type = _Field.TYPE_MESSAGE
        field.type_name = f".{_WELL_KNOWN.get(kind, f'{PACKAGE}.{kind}')}"
