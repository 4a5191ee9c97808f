"""Reads RocketMQ-style properties files into frozen config dataclasses.

A config class is a frozen dataclass whose fields are made by `setting()`: default, help, unit and allowed range stand
on one line. The key in the file is the field's name in camelCase, or `key=` where RocketMQ's own spelling is irregular;
old spellings are `aliases`. A wrong value stops the start with an error that names the key, the value, the line and the
allowed values.

A key of a file is either used, or known to RocketMQ but without effect here (a warning), or unknown (an error that
names the nearest known key).
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import os
import re
import stat
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from downrange.model.errors import MQError

T = TypeVar("T")

_METADATA = "downrange.setting"
_OTHERS = stat.S_IRGRP | stat.S_IROTH
MASK = "******"
"""Stands for a secret where settings are shown."""
_SECRET_WORDS = ("password", "secret", "credential", "token")


class ConfigError(MQError):
    """A configuration that cannot be used. The text names the key, the value and the line of the file."""


@dataclass(frozen=True, slots=True)
class Property:
    """The value of one `key=value` line, and the file and line number it comes from."""

    value: str
    source: str = ""
    line: int | None = None

    @property
    def place(self) -> str:
        if not self.source:
            return ""
        return f" ({self.source})" if self.line is None else f" ({self.source}, line {self.line})"


@dataclass(frozen=True, slots=True)
class Setting:
    """The description of one key, used to read its value and to write the reference page."""

    key: str
    field: str
    type: Any
    default: Any
    help: str
    unit: str | None
    minimum: float | None
    maximum: float | None
    aliases: tuple[str, ...]
    is_secret: bool

    def allowed(self) -> str:
        """The values this key takes, in words."""
        kind = self.type
        if kind is bool:
            return "true or false"
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            return " or ".join(str(member.value) for member in kind)
        if kind in (int, float):
            words = "a whole number" if kind is int else "a number"
            if self.minimum is not None and self.maximum is not None:
                words += f" from {self.minimum} to {self.maximum}"
            elif self.minimum is not None:
                words += f" of at least {self.minimum}"
            elif self.maximum is not None:
                words += f" of at most {self.maximum}"
            return words
        return "a path" if kind is Path else "text"


def setting(
    default: Any,
    help: str,
    *,
    unit: str | None = None,
    key: str | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    aliases: tuple[str, ...] = (),
    is_secret: bool = False,
) -> Any:
    """A dataclass field that is also a key of the configuration file. A secret value is never shown."""
    about = {
        "key": key, "help": help, "unit": unit, "minimum": minimum, "maximum": maximum, "aliases": aliases,
        "is_secret": is_secret,
    }  # fmt: skip
    return dataclasses.field(default=default, metadata={_METADATA: about}, repr=not is_secret)


def camel_case(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(word.capitalize() for word in rest)


_settings: dict[type[Any], tuple[Setting, ...]] = {}


def settings_of(config_class: type[Any]) -> tuple[Setting, ...]:
    """The keys of a config class, in the order they were declared. Type hints take long: they are read once."""
    if config_class not in _settings:
        _settings[config_class] = tuple(_declared(config_class))
    return _settings[config_class]


def _declared(config_class: type[Any]) -> Iterator[Setting]:
    hints = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        about = field.metadata.get(_METADATA)
        if about is not None:
            about = {**about, "key": about["key"] or camel_case(field.name)}
            kind = _without_none(hints[field.name])
            yield Setting(field=field.name, type=kind, default=field.default, **about)


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (inner,) = (part for part in typing.get_args(hint) if part is not type(None))
        return inner
    return hint


def configure(config_class: type[T], properties: Mapping[str, Property]) -> T:
    """Build `config_class` from the keys it knows; `check_known` finds keys that no config class knows."""
    values = {}
    for known in settings_of(config_class):
        for key in (known.key, *known.aliases):
            if key in properties:
                values[known.field] = parse_value(known, key, properties[key])
                break
    return config_class(**values)


def parse_value(known: Setting, key: str, given: Property) -> Any:
    """Convert `given` to the type of the setting; a ConfigError names the allowed values if it does not fit."""
    text = given.value.strip()
    kind = known.type
    try:
        if kind is bool:
            value: Any = {"true": True, "false": False}[text.lower()]
        else:
            value = Path(text).expanduser() if kind is Path else kind(text)
        too_small = known.minimum is not None and value < known.minimum
        too_large = known.maximum is not None and value > known.maximum
        if too_small or too_large:
            raise ValueError
    except (ValueError, KeyError):
        raise ConfigError(f"{key}={text}: expected {known.allowed()}{given.place}") from None
    return value


def check_known(
    properties: Mapping[str, Property], config_classes: Iterable[type[Any]], without_effect: Iterable[str] = ()
) -> list[str]:
    """Refuse unknown keys; return a warning for each key of RocketMQ that has no effect here."""
    known: set[str] = set()
    for config_class in config_classes:
        for one in settings_of(config_class):
            known.update((one.key, *one.aliases))
    idle = set(without_effect)
    warnings = []
    for key, given in properties.items():
        if key in known:
            continue
        if key in idle:
            warnings.append(f"{key} is known to RocketMQ but has no effect here{given.place}")
            continue
        nearest = difflib.get_close_matches(key, sorted(known | idle), n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        raise ConfigError(f"unknown key {key}{hint}{given.place}")
    return warnings


def to_properties(config: Any) -> dict[str, str]:
    """The configuration as RocketMQ prints it: keys of the file, values as text, without settings that are None.

    Secrets are masked: operators and their tools see this table.
    """
    table = {}
    for known in settings_of(type(config)):
        value = getattr(config, known.field)
        if value is not None:
            table[known.key] = MASK if known.is_secret and value else format_value(value)
    return table


def masked(table: Mapping[str, str]) -> dict[str, str]:
    """Settings of any server, without the values of keys that may be secret: RocketMQ's brokers show theirs."""
    return {key: MASK if value and _may_be_secret(key) else value for key, value in table.items()}


def _may_be_secret(key: str) -> bool:
    return key == "initAuthenticationUser" or any(word in key.lower() for word in _SECRET_WORDS)


def format_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, enum.Enum):
        return str(value.value)
    return str(value)


def readable_secrets(
    properties: Mapping[str, Property],
    config_classes: Iterable[type[Any]],
    secret_files: Mapping[str, Path | None] | None = None,
) -> list[str]:
    """A warning for each file with secrets that other users of this machine may read.

    `secret_files` has files that are a secret as a whole, by the key that names them.
    """
    keys = {one.key for config_class in config_classes for one in settings_of(config_class) if one.is_secret}
    found: dict[Path, list[str]] = {}
    for key in sorted(keys & properties.keys()):
        if properties[key].line is not None:
            found.setdefault(Path(properties[key].source), []).append(key)
    for key, path in (secret_files or {}).items():
        if path is not None:
            found.setdefault(path, []).append(key)
    warnings = (secret_warning(path, " and ".join(names)) for path, names in found.items())
    return [warning for warning in warnings if warning is not None]


def secret_warning(path: Path, secrets: str) -> str | None:
    """A warning that names a file with secrets and what to do, if other users of this machine may read it."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return None
    return f"others can read {secrets} in {path}: chmod 600 {path}" if mode & _OTHERS else None


def read_properties(path: Path) -> dict[str, Property]:
    """Read a Java properties file."""
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read configuration file {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read configuration file {path}: it is not UTF-8 text") from None
    return parse_properties(text, str(path))


_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
# The characters Java accepts as blanks between key and value. Only \n, \r and \r\n end a line.
_BLANK = " \t\f"
_KEY_VALUE = re.compile(r"((?:\\.|[^\\=: \t\f])*)[ \t\f]*[=:]?[ \t\f]*(.*)", re.DOTALL)


def parse_properties(text: str, source: str = "") -> dict[str, Property]:
    """Read Java's properties format with comments, continued lines and escapes. The last line of a key wins."""
    properties: dict[str, Property] = {}
    pending = ""
    pending_line: int | None = None
    for number, raw in enumerate(re.split(r"\r\n|\n|\r", text), start=1):
        line = raw.lstrip(_BLANK)
        if pending_line is None and (not line or line[0] in "#!"):
            continue
        start_line = pending_line or number
        line = pending + line
        trailing = len(line) - len(line.rstrip("\\"))
        if trailing % 2:
            pending, pending_line = line[:-1], start_line
            continue
        pending, pending_line = "", None
        _put(properties, line, source, start_line)
    if pending_line is not None:
        _put(properties, pending, source, pending_line)
    return properties


