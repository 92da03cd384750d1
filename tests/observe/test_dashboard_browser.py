"""The dashboard in a real browser: 200 live groups in which jobs take turns all the time."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import observe.busy
import pytest
from chromium import errors, started

from coslice.cli.security import make_token
from coslice.security import tokens

pytestmark = pytest.mark.chromium
GROUPS = 200
MEASURED_S = 12.0
Run = Callable[[str], Any]


@contextmanager
def busy(*flags: str) -> Iterator[str]:
    """The address of a dashboard."""
    with serving(*flags) as (address, _):
        yield address


@contextmanager
def serving(*flags: str) -> Iterator[tuple[str, int]]:
    """Its address, and the process."""
    script = str(Path(observe.busy.__file__))
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(Path(script).parents[1])])
    process = subprocess.Popen(
        [sys.executable, script, *flags],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split()[0], process.pid
    finally:
        process.stdin.close()
        process.wait(30)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    flags = ("--groups", str(GROUPS), "--jobs", "80", "--hold", "0.5", "--swap", "0.05", "--trouble")
    with busy(*flags) as address:
        yield address


@pytest.fixture(scope="module")
def browser(url: str) -> Iterator[Any]:
    with started("1400,900") as driver:
        driver.execute_cdp_cmd("Performance.enable", {})
        driver.get(url)
        yield driver


@pytest.fixture
def run(browser: Any) -> Iterator[Run]:
    yield browser.execute_script
    assert errors(browser) == []


def until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():  # a browser tells the test nothing by itself
        assert time.monotonic() < end
        time.sleep(0.05)  # see above: the browser is asked


def press(browser: Any, *keys: str) -> None:
    webdriver = pytest.importorskip("selenium.webdriver")
    webdriver.ActionChains(browser).send_keys(*keys).perform()


def test_200_live_groups_update_more_than_30_times_a_second_and_nothing_is_missing(
    browser: Any, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    until(lambda: run("return feed.groups.size") == GROUPS)
    seen = (
        "return [feed.updates, feed.changes, feed.seq, feed.snapshots, feed.gaps, performance.now() / 1000]"
    )

    def cpu() -> float:
        found = browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        return float(next(one["value"] for one in found if one["name"] == "TaskDuration"))

    before, used = run(seen), cpu()
    time.sleep(MEASURED_S)  # a rate is measured over time
    after, used = run(seen), cpu() - used
    updates, changes, passed, seconds = (after[n] - before[n] for n in (0, 1, 2, 5))
    with capsys.disabled():
        print(
            f"\n{updates / seconds:.0f} updates/s in {changes / seconds:.0f} messages/s, "
            f"page: {100 * used / seconds:.0f} % of a core"
        )
    assert changes == passed
    assert after[3:5] == [1, 0]  # one snapshot, no gap
    assert updates / seconds >= 30
    assert run("return document.querySelectorAll('#groups .row').length") == GROUPS
    assert run("return document.querySelectorAll('#groups .row svg path').length") > 20


def test_the_keyboard_chooses_opens_tells_a_story_and_closes(browser: Any, run: Run) -> None:
    until(lambda: run("return page.order.length") == GROUPS)
    run("document.getElementById('groups').focus()")
    press(browser, "j", "j", "k", "j")
    assert run("return document.querySelector('[aria-selected=true]').dataset.group") == "group-001"
    press(browser, "\ue007")
    assert run("return document.querySelector('aside h2').textContent") == "group-001"
    until(lambda: run("return document.querySelectorAll('aside #line rect.held').length > 1"))
    assert run("return document.querySelectorAll('aside tbody button').length") > 1
    run("document.querySelector('aside tbody button').focus()")
    press(browser, "\ue007")
    until(lambda: run("return document.querySelectorAll('.story p').length") > 2)
    press(browser, "\ue00c")
    assert run("return document.querySelector('.story').hidden") is True
    press(browser, "\ue00c")
    assert run("return document.getElementById('detail').hidden") is True
    press(browser, "/", "group-19")
    until(lambda: run("return document.querySelectorAll('#groups .row').length") == 10)
    press(browser, "\ue00c")
    until(lambda: run("return document.querySelectorAll('#groups .row').length") == GROUPS)
    press(browser, " ")
    still = run("return [page.still, now()]")
    assert still[0] == still[1] == run("return now()")
    press(browser, " ")
    assert run("return page.still") is None


def test_trouble_is_visible_and_can_be_sorted_to_the_top(browser: Any, run: Run) -> None:
    said = "return [...feed.groups.values()].flatMap(g => g.row.trouble).join('\\n')"
    until(lambda: "faulted: the restore ran out of memory" in run(said))
    assert run("return document.getElementById('sort').value") == "name"
    run("document.getElementById('groups').focus()")
    press(browser, "s")
    until(lambda: run("return document.querySelectorAll('#groups .row:first-child.trouble').length") == 1)
    press(browser, "\ue011", "\ue007")
    until(lambda: "faulted" in run("return document.querySelector('aside .trouble').textContent"))
    assert run(
        "return [...document.querySelectorAll('aside td.warn')].some(e => e.textContent === 'faulted')"
    )
    run("const s = document.getElementById('span'); s.value = 900; s.dispatchEvent(new Event('change'))")
    until(lambda: run("return document.querySelectorAll('aside path.mark').length") > 0)
    press(browser, "\ue00c")


def test_drained_nodes_are_counted_marked_and_found(browser: Any, run: Run) -> None:
    figure = "return [...document.querySelectorAll('#figures div')].map(d => d.textContent)"
    until(lambda: "nodes drained1" in run(figure))
    run("document.getElementById('groups').focus()")
    press(browser, "/", "drained")
    until(lambda: run("return page.order") == [f"group-{GROUPS - 1}"])
    until(lambda: run("return document.querySelector('.row .out').textContent") == "spare drained")
    assert "drained by ada (new fan)" in run("return document.querySelector('#groups .row').title")
    press(browser, "\ue00c")


def test_who_leads_and_who_stands_by(run: Run) -> None:
    """What the page says of a roster that is made here."""
    said = run(
        "feed.seats = [{ address: 'a:1', leads: true, since: feed.now(clock()), term: 4 },"
        " { address: 'b:1', leads: false, since: 0, term: 0 }]; figures();"
        "return document.getElementById('seats').textContent"
    )
    assert said == "a:1 leads for 0.0 s (term 4); standing by: b:1"
    until(lambda: run("figures(); return document.getElementById('seats').textContent") == "")


def test_light_and_dark(browser: Any, run: Run) -> None:
    def brightness(scheme: str) -> int:
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        return int(run("return getComputedStyle(document.body).backgroundColor.match(/\\d+/g)[0]"))

    assert brightness("dark") < 60
    assert brightness("light") > 200


def test_a_missing_message_is_counted_and_asks_for_a_snapshot(run: Run) -> None:
    """The page's own rule, on messages made here."""
    assert run(
        "const f = new Feed(), m = seq => ({ seq, now: 1, orchestrator: 'o', groups: [], gone: [] });"
        "return [f.take('snapshot', m(5), 0), f.take('change', m(6), 0), f.take('change', m(6), 0),"
        " f.take('change', m(8), 0), f.gaps, f.seq]"
    ) == [[], [], [], None, 1, 6]


