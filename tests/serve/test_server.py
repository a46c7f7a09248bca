"""The server in its own process, asked over HTTP by permitted and refused clients."""

import ctypes
import http.client
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from spile.objects import LocalObjects, open_objects
from spile.serve.server import page_files
from support import servers, stored, tiny, web_page

API = ("run", "dataset", "documents", "document?doc=0", "layers", "positions", "channels", "top",
       "similarity", "projection")  # fmt: skip


def test_a_signal_that_comes_to_any_of_its_threads_ends_it(built: web_page.Built) -> None:
    with web_page.served(built.path) as found:
        process = found.process
        tasks = map(int, os.listdir(f"/proc/{process.pid}/task"))
        other = next(task for task in tasks if task != process.pid)  # (numbers begin anew at times)
        assert ctypes.CDLL(None).tgkill(process.pid, other, signal.SIGINT) == 0
        assert process.wait(60) == 0


# -- what is served --------------------------------------------------------------------------


def test_the_page_is_made_of_its_own_files_alone(server: web_page.Served) -> None:
    page = server.ask("/")
    assert page.status == 200
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    for path, (kind, data) in page_files().items():
        answer = server.ask(path)
        assert (answer.status, answer.body) == (200, data)
        assert answer.headers["Content-Type"] == f"{kind}; charset=utf-8"
        assert b"://" not in data.replace(b"http://www.w3.org/2000/svg", b""), "nothing from afar"
    assert not re.search(rb"<script(?![^>]*src=)|style=|\son\w+=", page.body), "nothing inline"


def test_every_answer_forbids_all_but_its_own(server: web_page.Served) -> None:
    for path in ("/", "/style.css", "/api/run", "/nowhere", "/api/document?doc=x"):
        headers = server.ask(path).headers
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'self'; ")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert "Access-Control-Allow-Origin" not in headers
        assert "Python" not in headers["Server"]


def test_the_run_and_the_dataset_are_told(server: web_page.Served, built: web_page.Built) -> None:
    run = server.api("run")
    assert (run["state"], run["units"], run["units_done"]) == ("complete", 3, 3)
    assert run["tokens"] == sum(map(len, built.index))
    assert run["recipe"]["taps"] == list(web_page.TAPS)
    told = server.api("dataset")
    assert [tap["name"] for tap in told["taps"]] == list(web_page.TAPS)
    assert told["no_text"] is None
    assert told["read"]["rows"] == told["read"]["all"] == told["rows"]


def test_layers_positions_and_channels_are_told(server: web_page.Served) -> None:
    layers = {each["tap"]: each for each in server.api("layers")["taps"]}
    assert layers["resid_post.0"]["largest"] > 500
    assert all(each["nonfinite"] == 0 for each in layers.values())
    bins = server.api("positions", tap="resid_post.0")["bins"]
    assert bins[0]["from"] == bins[0]["to"] == 0
    assert bins[0]["norm"] > 10 * bins[1]["norm"], "the sink"
    assert [b["from"] for b in bins[1:]] == [b["to"] + 1 for b in bins[:-1]]
    channels = server.api("channels", tap="resid_post.0")["channels"]
    assert channels[0]["channel"] == web_page.LOUD
    sizes = [each["largest"] for each in channels]
    assert sizes == sorted(sizes, reverse=True)
    by_mean = server.api("channels", tap="resid_post.0", by="mean")["channels"]
    assert [abs(c["mean"]) for c in by_mean] == sorted(abs(c["mean"]) for c in by_mean)[::-1]


