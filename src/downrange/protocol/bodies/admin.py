"""The configuration of servers. Settings travel as properties text, not as JSON; runtime figures as a `KVTable`."""

from __future__ import annotations

from downrange.protocol.bodies.body import decode_body, encode_body
from downrange.protocol.bodies.data_version import DataVersion
from downrange.protocol.bodies.fields import Header


class GetBrokerConfigResponse(Header, frozen=True):
    """The answer to request 26: the body is the properties text, `version` the JSON of a `DataVersion`."""

    version: str

    @classmethod
    def of(cls, version: DataVersion) -> GetBrokerConfigResponse:
        return cls(encode_body(version).decode())

    @property
    def data_version(self) -> DataVersion:
        return decode_body(DataVersion, self.version.encode())
