"""The console in a real browser, before a node whose processes are only told."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

import fakeredis
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Route, expect

from api.app import create_app
from api.proofs.dispatch import Dispatcher
from api.routes.services import Services
from poc_core.records import RoundState
from poc_core.settings import Settings
from poc_core.state.history import CHAT_MS, CHATS, bucket
from poc_core.state.outbox import Delivery
from tests.e2e.opened import DESK, MOST_SHIFT, PHONE, Opened, opened
from tests.e2e.told_node import ToldNode
from tests.harness.samples import (
    RecordingDispatcher,
    complete_batch,
    complete_lease,
    lease_batch,
    lease_nonces,
    new_job,
)
from tests.stacks.served import served, url_of

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("console-states")]

N = 8
MANY = 64


@dataclass
class Shown:
    node: ToldNode
    services: Services
    server: fakeredis.FakeServer
    url: str


@pytest.fixture(scope="module")
def shown() -> Iterator[Shown]:
    with ExitStack() as exits:
        server, settings = fakeredis.FakeServer(), Settings()
        redis = exits.enter_context(fakeredis.FakeRedis(server=server))
        services = Services(settings, redis, cast(Dispatcher, RecordingDispatcher()))
        app = create_app(settings, services)
        # A page's events have no end.
        api = exits.enter_context(served(app, timeout_graceful_shutdown=1))
        node = exits.enter_context(ToldNode(redis, settings, N).beating())
        node.start_round()
        yield Shown(node, services, server, url_of(api))


@pytest.fixture
def console(browser: Browser, shown: Shown) -> Iterator[Opened]:
    shown.node.revive()
    with opened(browser, shown.url) as one:
        expect(one.page.locator("#health")).to_have_text("OK")
        yield one


@pytest.fixture
def page(console: Opened) -> Page:
    return console.page


def icon(page: Page) -> str:
    return str(page.locator("link[rel=icon]").get_attribute("href"))


def test_a_node_without_a_worker_is_down_in_bar_title_and_icon(
    console: Opened, page: Page, shown: Shown
) -> None:
    assert page.title() == "Proofline, tiny-qwen3"
    shown.node.kill(range(N))
    expect(page.locator("#health")).to_have_text("down")
    expect(page.locator(".bar .reason")).to_contain_text(f"0 of {N} workers ready")
    expect(page.locator("#ready")).to_have_text(f"0 of {N}")
    assert (page.title(), icon(page)) == ("DOWN: Proofline, tiny-qwen3", "console/icon-down.svg")
    assert console.shift <= MOST_SHIFT
    shown.node.revive()
    expect(page.locator("#health")).to_have_text("OK")
    assert (page.title(), icon(page)) == ("Proofline, tiny-qwen3", "console/icon.svg")


@pytest.mark.slow
def test_one_worker_of_many_that_ended_is_named_and_its_row_tells(page: Page, shown: Shown) -> None:
    shown.node.kill([3])
    expect(page.locator("#health")).to_have_text("degraded")
    expect(page.locator(".bar .reason")).to_contain_text("host1/gpu3 ended (killed by SIGKILL)")
    row = page.locator("#workers tbody tr").filter(has=page.get_by_text("host1/gpu3", exact=True))
    expect(row).to_contain_text("ended")
    expect(row).to_contain_text("killed by SIGKILL")
    assert icon(page) == "console/icon-degraded.svg"


@pytest.mark.slow
def test_redis_away_is_told_and_what_was_known_stays(console: Opened, shown: Shown) -> None:
    page = console.page
    shown.server.connected = False
    expect(page.locator("#health")).to_have_text("down")
    expect(page.locator(".bar .reason")).to_contain_text("Redis does not answer")
    assert page.locator("#workers tbody tr").count() == N
    shown.server.connected = True
    expect(page.locator("#health")).to_have_text("OK")
    console.forgive("503 (Service Unavailable)")


@pytest.mark.slow
def test_a_receiver_that_refuses_is_told_with_its_words(page: Page, shown: Shown) -> None:
    node = shown.node
    node.rounds.switch(cast(Any, node.rounds.current()), RoundState.STOPPED)
    round_id = node.start_round(url="http://receiver:9000/poc")
    current = cast(Any, node.rounds.current())
    worker = node.worker(0).id
    lease = cast(Any, lease_nonces(node.rounds, current, worker, 1))
    complete_lease(node.rounds, lease, worker, ["AAAA"])
    refuse(shown, round_id, times=3)
    expect(page.locator("#health")).to_have_text("degraded")
    expect(page.locator(".bar .reason")).to_contain_text("receiver http://receiver:9000/poc")
    expect(page.locator("#trouble")).to_contain_text("it is full")
    page.get_by_label("Kind").last.select_option("receiver")
    expect(page.locator("#events tbody tr").first).to_contain_text("was not taken")
    node.rounds.switch(current, RoundState.STOPPED)
    while delivery := due(shown, round_id):
        node.outbox.delivered(delivery)
    node.start_round()


def refuse(shown: Shown, round_id: str, times: int) -> None:
    for _ in range(times):
        delivery = due(shown, round_id)
        assert delivery is not None
        answer = "http://receiver:9000/poc/generated answered 503: it is full"
        shown.node.outbox.failed(delivery, answer)


def due(shown: Shown, round_id: str) -> Delivery | None:
    """The round's next payload, however long it is to wait."""
    shown.node.redis.hset(f"poc:outbox:{round_id}", "next_at", "0")
    return shown.node.outbox.take(round_id)


@pytest.mark.slow
def test_64_workers_need_no_scrolling_sideways(
    console: Opened, page: Page, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shown.node, "n", MANY)
    expect(page.locator("#workers tbody tr")).to_have_count(MANY)
    assert page.evaluate("document.documentElement.scrollWidth") <= DESK["width"]
    assert console.cut == []


