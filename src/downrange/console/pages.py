"""What a view returns, and how it becomes HTML or JSON: both come from one set of data."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from enum import Enum
from importlib import resources
from typing import Any, Final

from jinja2 import Environment, FunctionLoader, StrictUndefined
from starlette.responses import Response

from downrange.console import formats
from downrange.console.languages import ENGLISH, LANGUAGES, Language
from downrange.console.static_files import StaticFiles
from downrange.console.words import word
from downrange.model.text import Text, plural

# Numbers of messages and places in the log grow beyond what JavaScript can tell apart: they are texts in JSON.
_TEXTS_IN_JSON: Final = frozenset(
    {
        *("committed", "end", "first", "offset", "target", "max_offset", "min_offset", "physical_offset"),
        *("before", "after", "next"),
    }
)


@dataclass(frozen=True, slots=True)
class Page:
    """One answer: the template, the data for it and for `.json`, the title, and the command that does the same."""

    template: str
    title: Text
    data: dict[str, Any] = field(default_factory=dict)
    command: str | None = None
    status: int = 200
    chrome: dict[str, Any] = field(default_factory=dict)
    """What only HTML needs: choices of forms, links."""


class Templates:
    """The templates of this package. What they print is escaped, and hidden characters are shown."""

    def __init__(self, static: StaticFiles) -> None:
        self._environment = Environment(
            loader=FunctionLoader(_source),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=self._finalized,
        )
        self._language = ENGLISH
        self._environment.globals.update({"static": static.address, "_": Text, "plural": plural})
        self._environment.filters.update({"word": word, "said": self._said})
        for name in ("number", "rate", "percent", "size", "span", "iso"):
            self._environment.filters[name] = getattr(formats, name)

    def warm(self) -> None:
        """Compile all templates and read the catalogue: the first page of each kind is as quick as the others."""
        for language in LANGUAGES.values():
            _ = language.patterns
        for file in (resources.files("downrange.console") / "templates").iterdir():
            self._environment.get_template(file.name)

    def render(self, template: str, values: Mapping[str, Any], language: Language) -> str:
        self._language = language  # rendering never waits: no other page comes between
        return self._environment.get_template(template).render(**values)

    def _finalized(self, value: object) -> object:
        """What a page prints: sentences in the language of the reader."""
        if value is None:
            return ""
        if isinstance(value, Text):
            return self._language.html(value)
        return formats.visible(value) if type(value) is str else value

    def _said(self, text: str) -> str:
        """A sentence as plain text, for data that scripts read."""
        return self._language.say(text)


def _source(name: str) -> str | None:
    file = resources.files("downrange.console") / "templates" / name
    return file.read_text("utf-8") if file.is_file() else None


def to_json(value: Any, name: str = "") -> Any:
    """Data as JSON has it: places in queues and logs are texts."""
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, int) and not isinstance(value, bool) and name in _TEXTS_IN_JSON:
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return to_json(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): to_json(one, str(key)) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json(one, name) for one in value]
    if isinstance(value, float) and value != value:
        return None
    return value


def json_text(value: Any) -> str:
    return json.dumps(to_json(value), ensure_ascii=False, default=str)


def body_response(text: str, kind: str, request_headers: Mapping[str, str], status: int = 200) -> Response:
    """A page with its tag, so that a browser that has it already gets nothing; compressed where that is worth it."""
    content = text.encode("utf-8", "backslashreplace")
    tag = f'W/"{hashlib.blake2b(content, digest_size=12).hexdigest()}"'
    headers = {"etag": tag, "cache-control": "private, no-cache", "vary": "accept-encoding, accept-language, cookie"}
    if status == 200 and request_headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    if len(content) > 1400 and "gzip" in request_headers.get("accept-encoding", ""):
        content = gzip.compress(content, 4, mtime=0)
        headers["content-encoding"] = "gzip"
    return Response(content, status, headers, media_type=kind)
