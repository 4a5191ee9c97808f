"""YAML of access-control files: mappings, lists and texts, and nothing that YAML could do beyond that.

Tags, anchors and aliases are refused, so that a file can neither make objects nor grow when it is read; size and depth
are bounded. Texts stay as they are written: a secret of digits needs no quotes.
"""

from __future__ import annotations

from typing import Any, Final

import yaml

MAX_SIZE: Final = 1 << 20
"""Bytes in a file: some thousand accounts."""
_MAX_DEPTH: Final = 8
_NULLS: Final = frozenset({"", "~", "null", "Null", "NULL"})
_Loader: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml, where PyYAML was built with it

Yaml = Any
"""None, a text, a list of these, or a dict of these by text; written files have numbers and booleans, too."""


class YamlError(ValueError):
    """The text is not YAML, or uses something that access-control files must not use."""


def read_yaml(data: bytes) -> Yaml:
    """The content of a file; None for an empty one. Raises a YamlError that says what is wrong, and in which line."""
    if len(data) > MAX_SIZE:
        raise YamlError(f"more than {MAX_SIZE} bytes")
    try:
        return _Reader().read(data.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise YamlError("not UTF-8 text") from None
    except yaml.MarkedYAMLError as error:
        raise YamlError(f"not YAML: {error.problem or error.context}{_line(error.problem_mark)}") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # PyYAML lets chr() fail for some escapes
        if isinstance(error, YamlError):
            raise
        raise YamlError("not YAML: a character that is not allowed") from None


def write_yaml(content: Yaml) -> bytes:
    """The text of a file as RocketMQ lays it out. Escapes what is not ASCII: U+0085 would come back a blank."""
    text = yaml.safe_dump(content, sort_keys=False, default_flow_style=False, width=1 << 20)
    return str(text).encode()


class _Reader:
    """Builds the content from the events of YAML's parser, one after the other."""

    def __init__(self) -> None:
        self._document: list[Yaml] = []
        self._open: list[tuple[Yaml, list[Yaml]]] = []
        """The lists and mappings around the place that is read; a mapping with the members read so far."""

    def read(self, text: str) -> Yaml:
        for event in yaml.parse(text, Loader=_Loader):
            self._take(event)
        if len(self._document) > 1:
            raise YamlError("more than one YAML document")
        return self._document[0] if self._document else None

    def _take(self, event: yaml.Event) -> None:
        if getattr(event, "anchor", None) is not None:
            raise YamlError(f"anchors and aliases are not allowed{_line(event.start_mark)}")
        if getattr(event, "tag", None) is not None:
            raise YamlError(f"type tags are not allowed{_line(event.start_mark)}")
        if isinstance(event, yaml.ScalarEvent):
            is_null = event.implicit[0] and event.value in _NULLS
            self._put(None if is_null else event.value, event)
        elif isinstance(event, yaml.SequenceStartEvent | yaml.MappingStartEvent):
            if len(self._open) >= _MAX_DEPTH:
                raise YamlError(f"more than {_MAX_DEPTH} levels{_line(event.start_mark)}")
            self._open.append(([] if isinstance(event, yaml.SequenceStartEvent) else {}, []))
        elif isinstance(event, yaml.SequenceEndEvent | yaml.MappingEndEvent):
            self._put(self._open.pop()[0], event)

    def _put(self, value: Yaml, event: yaml.Event) -> None:
        if not self._open:
            self._document.append(value)
            return
        around, pending = self._open[-1]
        if isinstance(around, list):
            around.append(value)
        elif pending:
            around[pending.pop()] = value
        elif not isinstance(value, str):
            raise YamlError(f"a key must be a text{_line(event.start_mark)}")
        elif value in around:
            raise YamlError(f"a key stands there twice{_line(event.start_mark)}")
        else:
            pending.append(value)


def _line(mark: Any) -> str:
    return "" if mark is None else f" (line {mark.line + 1})"