def test_latents_are_told_by_id_and_their_ranks_by_nothing(tmp_path: Path, model: Path) -> None:
    built = web_page.build_latents(tmp_path / "out", model, web_page.texts())
    with web_page.served(built.path) as server:
        web_page.read_all(server)
        taps = {tap["name"]: tap["latents"] for tap in server.api("dataset")["taps"]}
        assert taps == {web_page.LATENT_TAP: 40, "mlp_out.1": None}, "ids are no tap of their own"
        told = server.wait("latents", lambda told: told["truncated"] is not None)
        assert told["latents"][0]["latent"] == web_page.LOUD_LATENT
        largest = [each["largest"] for each in told["latents"]]
        assert largest == sorted(largest, reverse=True)
        assert (told["total"], told["stored"], told["silent"]) == (40, 4, 8)
        assert sum(each["latents"] for each in told["shares"]) == 32
        assert all(each["from"] < each["to"] for each in told["shares"])
        fires = [each["fires"] for each in server.api("latents", by="fires")["latents"]]
        assert fires == sorted(fires, reverse=True)
        for name in ("resid_post.1", "resid_post_latent_ids.1", web_page.LATENT_TAP):
            top = server.api("top", tap=name, latent=web_page.LOUD_LATENT)
            assert (top["tap"], top["latent"]) == (web_page.LATENT_TAP, web_page.LOUD_LATENT)
        loud = top["hits"][0]
        row = server.api("token", doc=loud["doc"], token=loud["offset"])["latents"]
        assert row[0]["latent"] == web_page.LOUD_LATENT
        assert row[0]["value"] == loud["value"]
        layers = {each["tap"]: each["kurtosis"] for each in server.api("layers")["taps"]}
        assert layers[web_page.LATENT_TAP] is None
        made = server.wait("similarity", lambda told: not told["making"])["value"]
        assert made["taps"] == ["mlp_out.1"]
        for name in API:
            server.api(name.partition("?")[0], **({"doc": 0} if "doc=0" in name else {}))
        server.api("positions", tap=web_page.LATENT_TAP)
        for wrong in ("channels", "projection"):
            refused = server.ask(f"/api/{wrong}?tap={web_page.LATENT_TAP}")
            assert (refused.status, "see the page Latents" in refused.json["error"]) == (400, True)
        for wrong in ("latents?tap=mlp_out.1", "top?tap=resid_post.1&latent=40", "latents?by=rank",
                      "token?doc=0&token=99999"):  # fmt: skip
            assert server.ask(f"/api/{wrong}").status == 400, wrong
        narrow = server.hand_in(web_page.vector(4))
        assert (narrow.status, "the taps have 5" in narrow.json["error"]) == (400, True)


def test_similarity_and_projection_are_made_in_the_background(server: web_page.Served) -> None:
    made = server.wait("similarity", lambda told: not told["making"])["value"]
    assert made["taps"] == list(web_page.TAPS)
    assert [made["cka"][n][n] for n in range(3)] == pytest.approx([1, 1, 1], abs=1e-3)
    assert made["cosine"][0][1] is None, "of other widths"
    for first, least in (("with", 0), ("without", 1)):
        asked = {"tap": "resid_post.1", "first": first}
        told = server.wait("projection", lambda told: not told["making"], **asked)
        made = told["value"]
        assert len(made["x"]) == len(made["y"]) == len(made["piece"]) == len(made["norm"]) > 100
        assert min(made["position"]) == least
        assert 0 < made["shares"][1] <= made["shares"][0] <= 1


def test_a_direction_is_handed_in_and_colours_tokens(server: web_page.Served) -> None:
    answer = server.hand_in(web_page.vector(), "my <b>.npy".replace(" ", "%20"))
    assert answer.status == 200, answer.body
    number = answer.json["id"]
    assert {"id": number, "name": "my <b>.npy", "width": 12} in answer.json["directions"]
    told = server.api("document", doc=0, tap="resid_post.0", by="direction", direction=number)
    assert told["scale"]["signed"]
    assert len(told["values"]) == told["tokens"]
    narrow = server.ask(f"/api/document?doc=0&tap=mlp_out.1&by=direction&direction={number}")
    assert narrow.status == 400
    assert "12 values, but the tap has 5" in narrow.json["error"]


def test_hostile_text_comes_as_json_and_nothing_else(server: web_page.Served) -> None:
    answer = server.ask("/api/document?doc=3")
    assert answer.headers["Content-Type"] == "application/json; charset=utf-8"
    assert "".join(answer.json["pieces"][1:]) == web_page.HOSTILE


def test_head_has_no_body(server: web_page.Served) -> None:
    where = urlsplit(server.base)
    connection = http.client.HTTPConnection(where.netloc, timeout=30)
    for _ in range(2):  # on one connection
        connection.request("HEAD", "/api/run")
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (200, b"")
    connection.close()


# -- what is served of -----------------------------------------------------------------------


def test_a_dataset_that_grows_is_shown_as_it_is(tmp_path: Path, model: Path) -> None:
    built = web_page.build_texts(tmp_path / "out", model, web_page.texts(), commit=())
    with web_page.served(built.path) as server:
        assert server.api("run")["state"] == "unfinished"
        assert server.api("dataset")["rows"] == 0
        for name in API:
            if name != "document?doc=0":
                server.api(name)
        built.commit(1)
        server.wait("dataset", lambda told: told["rows"] == len(built.index[1]))
        assert server.api("documents")["total"] == 10
        assert server.api("document", doc=12)["tokens"] > 0
        assert server.ask("/api/document?doc=0").status == 404
        built.commit(0, 2)
        server.wait("run", lambda told: told["state"] == "complete")
        web_page.read_all(server)
        hits = server.api("top", tap="resid_post.0", channel=web_page.LOUD)["hits"]
        assert hits[0]["doc"] == 3, "rows are found again, though their numbers have changed"
        assert server.api("document", doc=0)["tokens"] > 0


