"""Generates proofline/client/sync.py from asynchronous.py, as part of `make format`."""

import subprocess
import sys
from pathlib import Path

CLIENT = Path(__file__).resolve().parent.parent / "proofline" / "client"
SOURCE, SYNC = CLIENT / "asynchronous.py", CLIENT / "sync.py"
_MADE_BY = "# Generated from asynchronous.py by scripts/sync_client.py; not to be edited.\n"
_REPLACED = {
    "import asyncio\n": "",
    "asyncio.sleep": "time.sleep",
    "asyncio programs": "programs that wait for each answer",
    "async def": "def",
    "await ": "",
    "AsyncClient": "Client",
    "AsyncBaseTransport": "BaseTransport",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "aclose": "close",
    "several tasks": "several threads",
}


def generated() -> str:
    text = SOURCE.read_text()
    for before, after in _REPLACED.items():
        text = text.replace(before, after)
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(SYNC), "-"]
    return subprocess.run(
        command, input=_MADE_BY + text, text=True, check=True, capture_output=True
    ).stdout


if __name__ == "__main__":
    SYNC.write_text(generated())
