"""Loads the static files of the console and of the API's reference, which load nothing from other
servers.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).with_name("files")
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}

INDEX = "index.html"
REFERENCE_FOLDER = Path(__file__).parents[1] / "reference"
SWAGGER_UI = "docs.html"
REDOC = "redoc.html"
HEADERS = {
    # Scripts and styles come from this server only, and no page may embed this one in a frame.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    # the browser asks each time, and gets 304 while nothing has changed
    "Cache-Control": "no-cache",
}
# The console's Content-Security-Policy, extended: both pages need images with data: URLs, and ReDoc
# also inline styles and a web worker.
_POLICY = HEADERS["Content-Security-Policy"].replace("img-src 'self'", "img-src 'self' data:")
REFERENCE_HEADERS = HEADERS | {
    "Content-Security-Policy": _POLICY.replace(
        "style-src 'self'", "style-src 'self' 'unsafe-inline'"
    )
    + "; worker-src blob:"
}


@dataclass(frozen=True)
class PageFile:
    content: bytes
    media_type: str
    etag: str


def load(folder: Path = FOLDER) -> dict[str, PageFile]:
    """Reads all files of known types below `folder`. Returns them by their path relative to
    `folder`.
    """
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix in _TYPES and path.is_file():
            content = path.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            found[path.relative_to(folder).as_posix()] = PageFile(
                content, _TYPES[path.suffix], etag
            )
    return found