def _put(properties: dict[str, Property], line: str, source: str, number: int) -> None:
    match = _KEY_VALUE.fullmatch(line)
    if match is None or not match.group(1):
        raise ConfigError(f"not a key=value line: {line.strip()!r}{Property('', source, number).place}")
    key, value = match.groups()
    place = Property("", source, number).place
    properties[_unescape(key, place)] = Property(_unescape(value, place), source, number)


def _unescape(text: str, place: str) -> str:
    if "\\" not in text:
        return text

    def one(match: re.Match[str]) -> str:
        escape = match.group(1)
        if escape[0] == "u":
            if len(escape) != 5:
                raise ConfigError(f"bad \\u escape in {text!r}{place}")
            return chr(int(escape[1:], 16))
        return _ESCAPES.get(escape, escape)

    return re.sub(r"\\(u[0-9a-fA-F]{4}|u|.)", one, text, flags=re.DOTALL)


def format_properties(table: Mapping[str, str]) -> str:
    """Write `key=value` lines that `parse_properties` (and Java) reads back."""
    return "".join(f"{key}={_escape(value)}\n" for key, value in table.items())


def _escape(value: str) -> str:
    escaped = (
        value.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t").replace("\f", "\\f")
    )
    return "\\" + escaped if escaped[:1] == " " else escaped


# Only the functions below read environment variables.


def namesrv_addresses(environment: Mapping[str, str] = os.environ) -> str | None:
    """The name servers that NAMESRV_ADDR names."""
    return environment.get("NAMESRV_ADDR") or None


def user_password(environment: Mapping[str, str] = os.environ) -> str | None:
    """The password that ROCKETMQ_USER_PASSWORD has for a user that a command makes or changes."""
    return environment.get("ROCKETMQ_USER_PASSWORD") or None


def wants_pure_python(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether DOWNRANGE_PURE asks for the Python functions, even where compiled ones were built."""
    return environment.get("DOWNRANGE_PURE", "") not in ("", "0")


def client_tls_file(environment: Mapping[str, str] = os.environ) -> Path | None:
    """The file with the `tls.client` keys that ROCKETMQ_TLS_CONFIG_FILE names."""
    text = environment.get("ROCKETMQ_TLS_CONFIG_FILE")
    return Path(text).expanduser() if text else None


def wants_client_tls(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether ROCKETMQ_TLS_ENABLE asks clients to use TLS; it does so by default if a file for it is named."""
    text = environment.get("ROCKETMQ_TLS_ENABLE", "").strip().lower()
    if text not in ("", "true", "false"):
        raise ConfigError(f"ROCKETMQ_TLS_ENABLE={text}: expected true or false")
    return text == "true" or (not text and client_tls_file(environment) is not None)


class Credentials(TypedDict):
    """The keys with which a client signs its requests to a cluster with access control."""

    access_key: str | None
    secret_key: str | None
    security_token: str | None


def tools_file(environment: Mapping[str, str] = os.environ) -> Path | None:
    """The file in which RocketMQ's tools find their account: `conf/tools.yml` below ROCKETMQ_HOME."""
    home = environment.get("ROCKETMQ_HOME")
    return Path(home, "conf", "tools.yml") if home else None


def credentials(environment: Mapping[str, str] = os.environ) -> Credentials:
    """The keys in the environment variables; None for those that are not set."""
    return Credentials(
        access_key=environment.get("ROCKETMQ_ACCESS_KEY") or None,
        secret_key=environment.get("ROCKETMQ_SECRET_KEY") or None,
        security_token=environment.get("ROCKETMQ_SECURITY_TOKEN") or None,
    )
