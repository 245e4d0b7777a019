"""`proofline receive`: runs a receiver of callbacks, for trials and tests."""

import json
import signal
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Annotated, Any

import typer

from cli import options, terminal
from cli.run.receipts import Receipts
from cli.supervise.ports import AddressError


def receive(
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="TCP port to listen on; 0 for a free port.")
    ] = 9100,
    host: options.Host = "127.0.0.1",
    answer: Annotated[
        int,
        typer.Option(
            min=200, max=599, help="HTTP status of the answers, to test how a node reacts."
        ),
    ] = 200,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print each payload unchanged on stdout, one per line, and messages on stderr.",
        ),
    ] = False,
) -> None:
    """Receive callbacks of rounds and jobs, print each payload, and report wrong payloads.

    Prints at once which nonces are repeated, and which payloads came out of order or with changed
    contents. At the end (Ctrl-C or SIGTERM) prints for each round and job how many nonces came and
    which are missing. A payload that is repeated as a whole is no error: the answer to its first
    delivery was late or lost.

    **Exit code:** 0 if every nonce came once, 1 if nonces are missing or a payload is wrong.

    **Example:** proofline receive --port 9100
    """
    receipts = Receipts()
    try:
        server = ThreadingHTTPServer((host, port), _handler(receipts, answer, as_json))
    except OSError as error:
        raise AddressError.of(host, port, error) from error

    def end(*_: object) -> None:
        # On another thread, because serve_forever runs in this one, and shutdown waits for it.
        threading.Thread(target=server.shutdown).start()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    terminal.note(f"receive: listening at http://{host}:{server.server_port}; Ctrl-C ends it")
    with server:
        server.serve_forever(poll_interval=0.1)
    for line in receipts.summary():
        terminal.note(f"receive: {line}")
    if not receipts.is_whole():
        raise typer.Exit(terminal.EXIT_FAILURE)


def _handler(receipts: Receipts, status: int, as_json: bool) -> type[BaseHTTPRequestHandler]:
    one_at_a_time = threading.Lock()
    say = partial(typer.echo, err=as_json)  # with --json, stdout has only the payloads

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 30  # seconds to wait for a silent sender

        def do_POST(self) -> None:
            length = self.headers.get("Content-Length", "")
            if not length.isdecimal():
                return self._answer(411)
            raw = self.rfile.read(int(length))
            if not 200 <= status < 300:  # not recorded, because refused payloads come again
                say(f"{self.path} {len(raw)} bytes refused with {status}")
                return self._answer(status)
            try:
                body: Any = json.loads(raw)
                if not isinstance(body, dict):
                    raise ValueError("it is no JSON object")
                with one_at_a_time:
                    receipt = receipts.take(self.path, body)
            except (ValueError, RecursionError) as error:
                say(f"{self.path} is no payload: {error}")
                return self._answer(400)
            if as_json:
                terminal.write_json({"path": self.path, "body": body}, None)
            say(receipt.line)
            for fault in receipt.faults:
                say(typer.style(f"  {fault}", fg=typer.colors.RED, bold=True))
            return self._answer(status)

        def _answer(self, code: int) -> None:
            self.send_response(code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler
