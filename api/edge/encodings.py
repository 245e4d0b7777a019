"""Decodes compressed request bodies (RFC 9110, 8.4.1), such as the zstd that Codex sends."""

import asyncio
import ctypes
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain
from typing import Any, Protocol

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADER = "content-encoding"
# Most decoded bytes that a decoder returns at once; they take less than a millisecond.
_PIECE = 128 * 1024
# Most compressed bytes for a decoder at once, which copies the rest after each member.
_GIVEN = 16 * 1024
# zstd's parameter for the largest window, and its value as a logarithm (RFC 9659: 8 MiB).
_WINDOW_LOG_MAX, _WINDOW_LOG = 100, 23


class Decoded:
    """Middleware that decodes bodies piece by piece. Answers 415 to an unknown encoding."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        """`max_bytes`: the largest size of a compressed body."""
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        named = Headers(scope=scope).getlist(_HEADER) if scope["type"] == "http" else []
        names = [name.strip().lower().removeprefix("x-") for name in ",".join(named).split(",")]
        names = [name for name in names if name not in ("", "identity")]
        known = decoders() if names else {}
        if not names:
            await self._app(scope, receive, send)
        elif len(names) == 1 and names[0] in known:
            body = _Body(receive, names[0], known[names[0]](), self._max_bytes)
            kept = [one for one in scope["headers"] if one[0].decode("latin-1") != _HEADER]
            await self._app({**scope, "headers": kept}, body.receive, send)
        else:
            detail = (
                f"A body encoded as {', '.join(names)[:100]!r} cannot be read here; send it plain,"
                f" or in one of {', '.join(known)}."
            )
            headers = {"Accept-Encoding": ", ".join(known), "Connection": "close"}
            await JSONResponse({"detail": detail}, 415, headers)(scope, receive, send)


class _Decoder(Protocol):
    is_whole: bool  # the encoded data is complete

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """Decodes `data` and yields the result in pieces. ValueError if `data` is invalid."""


class _Body:
    def __init__(self, receive: Receive, name: str, decoder: _Decoder, max_bytes: int) -> None:
        self._receive = receive
        self._name = name
        self._decoder = decoder
        self._left = max_bytes
        self._pieces: Iterator[bytes] = iter(())
        self._ended = False

    async def receive(self) -> Message:
        while True:
            try:
                piece = next(self._pieces, None)
            except ValueError as error:
                raise self._refusal(f"is no {self._name}: {error}") from None
            if piece is not None:
                await asyncio.sleep(0)  # lets other requests run: a body may grow a thousandfold
                return {"type": "http.request", "body": piece, "more_body": True}
            if self._ended and not self._decoder.is_whole:
                raise self._refusal("is truncated")
            if self._ended:
                self._ended = False
                return {"type": "http.request", "body": b"", "more_body": False}
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            data = message.get("body", b"")
            self._left -= len(data)
            if self._left < 0:  # also limits bytes that decode to nothing
                raise HTTPException(413, "The body is too large (POC_MAX_BODY_BYTES).")
            parts = (data[at : at + _GIVEN] for at in range(0, len(data), _GIVEN))
            self._pieces = chain.from_iterable(map(self._decoder.pieces, parts))
            self._ended = not message.get("more_body", False)

    def _refusal(self, why: str) -> HTTPException:
        detail = f"The body's Content-Encoding is {self._name}, but the body {why}."
        return HTTPException(400, detail, headers={"Connection": "close"})


class _Zlib:
    is_whole = True

    def __init__(self, wbits: int) -> None:
        self._wbits = wbits
        self._object = zlib.decompressobj(wbits)

    def pieces(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._object.eof:  # another member
                self._object = zlib.decompressobj(self._wbits)
            try:
                piece = self._object.decompress(data, _PIECE)
                while piece:
                    yield piece
                    piece = self._object.decompress(self._object.unconsumed_tail, _PIECE)
            except zlib.error as error:
                raise ValueError(str(error)) from None
            data = self._object.unused_data
            self.is_whole = self._object.eof
            yield b""  # lets other requests run: members may be empty


class _Buffer(ctypes.Structure):
    """The C structs ZSTD_inBuffer and ZSTD_outBuffer, which have the same fields."""

    _fields_ = (("at", ctypes.c_void_p), ("size", ctypes.c_size_t), ("pos", ctypes.c_size_t))


class _Zstd:
    is_whole = True

    def __init__(self, library: Any) -> None:
        self._library = library
        self._context = ctypes.c_void_p(library.ZSTD_createDCtx())
        library.ZSTD_DCtx_setParameter(self._context, _WINDOW_LOG_MAX, _WINDOW_LOG)
        self._room = ctypes.create_string_buffer(_PIECE)

    def __del__(self) -> None:
        self._library.ZSTD_freeDCtx(self._context)

    def pieces(self, data: bytes) -> Iterator[bytes]:
        held = ctypes.create_string_buffer(data, len(data))
        given = _Buffer(ctypes.addressof(held), len(data), 0)
        more = bool(data)
        while more:
            out = _Buffer(ctypes.addressof(self._room), _PIECE, 0)
            code = self._library.ZSTD_decompressStream(
                self._context, ctypes.byref(out), ctypes.byref(given)
            )
            if self._library.ZSTD_isError(ctypes.c_size_t(code)):
                name = self._library.ZSTD_getErrorName(ctypes.c_size_t(code))
                raise ValueError(name.decode())
            self.is_whole = code == 0
            more = given.pos < given.size or (out.pos == out.size and code != 0)
            yield self._room.raw[: out.pos]


@cache
def decoders() -> dict[str, Callable[[], _Decoder]]:
    """Returns a decoder factory for each available encoding, by the encoding's name."""
    known: dict[str, Callable[[], _Decoder]] = {
        "gzip": lambda: _Zlib(16 + zlib.MAX_WBITS),
        "deflate": lambda: _Zlib(zlib.MAX_WBITS),
    }
    try:
        # Present in every Debian and Fedora, whose packages use zstd; Python has zstd from 3.14 on.
        library = ctypes.CDLL("libzstd.so.1")
    except OSError:
        return known
    library.ZSTD_createDCtx.restype = ctypes.c_void_p
    library.ZSTD_decompressStream.restype = ctypes.c_size_t
    library.ZSTD_getErrorName.restype = ctypes.c_char_p
    return known | {"zstd": lambda: _Zstd(library)}
