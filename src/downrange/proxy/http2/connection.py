"""One HTTP/2 connection of a client: frames in, calls out, answers back under flow control."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any, Final, cast

from downrange.proxy.http2.frames import (
    ACK,
    END_HEADERS,
    END_STREAM,
    MOST_WINDOW,
    RESPONSE_HEADERS,
    UNSUPPORTED_MEDIA_TYPE,
    ErrorCode,
    Frame,
    FrameReader,
    Http2Error,
    Kind,
    Setting,
    decode_number,
    decode_settings,
    encode_frame,
    encode_goaway,
    encode_reset,
    encode_settings,
    encode_window_update,
    trailers,
    without_padding,
)
from downrange.proxy.http2.header_fields import HeaderDecoder
from downrange.proxy.http2.limits import Http2Limits
from downrange.proxy.http2.stream import Stream

log = logging.getLogger(__name__)

_DEFAULT_WINDOW: Final = 65535

OnCall = Callable[[Stream], None]
"""Called with a new call as soon as its headers are there; the stream then gets messages."""


class Http2Connection(asyncio.Protocol):
    """The protocol of one accepted socket.

    Holds always: what is sent keeps within the windows that the peer gave; a peer that does not read is not read from;
    a broken rule ends the connection with a GOAWAY that names the rule. Used on the loop's thread only.
    """

    def __init__(self, on_call: OnCall, connections: set[Http2Connection], limits: Http2Limits) -> None:
        """`connections` has the connection as long as it is open."""
        self.peer = ""
        """Host and port of the client."""
        self._on_call = on_call
        self._connections = connections
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader(limits.max_frame_bytes)
        self._headers = HeaderDecoder(limits.max_header_bytes)
        self._block: tuple[int, int, bytearray] | None = None
        """The stream, the flags and the bytes of a header block that goes on in the next frame."""
        self._streams: dict[int, Stream] = {}
        self._last_stream = 0
        self._window = _DEFAULT_WINDOW
        self._stream_window = _DEFAULT_WINDOW
        self._max_frame = 16384
        self._taken = 0
        """Bytes received that the peer was not yet given room for again."""
        self.held = 0
        """Bytes of unfinished requests and of answers that wait for room."""
        self._resets = 0
        self._resets_since = self._loop.time()
        self._out: list[bytes] = []
        self._is_ending = self._is_full = False
        self.heard = self._loop.time()
        self._is_pinged = False
        self.lost: asyncio.Future[None] = self._loop.create_future()
        """Done when the connection is closed."""

    def __repr__(self) -> str:
        return f"<Http2Connection {self.peer} calls={len(self._streams)} held={self.held}>"

    @property
    def is_idle(self) -> bool:
        return not self._streams

    # --- the transport --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclasses
        self._connections.add(self)
        if not self.peer:
            self.peer = peer_text(transport.get_extra_info("peername"))
        limits = self._limits
        self._write(
            encode_settings(
                {
                    Setting.MAX_CONCURRENT_STREAMS: limits.max_streams,
                    Setting.INITIAL_WINDOW_SIZE: limits.stream_window,
                    Setting.MAX_FRAME_SIZE: limits.max_frame_bytes,
                    Setting.MAX_HEADER_LIST_SIZE: limits.max_header_bytes,
                }
            )
        )
        self._write(encode_window_update(0, limits.connection_window - _DEFAULT_WINDOW))

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.cancelled()
        self._connections.discard(self)
        if not self.lost.done():
            self.lost.set_result(None)

    def pause_writing(self) -> None:
        self._is_full = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._is_full = False
        if self._transport is not None:
            self._transport.resume_reading()
        for stream in list(self._streams.values()):
            self._push(stream)

    def data_received(self, data: bytes) -> None:
        self.heard = self._loop.time()
        self._is_pinged = False
        try:
            for frame in self._reader.feed(data):
                self._take(frame)
        except Http2Error as error:
            self.end(error.code, str(error))
        except Exception:
            log.exception("connection closed peer=%s reason=a bug", self.peer)
            self.end(ErrorCode.INTERNAL_ERROR, "internal error")

    def eof_received(self) -> bool:
        return False

    def _write(self, data: bytes) -> None:
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(data)

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self._transport is not None and out:
            self._transport.write(out[0] if len(out) == 1 else b"".join(out))

    def end(self, code: ErrorCode = ErrorCode.NO_ERROR, reason: str = "") -> None:
        """Close the connection, with the reason for the peer."""
        if self._transport is None or self._is_ending:
            return
        self._is_ending = True
        if code is not ErrorCode.NO_ERROR:
            log.info("connection closed peer=%s reason=%s", self.peer, reason)
        self._write(encode_goaway(self._last_stream, code, reason))
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def expire(self, now: float) -> None:
        """Close the connection if nobody uses it, and ask a silent peer whether it lives."""
        silent = now - self.heard
        if not self._streams:
            if silent > self._limits.idle_seconds:
                self.end()
        elif silent > 2 * self._limits.ping_seconds and self._is_pinged:
            log.info("connection closed peer=%s reason=silent", self.peer)
            if self._transport is not None:
                self._transport.abort()
        elif silent > self._limits.ping_seconds and not self._is_pinged:
            self._is_pinged = True
            self._write(encode_frame(Kind.PING, 0, 0, b"downrang"))

    # --- frames ---------------------------------------------------------------------------------------------------

    def _take(self, frame: Frame) -> None:
        kind = frame.kind
        if self._is_ending:
            return
        if self._block is not None and (kind != Kind.CONTINUATION or frame.stream != self._block[0]):
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a header block is interrupted")
        if kind == Kind.DATA:
            self._take_data(frame)
        elif kind == Kind.HEADERS:
            self._take_headers(frame.stream, frame.flags, without_padding(frame))
        elif kind == Kind.CONTINUATION:
            self._continue_headers(frame)
        elif kind == Kind.WINDOW_UPDATE:
            self._take_window(frame)
        elif kind == Kind.RST_STREAM:
            self._take_reset(frame)
        elif kind == Kind.PING:
            self._take_ping(frame)
        elif kind == Kind.SETTINGS:
            self._take_settings(frame)
        elif kind == Kind.PUSH_PROMISE:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a client must not push")
        elif kind == Kind.GOAWAY and frame.stream:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "GOAWAY of a stream")

    def _take_headers(self, stream: int, flags: int, block: bytes) -> None:
        if not flags & END_HEADERS:
            self._block = (stream, flags, bytearray(block))
            return
        fields = self._headers.decode(block)
        known = self._streams.get(stream)
        if known is not None:  # trailers of a request: they say nothing, but must end it
            if not flags & END_STREAM:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "headers within a request")
            known.half_closed()
            return
        if not stream % 2:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"stream {stream} is not a client's")
        if stream <= self._last_stream:
            raise Http2Error(ErrorCode.STREAM_CLOSED, f"stream {stream} is closed")
        self._last_stream = stream
        if len(self._streams) >= self._limits.max_streams:
            self._write(encode_reset(stream, ErrorCode.REFUSED_STREAM))
            return
        self._open(stream, fields, bool(flags & END_STREAM))

    def _open(self, number: int, headers: dict[bytes, bytes], is_closed: bool) -> None:
        stream = Stream(self, number, headers, self._stream_window)
        if headers.get(b":method") != b"POST" or not headers.get(b"content-type", b"").startswith(b"application/grpc"):
            self._write(encode_frame(Kind.HEADERS, END_HEADERS | END_STREAM, number, UNSUPPORTED_MEDIA_TYPE))
            if not is_closed:
                self._write(encode_reset(number, ErrorCode.NO_ERROR))
            return
        self._streams[number] = stream
        self._on_call(stream)
        if is_closed:
            stream.half_closed()

    def _continue_headers(self, frame: Frame) -> None:
        if self._block is None:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "CONTINUATION of nothing")
        stream, flags, block = self._block
        block += frame.payload
        if len(block) > self._limits.max_header_bytes:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, "too many headers")
        if frame.flags & END_HEADERS:
            self._block = None
            self._take_headers(stream, flags | END_HEADERS, bytes(block))

    def _take_data(self, frame: Frame) -> None:
        size = len(frame.payload)
        self._taken += size
        if self._taken > self._limits.connection_window:
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "more data than the connection has room for")
        if self._taken * 2 > self._limits.connection_window:
            self._write(encode_window_update(0, self._taken))
            self._taken = 0
        stream = self._streams.get(frame.stream)
        if stream is None:
            if not frame.stream or frame.stream > self._last_stream:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"data of stream {frame.stream}, which is not open")
            return  # of a call that was answered already
        stream.data(without_padding(frame), size, self._limits)
        if self.held > self._limits.max_held_bytes:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, "too many bytes of requests")
        if frame.flags & END_STREAM:
            stream.half_closed()

    def _take_window(self, frame: Frame) -> None:
        more = decode_number(frame.payload)
        if not more:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a window grows by nothing")
        if not frame.stream:
            self._window += more
            if self._window > MOST_WINDOW:
                raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "the window of the connection is too large")
            for waiting in list(self._streams.values()):
                self._push(waiting)
            return
        stream = self._streams.get(frame.stream)
        if stream is not None:
            stream.window += more
            if stream.window > MOST_WINDOW:
                raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "the window of a stream is too large")
            self._push(stream)

    def _take_reset(self, frame: Frame) -> None:
        decode_number(frame.payload)
        if not frame.stream or frame.stream > self._last_stream:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "reset of a stream that was never open")
        stream = self._streams.pop(frame.stream, None)
        if stream is None:
            return
        now = self._loop.time()
        if now - self._resets_since > self._limits.reset_seconds:
            self._resets, self._resets_since = 0, now
        self._resets += 1
        stream.cancelled()
        if self._resets > self._limits.max_resets:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, "too many calls given up")

    def _take_ping(self, frame: Frame) -> None:
        if len(frame.payload) != 8:
            raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "PING of a wrong size")
        if not frame.flags & ACK:
            self._write(encode_frame(Kind.PING, ACK, 0, frame.payload))

    def _take_settings(self, frame: Frame) -> None:
        if frame.stream:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "SETTINGS of a stream")
        if frame.flags & ACK:
            return
        for name, value in decode_settings(frame.payload):
            if name == Setting.INITIAL_WINDOW_SIZE:
                if value > MOST_WINDOW:
                    raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "the initial window is too large")
                change, self._stream_window = value - self._stream_window, value
                for stream in list(self._streams.values()):
                    stream.window += change
                    self._push(stream)
            elif name == Setting.MAX_FRAME_SIZE:
                if not 16384 <= value <= 0xFFFFFF:
                    raise Http2Error(ErrorCode.PROTOCOL_ERROR, "MAX_FRAME_SIZE out of range")
                self._max_frame = value
        self._write(encode_frame(Kind.SETTINGS, ACK, 0))

    # --- answers --------------------------------------------------------------------------------------------------

    def room_given(self, stream: int, size: int) -> None:
        """Let the peer send more of a request."""
        self._write(encode_window_update(stream, size))

    def answer(self, stream: Stream, data: bytes) -> None:
        """Send the only message of an answer, its headers and its status, all at once if there is room."""
        number, size = stream.number, len(data)
        has_room = size <= min(self._window, stream.window, self._max_frame) and not self._is_full
        if not has_room or not self._streams.pop(number, None):
            stream.send(data)
            stream.finish()
            return
        self._window -= size
        stream.closed()
        self._write(
            encode_frame(Kind.HEADERS, END_HEADERS, number, RESPONSE_HEADERS)
            + encode_frame(Kind.DATA, 0, number, data)
            + encode_frame(Kind.HEADERS, END_HEADERS | END_STREAM, number, trailers(0, ""))
        )
        if not stream.is_half_closed:
            self._write(encode_reset(number, ErrorCode.NO_ERROR))

    def send(self, stream: Stream, data: bytes) -> None:
        """Send data of an answer, or keep it until there is room."""
        if stream.number not in self._streams:
            return
        if not stream.has_headers:
            stream.has_headers = True
            self._write(encode_frame(Kind.HEADERS, END_HEADERS, stream.number, RESPONSE_HEADERS))
        stream.unsent += data
        self.held += len(data)
        self._push(stream)
        if self.held > self._limits.max_held_bytes:
            self.end(ErrorCode.ENHANCE_YOUR_CALM, "too many bytes of answers that are not read")

    def finish(self, stream: Stream, status: int, message: str) -> None:
        """End an answer behind the data that waits."""
        if stream.number in self._streams:
            stream.final = (status, message)
            self._push(stream)

    def _push(self, stream: Stream) -> None:
        unsent = stream.unsent
        while unsent:
            size = min(len(unsent), self._window, stream.window, self._max_frame)
            if size <= 0 or self._is_full:
                return
            self._write(encode_frame(Kind.DATA, 0, stream.number, bytes(unsent[:size])))
            del unsent[:size]
            self._window -= size
            stream.window -= size
            self.held -= size
        stream.room()
        if stream.final is None or self._streams.pop(stream.number, None) is None:
            return
        block = trailers(*stream.final)
        if not stream.has_headers:
            block = RESPONSE_HEADERS + block
        self._write(encode_frame(Kind.HEADERS, END_HEADERS | END_STREAM, stream.number, block))
        if not stream.is_half_closed:
            self._write(encode_reset(stream.number, ErrorCode.NO_ERROR))
        stream.closed()


def peer_text(name: Any) -> str:
    """`host:port` of a socket's address."""
    if isinstance(name, tuple) and len(name) >= 2:
        host, port = str(name[0]), name[1]
        host = host.removeprefix("::ffff:") if "." in host else host
        return f"{host}:{port}"
    return "unknown:0" if not isinstance(name, str) else f"{socket.gethostname()}:0"
