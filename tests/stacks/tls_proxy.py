"""TLS before a port of loopback."""

import hashlib
import socket
import ssl
import threading
from pathlib import Path

from tests.certificates import make_certificate


class TlsProxy:
    """Accepts TLS connections as an operator's proxy would, and passes them on to `port`."""

    def __init__(self, folder: Path, port: int) -> None:
        self.certificate, key = make_certificate(folder, "api")
        self._target = port
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, key)
        self._context = context
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def pinned_url(self) -> str:
        der = ssl.PEM_cert_to_DER_cert(self.certificate.read_text())
        return f"https://127.0.0.1:{self.port}#sha256={hashlib.sha256(der).hexdigest()}"

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            with (
                self._context.wrap_socket(client, server_side=True) as near,
                socket.create_connection(("127.0.0.1", self._target)) as far,
            ):
                threading.Thread(target=self._pass_on, args=(far, near), daemon=True).start()
                self._pass_on(near, far)
        except OSError:  # it does not trust us, or hangs up
            pass

    @staticmethod
    def _pass_on(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass
