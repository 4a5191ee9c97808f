"""Writes messages.pyi, the types of the message classes, for type checkers: `python -m downrange.proxy.wire.stub`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from downrange.proxy.wire.schema import ENUMS, MESSAGES, definitions

_TYPES: Final = {"int32": "int", "int64": "int", "bool": "bool", "float": "float", "string": "str", "bytes": "bytes"}
_HEAD: Final = '''"""Written by stub.py from schema.py; not to be changed by hand."""

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
'''


def stub() -> str:
    """The text of messages.pyi."""
    parts = [_HEAD]
    for name, words in definitions(MESSAGES).items():
        fields = [word.partition(":")[::2] for word in words if ":" in word]
        lines = [f"class {name}(ProtobufMessage):"]
        arguments = []
        for field, kind in fields:
            base = kind.rstrip("[]?")
            type_name = "int" if base in ENUMS else _TYPES.get(base, base)
            if kind == "map":
                lines.append(f"    {field}: MutableMapping[str, str]")
                arguments.append(f"{field}: MutableMapping[str, str] = ...")
            elif kind.endswith("[]"):
                holder = "MutableSequence" if base in _TYPES or base in ENUMS else "Repeated"
                lines.append(f"    {field}: {holder}[{type_name}]")
                arguments.append(f"{field}: Iterable[{type_name}] = ...")
            else:
                lines.append(f"    {field}: {type_name}")
                arguments.append(f"{field}: {type_name} = ...")
        lines += ["    def __init__(", "        self,", "        *,", *(f"        {one}," for one in arguments)]
        lines.append("    ) -> None: ...")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    Path(__file__).with_name("messages.pyi").write_text(stub())
