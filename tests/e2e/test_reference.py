"""The API's reference in a real browser: whole without a network, and within its policy."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from api.app import create_app
from poc_core.settings import Settings
from tests.stacks.served import served, url_of

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.xdist_group("console")]

PATIENCE_MS = 60_000


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    """Of an API without a Redis, which the reference does not need."""
    with served(create_app(Settings())) as api:
        yield url_of(api)


@pytest.mark.parametrize(
    ("page_of", "shows"), [("docs", ".opblock-summary-path"), ("redoc", "[data-section-id] h2")]
)
def test_it_shows_the_api_and_asks_nobody_else(
    browser: Browser, base_url: str, page_of: str, shows: str
) -> None:
    page = browser.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on(
        "console", lambda message: said.append(message.text) if message.type == "error" else None
    )
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{base_url}/{page_of}")
    expect(page.locator(shows).first).to_be_visible(timeout=PATIENCE_MS)
    page.wait_for_load_state("networkidle")
    outside = [url for url in asked if not url.startswith((f"{base_url}/", "blob:", "data:"))]
    assert (said, outside) == ([], [])
    page.close()
