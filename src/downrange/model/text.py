"""Sentences for people. A sentence is a `str` in English that remembers its pattern and its parts.

Commands, logs and JSON use it as the English text that it is. The console looks its pattern up in a catalogue and says
it in the language of the reader.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Text(str):
    """An English sentence: `Text("{name} is gone", name="broker-a")`. Parts may be sentences themselves.

    `pattern` is the key of the catalogue, `parts` are the values of its placeholders. Without parts the pattern is
    taken as it stands, braces included. `english` is the pattern of this text: it differs where English has another
    pattern for one than for many.
    """

    __slots__ = ("english", "parts", "pattern")
    pattern: str
    english: str
    parts: dict[str, Any]

    def __new__(cls, pattern: str, /, **parts: object) -> Text:
        made = super().__new__(cls, pattern.format_map(parts) if parts else pattern)
        made.pattern, made.english, made.parts = pattern, pattern, parts
        return made

    def __deepcopy__(self, memo: object) -> Text:
        return self  # as any str


def plural(count: float, one: str, many: str, /, **parts: object) -> Text:
    """`plural(3, "{count} queue", "{count} queues")`. The pattern for many is the key of the catalogue."""
    parts = {"count": f"{count:,.0f}", **parts}
    made = Text(one if count == 1 else many, **parts)
    made.pattern = many
    return made


def joined(separator: str, texts: Iterable[str]) -> Text:
    """Sentences one behind the other; each is said in the language of the reader, which has its own separators.

    The key of the catalogue is `{one}, {other}` for the separator `, `.
    """
    whole: Text | None = None
    for text in texts:
        whole = as_is(text) if whole is None else Text(f"{{one}}{separator}{{other}}", one=whole, other=text)
    return whole if whole is not None else Text("")


def as_is(text: str) -> Text:
    """A name, or what another program said: no language has another word for it."""
    return text if isinstance(text, Text) else Text("{text}", text=text)


def said_by(error: BaseException) -> Text:
    """What an error says: a sentence if it was given one, else its words as they are."""
    said = error.args[0] if error.args else ""
    return said if isinstance(said, Text) and str(error) == said else as_is(str(error))
