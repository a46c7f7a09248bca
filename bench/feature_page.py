"""The page of features in Chromium: until it opens, until the next one, and until a search is told.

python bench/features.py --rows 2000000 --out DIR     (twice: it makes the dataset, then counts it)
python bench/feature_page.py --out DIR

starts `spile serve` and prints one line of JSON, in milliseconds. `first`: from opening the page
until a feature is shown with its rows in context, when the server has just started. The others are
medians of `--turns`: the next page of the list, another feature, a token that is searched for.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from playwright.sync_api import Page, expect, sync_playwright

LONGEST = 120_000  # milliseconds


def taken(act: Callable[[], None], shown: Callable[[], None]) -> float:
    begun = time.perf_counter()
    act()
    shown()
    return round((time.perf_counter() - begun) * 1000, 1)


def measured(page: Page, url: str, turns: int) -> dict[str, object]:
    rows = page.locator("table.pick tbody tr")
    chosen = page.get_by_label("Feature", exact=True)
    hits = page.locator("article .top li .token[aria-current]")

    def feature() -> str:
        return rows.nth(1).locator("button").inner_text().replace(",", "")

    def shows(number: str) -> None:
        expect(chosen).to_have_value(number)
        expect(hits.first).to_be_visible()

    def other(at: int) -> float:
        wanted = rows.nth(at).locator("button").inner_text().replace(",", "")
        return taken(rows.nth(at).locator("button").click, lambda: shows(wanted))

    def following() -> float:
        before = feature()
        button = page.get_by_role("button", name="Next")
        return taken(button.click, lambda: expect(rows.nth(1).locator("button")).not_to_have_text(
            f"{int(before):,}"))  # fmt: skip

    def search(token: str) -> float:
        page.get_by_label("Find features").fill(token)
        told = page.locator("aside .quiet").first
        press = lambda: page.keyboard.press("Enter")  # noqa: E731
        return taken(press, lambda: expect(told).to_contain_text("most fitting first"))

    first = taken(lambda: page.goto(f"{url}#features"), lambda: expect(hits.first).to_be_visible())
    pages = [following() for _ in range(turns)]
    others = [other(at) for at in range(2, 2 + turns)]
    searches: list[float] = []
    for token in range(1, 1 + turns):
        page.goto(f"{url}#features?by=id")
        expect(page.locator("aside .quiet").first).to_contain_text("are active in some of")
        searches.append(search(str(token)))
    medians = {"next page": pages, "another feature": others, "a token": searches}
    return {"first": first, **{name: statistics.median(each) for name, each in medians.items()}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--turns", type=int, default=9)
    asked = parser.parse_args()
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    command = [sys.executable, "-m", "spile.cli", "serve", asked.out, "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["url"]
        try:
            with sync_playwright() as playwright:
                args = ["--no-sandbox", "--disable-gpu"]
                found = playwright.chromium.launch(executable_path=browser, args=args)
                page = found.new_context(viewport={"width": 1300, "height": 850}).new_page()
                expect.set_options(timeout=LONGEST)
                print(json.dumps(measured(page, url, asked.turns)))
                found.close()
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
