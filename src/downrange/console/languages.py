"""The languages of the console: which one a reader gets, and how a sentence is said in it.

The English text is the key of the catalogue; `catalogue/` has one file for each other language. JSON, commands and
the audit log stay English.
"""

from __future__ import annotations

from functools import cached_property
from importlib import resources
from typing import Final

from markupsafe import Markup, escape

from downrange.console.formats import visible
from downrange.model.text import Text

COOKIE: Final = "language"


class Language:
    """One language: `code` as in `<html lang>`, `name` as its readers write it."""

    def __init__(self, code: str, name: str) -> None:
        self.code = code
        self.name = name

    def __repr__(self) -> str:
        return f"<Language {self.code}>"

    @cached_property
    def patterns(self) -> dict[str, str]:
        """English pattern -> pattern in this language; empty for English. Read when the first page needs it."""
        file = resources.files("downrange.console") / "catalogue" / f"{self.code}.toml"
        if not file.is_file():
            return {}
        import tomllib  # English does without it

        return tomllib.loads(file.read_text("utf-8"))

    def say(self, text: str) -> str:
        """A sentence in this language. What is no sentence, or is not in the catalogue, stays as it is."""
        if not isinstance(text, Text) or not self.patterns:
            return str(text)
        pattern = self._pattern(text)
        if not text.parts:
            return pattern
        return pattern.format_map({name: self._part(part) for name, part in text.parts.items()})

    def _pattern(self, text: Text) -> str:
        return self.patterns.get(text.pattern, text.english)

    def _part(self, part: object) -> object:
        return self.say(part) if isinstance(part, Text) else part

    def html(self, text: Text) -> Markup:
        """A sentence for a page: escaped, but for parts that are HTML already; hidden characters are shown."""
        pattern = escape(self._pattern(text))
        if not text.parts:
            return pattern
        parts = {name: self._html_part(part) for name, part in text.parts.items()}
        return Markup(str(pattern).format_map(parts))  # noqa: S704  # the pattern and the parts are escaped

    def _html_part(self, part: object) -> object:
        if isinstance(part, Text):
            return self.html(part)
        if isinstance(part, Markup | int | float):
            return part
        return escape(visible(str(part)))


ENGLISH: Final = Language("en", "English")
CHINESE: Final = Language("zh-CN", "中文")
LANGUAGES: Final = {language.code: language for language in (ENGLISH, CHINESE)}


def language_of(kept: str | None, accepted: str | None) -> Language:
    """The language that a reader chose (a cookie), else the first of `Accept-Language` that there is, else English."""
    chosen = LANGUAGES.get(kept or "")
    if chosen is not None:
        return chosen
    for wanted in _in_order(accepted or ""):
        for language in LANGUAGES.values():
            if wanted.partition("-")[0] == language.code.partition("-")[0]:
                return language
    return ENGLISH


def _in_order(accepted: str) -> list[str]:
    """The ranges of an `Accept-Language` header, the most wanted first, without those that are not wanted."""
    found: list[tuple[float, str]] = []
    for one in accepted[:1000].split(","):
        name, _, parameter = one.partition(";")
        quality = _quality(parameter.strip())
        if name.strip() and quality > 0:
            found.append((quality, name.strip().lower()))
    return [name for _, name in sorted(found, key=lambda one: -one[0])]


def _quality(parameter: str) -> float:
    if not parameter.startswith("q="):
        return 1.0
    try:
        return float(parameter[2:])
    except ValueError:
        return 0.0