def test_events_come_in_any_pieces(run: Run) -> None:
    assert run(
        "const heard = [], e = new Events((k, m) => heard.push([k, m]));"
        "const text = 'id: 1\\nevent: change\\ndata: {\"a\": 1}\\n\\n: beat\\n\\ndata: 2\\n\\n';"
        "for (const c of text) e.push(c);"
        "return heard"
    ) == [["change", {"a": 1}], ["message", 2]]


def test_a_stream_that_breaks_is_taken_up_again(browser: Any, run: Run) -> None:
    snapshots = run("feed.seq = -7; return feed.snapshots")  # so the next message is one too many
    until(lambda: run("return feed.snapshots") > snapshots)
    assert run("return feed.gaps") >= 1
    changes = run("return feed.changes")
    until(lambda: run("return feed.changes") > changes)
    assert run("return feed.groups.size") == GROUPS


def test_where_a_token_is_asked_for_the_page_asks_for_it(browser: Any, tmp_path: Path) -> None:
    tokens.create_secret(tmp_path / "secret")
    with busy("--groups", "3", "--jobs", "2", "--token-secret", str(tmp_path / "secret")) as address:
        browser.get(address)
        run = browser.execute_script
        until(lambda: run("return !document.getElementById('ask').hidden"))
        press(browser, "wrong", "\ue007")
        until(lambda: "not accepted" in run("return document.getElementById('why').textContent"))
        press(browser, make_token("", secret=tmp_path / "secret", role="read", ttl="1h"), "\ue007")
        until(lambda: run("return feed.groups.size") == 3)
        assert run("return document.getElementById('ask').hidden") is True
        assert all("401" in entry["message"] for entry in errors(browser))  # the two refusals, nothing else


def test_an_orchestrator_that_falls_silent_is_not_shown_as_live(browser: Any) -> None:
    """As when a network is gone: no connection ends."""
    with serving("--groups", "20", "--jobs", "8", "--hold", "0.1") as (address, pid):
        browser.get(address)
        run = browser.execute_script
        until(lambda: run("return feed.groups.size === 20 && page.link") == "live")
        run("page.silent_s = 1")
        os.kill(pid, signal.SIGSTOP)
        try:
            until(lambda: run("return page.link") == "no connection; trying again")
        finally:
            os.kill(pid, signal.SIGCONT)
        until(lambda: run("return feed.snapshots >= 2 && page.link") == "live")
