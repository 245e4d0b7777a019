"""A page of the console in a browser, and what it said and asked for."""

from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, Page, ViewportSize, expect

PATIENCE_MS = 60_000
DESK = ViewportSize(width=1280, height=900)
PHONE = ViewportSize(width=390, height=844)
MOST_SHIFT = 0.02
expect.set_options(timeout=PATIENCE_MS)

# The page's layout shifts, those within half a second of an input left out.
_WATCH_SHIFTS = """
    window.shift = 0
    new PerformanceObserver(list => {
        for (const one of list.getEntries()) if (!one.hadRecentInput) shift += one.value
    }).observe({type: 'layout-shift', buffered: true})
"""
# What reaches beyond the page's right edge, or is wider inside than it shows.
_CUT = """() => [...document.querySelectorAll('main *')].filter(one =>
    !one.closest('thead') && (
    one.getBoundingClientRect().right > document.documentElement.clientWidth + 1
    || (one.matches('table, tr, td, th') && one.scrollWidth > one.clientWidth + 1))
).map(one => one.tagName + ' ' + one.textContent.slice(0, 40))"""


class Opened:
    """A page of the console, and what it said and asked for."""

    def __init__(self, page: Page, base_url: str) -> None:
        self.page = page
        self.errors: list[str] = []
        self.asked: list[str] = []
        self._base_url = base_url
        page.set_default_timeout(PATIENCE_MS)
        page.add_init_script(_WATCH_SHIFTS)
        page.on(
            "console",
            lambda message: self.errors.append(message.text) if message.type == "error" else None,
        )
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))

    def go(self, where: str = "") -> None:
        self.page.goto(f"{self._base_url}/console{where}")

    def forgive(self, text: str) -> None:
        """The browser's own word of an answer that the test wants."""
        self.errors[:] = [error for error in self.errors if text not in error]

    @property
    def asked_outside(self) -> list[str]:
        return [url for url in self.asked if not url.startswith((f"{self._base_url}/", "blob:"))]

    @property
    def cut(self) -> list[str]:
        """What of the page cannot be read without scrolling sideways."""
        found: list[str] = self.page.evaluate(_CUT)
        return found

    @property
    def shift(self) -> float:
        """The sum of the layout's shifts so far."""
        return float(self.page.evaluate("shift"))


@contextmanager
def opened(
    browser: Browser, base_url: str, viewport: ViewportSize = DESK, where: str = ""
) -> Iterator[Opened]:
    """One that must have made no error and asked nobody else for anything."""
    context = browser.new_context(viewport=viewport)
    try:
        one = Opened(context.new_page(), base_url)
        one.go(where)
        yield one
        assert (one.errors, one.asked_outside) == ([], [])
    finally:
        context.close()
