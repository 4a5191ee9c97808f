"""Tables of pages: filter, sort and cut on the server; the state is in the address. Also as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar
from urllib.parse import urlencode

from downrange.model.text import Text

T = TypeVar("T")

PAGE_ROWS: Final = 100


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """One column: `value` gives the figure or text of a row, `link` where it leads.

    `kind` is text, code, number, rate, percent, size, span, time, state or member; figures stand on the right.
    """

    key: str
    label: Text
    value: Callable[[T], Any]
    kind: str = "text"
    link: Callable[[T], str | None] | None = None
    title: Text = Text("")

    @property
    def is_figure(self) -> bool:
        return self.kind in ("number", "rate", "percent", "size", "span")


@dataclass(frozen=True, slots=True)
class Listing:
    """The part of a table that is shown, and what was asked for."""

    name: str
    columns: Sequence[Column[Any]]
    rows: list[dict[str, Any]]
    links: list[dict[str, str]]
    total: int
    found: int
    page: int
    sort: str
    descending: bool
    query: str
    parameters: dict[str, str] = field(default_factory=dict)
    caption: Text = Text("")

    @property
    def pages(self) -> int:
        return max(1, -(-self.found // PAGE_ROWS))

    def address(self, **changes: object) -> str:
        """The query of this page with changes; a value of None takes a parameter away."""
        merged: dict[str, object] = {**self.parameters, **changes}
        return "?" + urlencode({key: value for key, value in merged.items() if value not in (None, "")})

    def sort_address(self, key: str) -> str:
        is_again = key == self.sort
        order = "asc" if is_again and self.descending else "desc" if is_again else None
        return self.address(sort=key, order=order, page=None)

    def data(self) -> dict[str, Any]:
        return {"rows": self.rows, "total": self.total, "found": self.found, "page": self.page, "pages": self.pages}


def listing(
    items: Iterable[T],
    columns: Sequence[Column[T]],
    parameters: dict[str, str],
    *,
    search: Callable[[T], str] | None = None,
    sort: str = "",
    name: str = "table",
    caption: Text = Text(""),
) -> Listing:
    """Filter by `q`, sort by `sort` and `order`, and take page `page` of the parameters of an address."""
    everything = list(items)
    query = parameters.get("q", "").strip()
    found = everything
    if query and search is not None:
        words = query.lower().split()
        found = [item for item in everything if all(word in search(item).lower() for word in words)]
    by_key = {column.key: column for column in columns}
    asked = parameters.get("sort", "")
    chosen = by_key.get(asked) or by_key.get(sort) or columns[0]
    descending = _descending(parameters.get("order"), chosen)
    values = [chosen.value(item) for item in found]
    known = [index for index, value in enumerate(values) if value is not None]
    known.sort(key=[_sortable(value) for value in values].__getitem__, reverse=descending)
    unknown = [index for index, value in enumerate(values) if value is None]
    page = _page(parameters.get("page"), len(found))
    shown = [found[index] for index in [*known, *unknown][(page - 1) * PAGE_ROWS : page * PAGE_ROWS]]
    return Listing(
        name=name,
        columns=columns,
        rows=[{column.key: column.value(item) for column in columns} for item in shown],
        links=[{column.key: column.link(item) or "" for column in columns if column.link} for item in shown],
        total=len(everything),
        found=len(found),
        page=page,
        sort=chosen.key,
        descending=descending,
        query=query,
        parameters=parameters,
        caption=caption,
    )


def _descending(order: str | None, column: Column[Any]) -> bool:
    if order in ("asc", "desc"):
        return order == "desc"
    return column.is_figure or column.kind == "time"


def _sortable(value: Any) -> tuple[int, Any]:
    return (0, value) if isinstance(value, int | float) else (1, str(value).lower())


def _page(text: str | None, found: int) -> int:
    pages = max(1, -(-found // PAGE_ROWS))
    return min(pages, max(1, int(text))) if text is not None and text.isdecimal() and len(text) < 9 else 1


def to_csv(rows: Iterable[dict[str, Any]], keys: Sequence[str]) -> str:
    """Rows as CSV. A text that a spreadsheet would take for a formula gets an apostrophe in front."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(keys)
    for row in rows:
        writer.writerow([_cell(row.get(key)) for key in keys])
    return out.getvalue()


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return "'" + value
    return value
