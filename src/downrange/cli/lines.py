"""Lines of a file or of standard input, as they come."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO, Final

from downrange.cli.options import UsageError
from downrange.cli.until_signal import StopRequest

MAX_LINE_BYTES: Final = 16 * 1024 * 1024


async def lines(source: Path, stop: StopRequest) -> AsyncIterator[bytes]:
    """Yield every line without its end; `-` is standard input, whose lines come as soon as they were written.

    A stop request ends the wait for standard input; the caller itself stops reading a file.
    """
    if str(source) != "-":
        try:
            with source.open("rb") as file:
                for line in file:
                    yield line.rstrip(b"\r\n")
        except OSError as error:
            raise UsageError(f"cannot read {source}: {error.strerror or error}") from None
        return
    stdin = sys.stdin.buffer
    mode = os.fstat(stdin.fileno()).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stdin.isatty()):  # reading a file or /dev/null never waits
        for line in stdin:
            yield line.rstrip(b"\r\n")
        return
    async for line in _lines_of_pipe(stdin, stop):
        yield line


async def _lines_of_pipe(pipe: BinaryIO, stop: StopRequest) -> AsyncIterator[bytes]:
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        while line := await stop.or_result(reader.readline()):
            yield line.rstrip(b"\r\n")
    except ValueError:
        raise UsageError(f"a line of more than {MAX_LINE_BYTES} bytes on standard input") from None
    finally:
        transport.close()