def test_axe_finds_nothing_and_nothing_jumps(console: Opened, page: Page) -> None:
    expect(page.locator("#workers tbody tr")).to_have_count(N)
    expect(page.locator("#events tbody tr").first).to_be_visible()
    assert console.shift <= MOST_SHIFT
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


def test_an_event_that_ends_a_trouble_is_no_trouble(page: Page, shown: Shown) -> None:
    ended = "host1/gpu0 ended (killed by SIGKILL); it is started again."
    over = ("host1/gpu0 is ready again, 7 s after its end.", "host1/gpu0 is ready.")
    for text in (ended, *over):
        shown.services.events.note("worker", text, "host1/gpu0")
    page.get_by_label("Kind").last.select_option("worker")
    for text, level in [(ended, "bad"), *((one, "good") for one in over)]:
        row = page.locator("#events tbody tr").filter(has=page.get_by_text(text, exact=True))
        expect(row.locator(".chip")).to_have_class(f"chip {level}")


def test_a_phone_cuts_nothing_and_does_not_jump(browser: Browser, shown: Shown) -> None:
    shown.node.revive()
    with opened(browser, shown.url, PHONE) as phone:
        expect(phone.page.locator("#health")).to_have_text("OK")
        expect(phone.page.locator("figcaption")).to_contain_text("Nonces per second")
        phone.page.wait_for_timeout(1500)  # a look or two more, which might shift something
        assert phone.cut == []
        assert phone.shift <= MOST_SHIFT


@pytest.mark.slow
def test_the_chart_tells_values_and_why_nonces_fell(page: Page, shown: Shown) -> None:
    now = shown.services.now()
    step = int(now // 480) * 480 - 960
    for index in range(20):
        counts = {"host1/gpu0": 4800} if index > 3 else {"host1/gpu0": 48, CHAT_MS: 960_000}
        shown.services.history.add(step - 480 * index, counts | {CHATS: 2, bucket(0.4): 2})
    page.get_by_role("button", name="24 h").click()
    expect(page.locator("figcaption")).to_contain_text("the last 24 h")
    plot = page.locator(".plot-nonces .u-over")
    box = cast(Any, plot.bounding_box())
    plot.hover(position={"x": box["width"] * 170 / 180, "y": box["height"] / 2})
    expect(page.locator(".readout")).to_contain_text("host1/gpu0 10")
    expect(page.locator(".readout")).to_contain_text("first token in")
    page.get_by_role("button", name="15 min").click()
    expect(page.locator("figcaption")).to_contain_text("the last 15 min")


@pytest.mark.slow
def test_a_validations_page_has_an_address_and_the_distances(page: Page, shown: Shown) -> None:
    node = shown.node
    current = cast(Any, node.rounds.current())
    node.rounds.switch(current, RoundState.STOPPED)
    claimed = {1: "A" * 32, 2: "A" * 32, 3: "P" * 32, 4: "P" * 32}
    job_id = node.jobs.create(new_job([1, 2, 3, 4], claimed=claimed))
    for batch in (0, 1):
        lease_batch(node.jobs, job_id, batch, node.worker(batch).id)
        complete_batch(node.jobs, job_id, batch, ["A" * 32] * 2)
    assert node.jobs.finish(job_id)
    page.get_by_role("link", name=job_id[:8]).first.click()
    expect(page.locator("#verdict")).to_contain_text("2 of 4 differ")
    expect(page.get_by_role("img", name="Histogram of distances")).to_be_visible()
    expect(page.locator("#shares")).to_contain_text("host1/gpu1")
    assert page.url.endswith(f"#/work/{job_id}")
    page.reload()
    expect(page.locator("#verdict")).to_contain_text("fraud")
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    page.go_back()
    expect(page.locator("#workers")).to_be_visible()
    node.start_round()


def test_an_action_on_a_jobs_page_that_is_refused_says_why(
    console: Opened, page: Page, shown: Shown
) -> None:
    job_id = shown.node.jobs.create(new_job([1, 2]))
    shown.node.jobs.create(new_job([3, 4]))
    page.get_by_role("link", name=job_id[:8]).first.click()
    why = "The role read-only may not do this."
    page.route("**/api/v1/pow/generate/*", refuses(403, why))
    page.get_by_role("button", name="Cancel job").click()
    expect(page.get_by_role("alert")).to_have_text(why)
    page.get_by_role("link", name="Back to the overview").click()
    expect(page.locator("#workers")).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)
    console.forgive("403 (Forbidden)")


def refuses(status: int, why: str) -> Callable[[Route], None]:
    return lambda route: route.fulfill(status=status, json={"detail": why})


@pytest.mark.slow
def test_a_range_whose_history_could_not_be_read_is_read_with_the_next_step(
    console: Opened, page: Page
) -> None:
    expect(page.locator("figcaption")).to_contain_text("the last 15 min")
    page.route("**/api/v1/console/history?step=20", refuses(503, "Later."), times=1)
    page.get_by_role("button", name="1 h").click()
    expect(page.locator("figcaption")).to_contain_text("the last 1 h")
    console.forgive("503 (Service Unavailable)")


@pytest.mark.slow
def test_a_drawer_shows_a_workers_log_as_text(page: Page) -> None:
    page.get_by_role("button", name="host1/gpu5", exact=True).click()
    drawer = page.get_by_role("dialog")
    expect(drawer.locator("pre")).to_contain_text("<b>no markup</b>")
    expect(drawer).to_contain_text("7 in all")
    page.keyboard.press("Escape")
    expect(drawer).to_have_count(0)
