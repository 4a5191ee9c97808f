"""The root of every error Downrange raises on purpose, and the whole tree: each error with the file it stands in.

MQError                                                                        model/errors.py
├── ConfigError                                                                settings.py
│   └── CompressionMissing                                                     client/compression.py
├── MessageError                                                               model/errors.py
│   ├── InvalidGroup, InvalidTopic, ForbiddenTopic, InvalidProperty            client/producer/outgoing.py
│   ├── InvalidDelayLevel, InvalidDeliveryTime, InvalidHandle, InvalidBatch    client/producer/outgoing.py
│   ├── InvalidBody                                                            client/producer/outgoing.py
│   │   └── BodyMissing, BodyTooLarge                                          client/producer/outgoing.py
│   └── NotARequest                                                            client/producer/request_reply.py
├── StoreError                                                                 model/errors.py
│   ├── CorruptRecord                                                          model/record.py
│   ├── StoreLocked, StoreCorrupt, StoreClosed, DiskFull, FlushFailed          store/errors.py
│   ├── StaleEpoch                                                             store/epochs.py
│   └── NotAStore                                                              store/check/directory.py
├── ProtocolError                                                              protocol/errors.py
│   └── LocalProtocolError, RemoteProtocolError                                protocol/errors.py
├── JavaJsonError                                                              protocol/java_json.py
├── BodyError                                                                  protocol/bodies/body.py
├── HandleError                                                                protocol/bodies/pop.py
├── FieldError                                                                 protocol/bodies/fields.py
├── SealError                                                                  protocol/sealing.py
├── BrokerError                                                                protocol/errors.py
│   ├── InternalError, SystemBusy, RequestCodeNotSupported, MessageIllegal     protocol/errors.py
│   ├── ServiceNotAvailable, NoPermission, TopicNotExist, PullOffsetMoved      protocol/errors.py
│   ├── QueryNotFound, SubscriptionParseFailed, SubscriptionNotExist           protocol/errors.py
│   ├── SubscriptionNotLatest, SubscriptionGroupNotExist, FilterDataNotExist   protocol/errors.py
│   ├── FilterDataNotLatest, ConsumerNotOnline, ConsumeMessageTimeout          protocol/errors.py
│   └── SlaveNotAvailable, FlowControl, NotLeader                              protocol/errors.py
├── TransportError                                                             transport/errors.py
│   ├── ConnectFailed, ListenFailed, ConnectionLost, RequestTimedOut           transport/errors.py
│   └── TransportClosed                                                        transport/errors.py
├── PlainAclError                                                              auth/plain_accounts.py
├── AccessRuleError                                                            auth/users.py
├── Refused, CallFailed                                                        proxy/errors.py
├── SqlError                                                                   model/sql/errors.py
├── ReplicationError                                                           broker/replication/errors.py
│   ├── SlaveAhead, SlaveTooFarBehind, LogsDiffer                              broker/replication/errors.py
│   └── LoginFailed                                                            broker/replication/login.py
├── StoreUnavailable                                                           controller/coordination.py
│   └── OutcomeUnknown                                                         controller/coordination.py
├── HttpError                                                                  controller/http_json.py
├── ClientError                                                                client/errors.py
│   ├── NoRoute                                                                client/errors.py
│   │   ├── NoMaster                                                           client/errors.py
│   │   └── DeadLettersUnreadable                                              client/dead_letters.py
│   ├── NoNameServer, BrokerNotFound, ClusterNotFound, GroupNotFound           client/errors.py
│   ├── ClientNotFound, GroupOnline, MessageNotFound, ClientClosed             client/errors.py
│   ├── TooManySends, SubscriptionConflict, NotAssigned, CommitFailed          client/errors.py
│   ├── AckFailed, PopNotSupported, NotANameServer                             client/errors.py
│   ├── SendFailed                                                             client/errors.py
│   ├── ClusterNotChosen                                                       client/admin/chosen_brokers.py
│   ├── UserNotFound                                                           client/admin/users.py
│   ├── WrongCursor                                                            client/admin/search.py
│   ├── PlanDrifted                                                            client/admin/plans.py
│   ├── PipelineNotFound                                                       client/admin/pipelines.py
│   ├── JournalDamaged                                                         client/resending.py
│   ├── ReplyTimedOut                                                          client/producer/request_reply.py
│   ├── AnswerTimedOut                                                         console/sampler.py
│   ├── BrokerSilent                                                           console/clusters.py
│   └── BrokerAway                                                             spark/brokers.py
├── NoQueue                                                                    client/producer/fault/chooser.py
├── BadAnswer                                                                  client/consumer/retry.py
├── SparkSourceError                                                           spark/errors.py
│   └── OptionError, SchemaMismatch, NothingToRead, DataLost                   spark/errors.py
├── BadPage                                                                    spark/half_message_lists.py
├── MarkersUnreadable                                                          spark/markers.py
├── NotSafelyStored, GivenUp                                                   spark/sink_sending.py
├── QueueMissing                                                               spark/mirror_sending.py
├── LakeError                                                                  spark/lake/layout.py
│   └── LakeBusy                                                               spark/lake/layout.py
├── PipelineError, PipelineFailed                                              spark/pipelines/errors.py
├── NoController                                                               broker/controller/controllers.py
├── MustRegister                                                               broker/controller/controller_requests.py
├── NotMaster                                                                  broker/controller/role_change.py
├── ConsoleCannotListen                                                        console/app.py
├── HistoryFileUnusable                                                        console/history_file.py
├── JobGone                                                                    console/jobs.py
├── PlanGone                                                                   console/plans.py
├── LoginRefused                                                               console/auth.py
├── PageRefused                                                                console/requests.py
├── UsageError                                                                 cli/options.py
├── ConsoleFailed                                                              cli/console_child.py
└── ClusterFailed                                                              cli/local_cluster.py

An error carries what its catcher needs to decide: `retriable` says whether the same call may succeed later.
"""

from __future__ import annotations


class MQError(Exception):
    """Base of all errors raised on purpose; its text is one line an operator can act on."""

    retriable: bool = False


class MessageError(MQError):
    """A message, topic or group name breaks a rule; the text says which."""


class StoreError(MQError):
    """A store, or a record of a store, cannot be read or written."""
