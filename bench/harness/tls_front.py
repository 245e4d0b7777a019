"""What stands before an API as docker/tls/nginx.conf does, where there is no nginx."""

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_CHUNK = 64 * 1024


@contextmanager
def tls_front(target: int, context: ssl.SSLContext) -> Iterator[int]:
    """The port on loopback where `context` speaks TLS, and what is said goes to port `target`."""
    loop = asyncio.new_event_loop()
    served: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        served.add(task)
        task.add_done_callback(served.discard)
        to_api = await asyncio.open_connection("127.0.0.1", target)
        # Cancelled: the end. asyncio would print a task's cancellation.
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await asyncio.gather(_pass_on(reader, to_api[1]), _pass_on(to_api[0], writer))

    server = loop.run_until_complete(asyncio.start_server(serve, "127.0.0.1", 0, ssl=context))
    thread = threading.Thread(target=loop.run_forever, name="tls-front")
    thread.start()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:

        async def end() -> None:
            server.close()
            for task in list(served):
                task.cancel()
            await asyncio.gather(*served, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()