def test_every_kind_of_row_is_shown(tmp_path: Path) -> None:
    for name, taps in (("shaped", stored.SHAPED), ("scaled", stored.SCALED)):
        written = stored.build(
            tmp_path / name, taps=taps, where="pos >= 1", compress=name == "scaled"
        )
        with web_page.served(written.path) as server:
            web_page.read_all(server)
            assert "no usable tokenizer.json" in server.api("dataset")["no_text"]
            for tap in written.table.taps:
                told = server.api("document", doc=0, tap=tap)
                assert told["pieces"] == [str(each) for each in told["ids"]]
                for name in (
                    () if "expert_ids" in tap else ("positions", "channels", "top", "projection")
                ):
                    server.api(name, tap=tap)


def test_a_bucket_is_shown_through_a_cache(
    built: web_page.Built, tmp_path: Path, model: Path
) -> None:
    url = servers.new_s3_store()
    bucket = open_objects(url)
    for key in LocalObjects(built.path).list():
        bucket.create(key, (built.path / key).read_bytes())
    with web_page.served(url, "--cache", str(tmp_path / "cache")) as server:
        web_page.read_all(server)
        assert server.api("run")["state"] == "complete"
        assert "".join(server.api("document", doc=3)["pieces"][1:]) == web_page.HOSTILE
        assert server.api("top", tap="resid_post.0", channel=3)["hits"][0]["doc"] == 3
        assert [each["doc"] for each in server.api("documents", q="needle")["documents"]] == [5]
    assert any((tmp_path / "cache").rglob("*.piece"))


@pytest.mark.full
def test_a_million_tokens_are_answered_for_at_once(
    large: web_page.Built, record_property: Callable[[str, object], None]
) -> None:
    with web_page.served(large.path) as server:
        web_page.read_all(server)
        assert server.api("dataset")["rows"] == 1 << 20
        asked = [*API, "documents?start=2000", "documents?q=text%2017", "documents?q=ab",
                 "document?doc=1700&by=channel&channel=3", "top?channel=9&end=low",
                 "channels?by=kurtosis&tap=resid_post.1", "latents", "latents?by=fires",
                 "top?tap=mlp_out.0&latent=77", "token?doc=1700&token=9",
                 "document?doc=1700&tap=mlp_out.0&by=latent&latent=77"]  # fmt: skip
        for name in ("similarity", "projection"):
            server.wait(name, lambda told: not told["making"])
        took: dict[str, float] = {}
        for name in asked:  # the better of three: others use these processors, too
            took[name] = min(server.ask(f"/api/{name}").milliseconds for _ in range(3))
        record_property("milliseconds", json.dumps(took))
        assert max(took.values()) < 200, took


# -- the command -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere"], 3, "no dataset there"),
        (["OUT", "--port", "70000"], 2, "--port must be"),
        (["OUT", "--read", "much"], 2, "--read must be a size"),
        (["OUT", "--token", "short"], 2, "--token must be 16"),
        (["OUT", "--token", "sixteen letters; x"], 2, "--token must be 16"),
        (["OUT", "--host", "198.51.100.1", "--insecure"], 2, "cannot listen on 198.51.100.1"),
        (["OUT", "--host", "0.0.0.0"], 2, "give --tls-cert FILE --tls-key FILE, or --insecure"),
        (["OUT", "--tokenizer", "nowhere"], 2, "--tokenizer nowhere: no usable"),
        (["OUT", "--cache", "kept"], 2, "a cache is for buckets"),
    ],
)
def test_what_cannot_be_served_is_said_in_one_line(
    built: web_page.Built, tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    given = [str(built.path) if each == "OUT" else each for each in arguments]
    result = tiny.spile("serve", *given, check=False, cwd=tmp_path)
    assert result.returncode == code
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr


def test_a_port_that_is_taken_is_said(built: web_page.Built, server: web_page.Served) -> None:
    port = str(urlsplit(server.base).port)
    result = tiny.spile("serve", str(built.path), "--port", port, check=False)
    assert result.returncode == 2
    assert "try --port 0" in result.stderr
