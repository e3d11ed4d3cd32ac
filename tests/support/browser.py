# SPDX-License-Identifier: Apache-2.0
"""A real browser for tests of pages: Debian's packages chromium and chromium-driver."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
SECONDS = 20  # for what the page does after a click, on a machine that is busy


def missing() -> str:
    """Why no page can be opened here; "" if one can."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "needs Selenium (the extra dev)"
    names = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"needs {' and '.join(names)} (apt-get install chromium chromium-driver)" * bool(names)


class Browser:
    """Chromium with its own profile. Animations are off: tests wait for states, not for time."""

    def __init__(self, profile: Path) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.options import Options
        from selenium.webdriver.chrome.service import Service

        options = Options()
        options.binary_location = shutil.which("chromium") or ""
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        service = Service(shutil.which("chromedriver"))
        self.driver = webdriver.Chrome(options=options, service=service)

    def close(self) -> None:
        self.driver.quit()

    def open(self, page: Path, width: int = 1280, height: int = 900, theme: str = "light") -> None:
        """Open a page of q2compile, and wait until its scripts have run. theme: the system's."""
        self.size(width, height)
        features = [("prefers-color-scheme", theme), ("prefers-reduced-motion", "reduce")]
        self.driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": name, "value": value} for name, value in features]},
        )
        self.driver.get("about:blank")  # another fragment does not reload a page
        self.driver.get(page.resolve().as_uri())
        self.until("return document.documentElement.dataset.ready")

    def size(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def js(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def until(self, script: str, *arguments: Any) -> Any:
        """The value of ``script``, once it is true."""
        from selenium.webdriver.support.ui import WebDriverWait

        wait = WebDriverWait(self.driver, SECONDS, poll_frequency=0.02)
        return wait.until(lambda driver: driver.execute_script(script, *arguments), script)

    def find(self, css: str, text: str = "") -> Any:
        """The first element on the page for a selector, whose text is, or begins with, ``text``."""
        script = (
            "return [...document.querySelectorAll(arguments[0])].find((element) => "
            "element.getClientRects().length && element.textContent.startsWith(arguments[1]))"
        )
        return self.until(script, css, text)

    def texts(self, css: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
        found: list[str] = self.js(script, css)
        return found

    def click(self, css: str, text: str = "") -> None:
        element = self.find(css, text)
        self.js("arguments[0].scrollIntoView({block: 'center'})", element)
        element.click()

    def press(self, *keys: str) -> None:
        """Keys for whatever has the focus: names of selenium's Keys, or characters."""
        from selenium.webdriver import ActionChains, Keys

        actions = ActionChains(self.driver)
        for key in keys:
            actions = actions.send_keys(getattr(Keys, key) if key.isupper() else key)
        actions.perform()

    def errors(self) -> list[str]:
        """The page's console messages since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def overhang(self) -> int:
        """Pixels by which the page is wider than the screen."""
        script = "const e = document.documentElement; return e.scrollWidth - e.clientWidth"
        return int(self.js(script))
