"""A real browser for tests of pages."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@contextmanager
def started(size: str = "1280,1400") -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="`make test-chromium` installs selenium")
    options = webdriver.ChromeOptions()
    for flag in (*FLAGS, f"--window-size={size}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    options.binary_location = "/usr/bin/chromium"
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService("/usr/bin/chromedriver"))
    try:
        yield driver
    finally:
        driver.quit()


def errors(driver: Any) -> list[dict[str, Any]]:
    """What the console complained of since the last time."""
    return [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
