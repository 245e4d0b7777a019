"""Files and headers of the API's reference pages, which load nothing from other servers."""

from pathlib import Path

from api.console import page

FOLDER = Path(__file__).with_name("files")
SWAGGER_UI = "docs.html"
REDOC = "redoc.html"
# The console's Content-Security-Policy, extended: both pages need images with data: URLs, and ReDoc
# also inline styles and a web worker.
_POLICY = page.HEADERS["Content-Security-Policy"].replace("img-src 'self'", "img-src 'self' data:")
HEADERS = page.HEADERS | {
    "Content-Security-Policy": _POLICY.replace(
        "style-src 'self'", "style-src 'self' 'unsafe-inline'"
    )
    + "; worker-src blob:"
}
