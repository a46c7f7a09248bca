"""circuit-tracer's own scripts draw our packed features, with the Hub's host routed to loopback.

SPILE_CIRCUIT_TRACER names a folder with the package `circuit_tracer` (0.5.0, unpacked from its
wheel) and the scripts that its page loads from elsewhere, of npm's packages: `d3.js`
(`dist/d3.min.js` of d3 7.9), `jetpack.js` (`build/d3-jetpack.cjs` of d3-jetpack 2.3) and `pako.js`
(`dist/pako.min.js` of pako 2.2). The graph around a feature needs a jetpack that npm does not have,
so the page here has the part of `index.html` that draws the chosen feature.
"""

import functools
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import spile
from spile.interop.export import export
from support import web_page
from support.hub_server import Hub

pytest.importorskip("playwright", reason="the page is driven by playwright, which is not installed")
from playwright.sync_api import Page, Route, expect, sync_playwright  # noqa: E402

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
REPO, LAYER = "me/transcoders", 1
# A module that extends d3, as a script of the page does.
_WITHIN_D3 = """(function () {
  const exports = {}, module = {exports}, require = () => d3;
  CODE;
  Object.assign(d3, exports)
})()"""
_SCRIPTS = ("d3", "jetpack", "pako", "feature_examples", "util")

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here"),
]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None: ...


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    yield server
    server.shutdown()
    server.server_close()


@contextmanager
def opened(site: Path, hub: Hub) -> Iterator[Page]:
    """A browser in which the Hub is on loopback, and scripts from elsewhere are local files."""

    def elsewhere(route: Route) -> None:
        name = re.split(r"[_.]", route.request.url.rpartition("/")[2])[0]
        file = site / f"{name}.js"
        code = file.read_text() if file.is_file() else ""
        code = _WITHIN_D3.replace("CODE", code) if name == "jetpack" else code
        route.fulfill(body=code, content_type="text/javascript")

    def to_the_hub(route: Route) -> None:
        path = route.request.url.removeprefix("https://huggingface.co")
        found = route.fetch(url=hub.url + path, method="GET")
        allowed = {**found.headers, "access-control-allow-origin": "*"}
        route.fulfill(status=found.status, body=found.body(), headers=allowed)

    with sync_playwright() as playwright:
        args = ["--no-sandbox", "--disable-gpu"]
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=args)
        page = found.new_context(viewport={"width": 1400, "height": 1000}).new_page()
        page.route(re.compile("^https://"), elsewhere)
        page.route(re.compile("^https://huggingface.co/"), to_the_hub)
        yield page
        found.close()


def test_a_feature_is_drawn_with_its_examples(counted: Path, tmp_path: Path, hub: Hub) -> None:
    given = os.environ.get("SPILE_CIRCUIT_TRACER")
    if not given:
        pytest.skip("SPILE_CIRCUIT_TRACER does not name a folder with circuit-tracer's page")
    shutil.copytree(Path(given, "circuit_tracer/frontend/assets"), tmp_path / "site")
    whole = (tmp_path / "site/index.html").read_text()
    lines = re.findall(r"<link rel=.*?>|<script src=.*?</script>", whole)
    kept = [line for line in lines if "link" in line[:6] or any(s in line for s in _SCRIPTS)]
    kept = [line for line in kept if "attribution_graph" not in line.partition("src=")[2][:40]]
    (tmp_path / "site/feature.html").write_text(f"<!DOCTYPE html>{''.join(kept)}<div id='it'>")
    export(str(counted), tmp_path / "dest", to="circuit-tracer")
    packed = sorted((tmp_path / "dest/features").iterdir())
    hub.publish(f"models/{REPO}", {f"features/{p.name}": p.read_bytes() for p in packed})
    known, latent = spile.open(counted).features(f"resid_post.{LAYER}"), web_page.LOUD_LATENT
    total = LAYER + latent
    errors: list[str] = []
    with serving(tmp_path / "site") as url, opened(Path(given), hub) as page:
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"{url}/feature.html")
        page.evaluate(
            "([scan, index]) => initFeatureExamples({containerSel: d3.select('#it')})"
            ".renderFeature(scan, index)",
            [REPO, total * (total + 1) // 2 + latent],
        )
        titles = page.locator(".quantile-title")
        expect(titles.first).to_contain_text("Top activations")
        assert titles.count() == 1 + len(known.bands(latent))
        shown = page.locator(".example-2-col > div").first.locator(".ctx-container")
        assert shown.count() == len(known.top(latent))
        token = shown.first.locator(".train_token_ind")
        assert web_page.LOUD_TOKEN in token.inner_text()
        assert token.evaluate("e => e.style.background").startswith("rgb("), "by its activation"
        if picture := os.environ.get("SPILE_PICTURE"):
            page.screenshot(path=picture)
    assert [path for _, path, _ in hub.seen if path.endswith(f"layer_{LAYER}.bin")]
    assert errors == []
