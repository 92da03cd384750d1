"""The page in a real browser: it draws, shows the right numbers, and the console stays silent."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import started
from replay import sample

from coslice.replay.page import render

pytestmark = pytest.mark.chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    with started() as driver:
        yield driver


def _open(browser: object, page: Path) -> None:
    browser.get(page.as_uri())  # type: ignore[attr-defined]
    assert browser.execute_script("return document.documentElement.dataset.ready") == "1"  # type: ignore[attr-defined]
    errors = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]  # type: ignore[attr-defined]
    assert errors == []


def _text(browser: object, selector: str) -> list[str]:
    found = browser.find_elements("css selector", selector)  # type: ignore[attr-defined]
    return [element.text for element in found]


def test_the_demo_page_shows_the_figures_of_its_summary(browser: object, tmp_path: Path) -> None:
    render(sample.write(tmp_path / "journal.jsonl", demo=True), tmp_path / "page.html")
    _open(browser, tmp_path / "page.html")
    tiles = _text(browser, ".tile b")
    assert tiles[:4] == ["87.5 %", "45 / 44 %", "89.0 %", "1.02 / 1.03"]
    assert "45.0 %" in tiles
    assert "identical" in tiles
    kinds = browser.execute_script(  # type: ignore[attr-defined]
        "return [...document.querySelectorAll('#group0 rect.iv')].map(r => r.classList[1]).sort()"
    )
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        "held": 6,
        "waiting": 2,
        "swapping": 2,
        "off": 1,
    }


def test_bars_stand_where_the_journal_says(browser: object, tmp_path: Path) -> None:
    """job-b holds the seconds 3 to 5 of 8: its bar covers that share of the lane."""
    render(sample.write(tmp_path / "journal.jsonl"), tmp_path / "page.html")
    _open(browser, tmp_path / "page.html")
    x, width, lane = browser.execute_script(  # type: ignore[attr-defined]
        "const t = views[0], w = t.width();"
        "const held = [...t.svg.querySelectorAll('rect.held')];"
        "const r = held.filter(r => r.getAttribute('fill') === color('job-b'))[0];"
        "return [(+r.getAttribute('x') - LEFT) / w, +r.getAttribute('width') / w, w]"
    )
    assert lane > 500
    assert x == pytest.approx(3 / 8, abs=0.005)
    assert width == pytest.approx(2 / 8, abs=0.005)


def test_hovering_tells_the_details_and_zoom_keeps_the_middle(browser: object, tmp_path: Path) -> None:
    webdriver = pytest.importorskip("selenium.webdriver")
    render(sample.write(tmp_path / "journal.jsonl"), tmp_path / "page.html")
    _open(browser, tmp_path / "page.html")
    bar = browser.find_elements("css selector", "#group0 rect.swapping")[0]  # type: ignore[attr-defined]
    webdriver.ActionChains(browser).move_to_element(bar).perform()
    tip = _text(browser, "#tip")[0]
    assert "swap to job-b" in tip
    assert "3.0 MiB moved" in tip
    browser.find_element("css selector", "#panels button").click()  # type: ignore[attr-defined]
    assert browser.execute_script("return views[0].window") == [102, 106]  # type: ignore[attr-defined]
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []  # type: ignore[attr-defined]


def test_a_torn_journal_says_so_on_the_page(browser: object, tmp_path: Path) -> None:
    render(sample.write(tmp_path / "journal.jsonl", torn=True), tmp_path / "page.html")
    _open(browser, tmp_path / "page.html")
    assert "cut in the middle" in _text(browser, "footer")[0]


def test_a_simulated_day_is_drawn_and_zooms_by_wheel_and_keys(browser: object, tmp_path: Path) -> None:
    from coslice.simulate.run import simulate
    from coslice.simulate.spec import Pool, Scenario, alternating, whole_swap

    jobs = (alternating("a", 100.0, 200.0), alternating("b", 150.0, 250.0))
    scenario = Scenario(pools=(Pool(name="pool"),), jobs=jobs, cost=whole_swap(10), until=20_000.0)
    simulate(scenario, journal=tmp_path / "journal.jsonl")
    render(tmp_path / "journal.jsonl", tmp_path / "page.html")
    _open(browser, tmp_path / "page.html")
    run = browser.execute_script  # type: ignore[attr-defined]
    before = run("const t = views[0]; t.show(...t.full); return t.window")
    assert before[1] - before[0] == pytest.approx(20_000.0, rel=0.05)
    run(
        "const r = views[0].svg.getBoundingClientRect();"
        "views[0].svg.dispatchEvent(new WheelEvent('wheel', {ctrlKey: true, deltaY: -100,"
        " clientX: r.left + LEFT + views[0].width() / 2, clientY: r.top + 5,"
        " bubbles: true, cancelable: true}))"
    )
    wheel = run("return views[0].window")
    assert wheel[1] - wheel[0] == pytest.approx(0.8 * (before[1] - before[0]), rel=0.01)
    assert sum(wheel) / 2 == pytest.approx(sum(before) / 2, rel=0.01)
    svg = browser.find_elements("css selector", "#panels svg")[0]  # type: ignore[attr-defined]
    svg.send_keys("+")
    keys = run("return views[0].window")
    assert keys[1] - keys[0] == pytest.approx(0.8 * (wheel[1] - wheel[0]), rel=0.01)
    svg.send_keys("0")
    assert run("return views[0].window") == before
    assert run("return views[0].svg.querySelectorAll('rect.held').length") > 50
