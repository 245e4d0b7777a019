"""The files of the API's reference, as they lie beside this module: a browser asks nobody else
for anything.
"""

from pathlib import Path

from api.console import page

FOLDER = Path(__file__).with_name("files")
SWAGGER_UI = "docs.html"
REDOC = "redoc.html"
# As the console's, but for what the two cannot do without: both have pictures in their styles, and
# ReDoc makes its styles, and the worker that searches, while it runs.
_POLICY = page.HEADERS["Content-Security-Policy"].replace("img-src 'self'", "img-src 'self' data:")
HEADERS = page.HEADERS | {
    "Content-Security-Policy": _POLICY.replace(
        "style-src 'self'", "style-src 'self' 'unsafe-inline'"
    )
    + "; worker-src blob:"
}
