"""Scripts, styles and pictures: served with their hash in the name, for ever, compressed once."""

from __future__ import annotations

import gzip
import hashlib
from importlib import resources
from typing import Final

from starlette.responses import Response

_KINDS: Final = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
FILES: Final = (
    "console.css",
    "console.js",
    "charts.js",
    "tail.js",
    "icon.svg",
    "vendor/htmx.min.js",
    "vendor/uPlot.iife.min.js",
    "vendor/uPlot.min.css",
)


class StaticFiles:
    """All files in memory, by the name under which pages ask for them."""

    def __init__(self) -> None:
        self._by_address: dict[str, tuple[bytes, str]] = {}
        self._packed: dict[str, bytes] = {}
        self._addresses: dict[str, str] = {}
        root = resources.files("downrange.console") / "static"
        for name in FILES:
            content = (root / name).read_bytes()
            stem, _, ending = name.rpartition("/")[2].rpartition(".")
            hashed = f"{stem}.{hashlib.sha256(content).hexdigest()[:12]}.{ending}"
            self._addresses[name] = f"/static/{hashed}"
            self._by_address[hashed] = (content, _KINDS[ending])

    def address(self, name: str) -> str:
        return self._addresses[name]

    def response(self, hashed: str, accepts: str) -> Response | None:
        found = self._by_address.get(hashed)
        if found is None:
            return None
        content, kind = found
        headers = {"cache-control": "public, max-age=31536000, immutable", "vary": "accept-encoding"}
        if "gzip" in accepts:
            if hashed not in self._packed:
                self._packed[hashed] = gzip.compress(content, 9, mtime=0)
            content = self._packed[hashed]
            headers["content-encoding"] = "gzip"
        return Response(content, 200, headers, media_type=kind)
