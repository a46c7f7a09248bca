"""One reader for many trainers: all get the same batches, and none is stopped by another's end."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.flight as flight
import pytest
import xxhash

import spile
from spile import cli
from spile.core.errors import ConfigError, StoreError
from spile.core.listening import ListenAddress
from spile.dataset.format import TapInfo
from spile.dataset.read.window import Encoded
from spile.interop.flight.client import connect
from spile.interop.flight.server import Fanout, RowServer
from support import certificates, stored, tiny, zygote

LENGTHS = ((700, 300), (900,), (0,), (257, 600), (401,))
OPTIONS: dict[str, Any] = {"seed": 3, "window": 1024}


@pytest.fixture(scope="module")
def ds(tmp_path_factory: pytest.TempPathFactory) -> spile.Dataset:
    path = tmp_path_factory.mktemp("served") / "out"
    taps = {**stored.SCALED, "resid_post.1": TapInfo((6,), "bfloat16")}
    stored.build(path, LENGTHS, taps=taps, shard_bytes=30_000)
    return spile.open(str(path))


@contextmanager
def serving(
    ds: spile.Dataset, *, batch_size: int = 100, epochs: int | None = 1, **options: Any
) -> Iterator[RowServer]:
    batches = ds.batches(ds.taps, batch_size, encoded=True, epochs=epochs, **OPTIONS)
    server, stop = RowServer(batches, **options), threading.Event()
    thread = threading.Thread(target=server.run, args=(stop,))
    thread.start()
    try:
        yield server
    finally:
        stop.set()
        thread.join(60)
        assert not thread.is_alive()


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        (one[k].dtype, one[k].shape) == (other[k].dtype, other[k].shape)
        and one[k].tobytes() == other[k].tobytes()
        for k in one
    )


_TRAINER = """
import sys, spile, xxhash
url, hang = sys.argv[1], int(sys.argv[2])
for number, batch in enumerate(spile.connect(url)):
    digest = xxhash.xxh3_64()
    for name in sorted(batch):
        digest.update(batch[name].tobytes())
    print(digest.hexdigest(), flush=True)
    if number == hang:
        sys.stdin.read()
"""


def trainer(url: str, hang: int = -1) -> "subprocess.Popen[str]":
    """A process that prints what it gets, and stops taking batches after one of them."""
    return zygote.Popen(
        [sys.executable, "-c", _TRAINER, url, str(hang)], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True, env=tiny.environment(),
    )  # fmt: skip


def digests(ds: spile.Dataset, **options: Any) -> list[str]:
    found = []
    for batch in ds.batches(ds.taps, 100, **OPTIONS, **options):
        digest = xxhash.xxh3_64()
        for name in sorted(batch):
            digest.update(batch[name].tobytes())
        found.append(digest.hexdigest())
    return found


def test_three_trainers_get_every_batch_though_one_is_killed(
    ds: spile.Dataset,
) -> None:
    command = [sys.executable, "-m", "spile.cli", "serve-rows", ds.url, "--batch-size", "100",
               "--seed", "3", "--window", "1024", "--epochs", "3", "--trainers", "4",
               "--port", "0", "--buffer", "2", "--json"]  # fmt: skip
    server = zygote.Popen(command, stdout=subprocess.PIPE, text=True, env=tiny.environment())
    everyone = [server]
    try:
        assert server.stdout
        told = json.loads(server.stdout.readline())
        assert told["token"] is None
        doomed = trainer(told["url"], hang=1)
        others = [trainer(told["url"]) for _ in range(3)]
        everyone += [doomed, *others]
        assert doomed.stdout
        wanted = digests(ds, epochs=3)
        assert [doomed.stdout.readline().strip() for _ in range(2)] == wanted[:2]
        doomed.send_signal(signal.SIGKILL)  # while it holds up the others
        for other in others:
            out, _ = other.communicate(timeout=300)
            assert out.split() == wanted
        assert server.wait(60) == 0, "all was given, and nobody is left"
    finally:
        for process in everyone:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("dtype", [None, "float16", "stored"])
def test_what_comes_is_what_the_dataset_gives(ds: spile.Dataset, dtype: str | None) -> None:
    with serving(ds) as server:
        found = list(connect(server.url, dtype=dtype))
    wanted = list(ds.batches(ds.taps, 100, dtype=dtype, **OPTIONS))
    assert len(found) == len(wanted)
    assert all(map(same, found, wanted))
    assert found[0]["resid_post.1"].dtype.name == {None: "float32", "stored": "bfloat16"}.get(
        dtype, dtype
    )
    assert all(batch["index"].flags.writeable for batch in found)


def test_eight_bits_come_encoded_if_asked_for(ds: spile.Dataset) -> None:
    with serving(ds) as server, connect(server.url, encoded=True) as connection:
        found = next(connection)
    wanted = next(ds.batches(ds.taps, 100, encoded=True, **OPTIONS))
    for tap in ("resid_post.0", "q.1"):
        assert isinstance(found[tap], Encoded)
        for mine, theirs in zip(found[tap], wanted[tap], strict=True):
            assert (mine.dtype, mine.tobytes()) == (theirs.dtype, theirs.tobytes())


def test_a_state_goes_on_here_or_with_the_dataset_itself(ds: spile.Dataset) -> None:
    wanted = list(ds.batches(ds.taps, 100, **OPTIONS))
    # Without an end: of one epoch all may be on its way to the first one, and the server then ends.
    with serving(ds, buffer=3, epochs=None) as server:
        with connect(server.url) as first:
            for _ in range(5):
                next(first)
            state = json.loads(json.dumps(first.state_dict()))
        with connect(server.url) as again:  # at once: the server may not know yet that it had gone
            again.load_state_dict(state)
            rest = [next(again) for _ in wanted[5:]]
        assert all(map(same, rest, wanted[5:]))
    straight = ds.batches(ds.taps, 100, **OPTIONS)
    straight.load_state_dict(state)
    assert same(next(straight), wanted[5])


def test_one_that_comes_back_before_it_is_known_to_have_gone_goes_on(ds: spile.Dataset) -> None:
    batches = ds.batches(ds.taps, 100, **OPTIONS)
    fanout = Fanout(batches, lambda batch: batch, takers=1, buffer=1, patience=60)
    gone = fanout.join(None)
    threading.Timer(0.5, fanout.leave, [gone]).start()
    assert fanout.join({**batches.state_dict(), "position": 500}) > gone


@pytest.mark.full
def test_a_state_no_longer_held_is_refused_while_others_are_connected(
    ds: spile.Dataset,
) -> None:
    with serving(ds, buffer=3, epochs=None) as server, connect(server.url) as other:
        for _ in range(5):
            next(other)
        late = connect(server.url)
        late.load_state_dict(ds.batches(ds.taps, 100, epochs=None, **OPTIONS).state_dict())
        with pytest.raises(StoreError, match="position 0 is no longer held, and others are"):
            next(late)


def test_one_that_takes_nothing_is_left_behind(ds: spile.Dataset) -> None:
    with serving(ds, batch_size=10, trainers=2, buffer=2, patience=1.0) as server:
        slow, fast = flight.connect(server.url), connect(server.url)
        idle = slow.do_get(flight.Ticket(b""))  # its batches fill the pipe, and are never read
        found = []
        reading = threading.Thread(target=lambda: found.extend(fast))
        reading.start()
        reading.join(120)
        assert not reading.is_alive()
        assert sum(len(batch["index"]) for batch in found) == ds.num_tokens
        idle.cancel()
        slow.close()


def test_a_token_is_asked_for(ds: spile.Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(ds, address=ListenAddress(token="sesame")) as server:
        for wrong in (None, "sesam"):
            with pytest.raises(ConfigError, match="token is missing or wrong"):
                next(connect(server.url, token=wrong))
        monkeypatch.setenv("SPILE_TOKEN", "sesame")
        assert len(list(connect(server.url))) == 32
    batches = ds.batches(ds.taps, 100, encoded=True)
    anywhere = RowServer(batches, ListenAddress("0.0.0.0", insecure=True))
    assert anywhere.token
    stop = threading.Event()
    stop.set()
    anywhere.run(stop)


def test_tls_serves_batches_to_clients_with_certificate_and_token(
    ds: spile.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = (certificates.self_signed(tmp_path, name) for name in ("own", "other"))
    address = ListenAddress("0.0.0.0", tls_cert=own.cert, tls_key=own.key)
    with serving(ds, address=address) as server:
        port = server.url.rpartition(":")[2]
        assert server.url.startswith("grpc+tls://")
        url = f"grpc+tls://localhost:{port}"
        with pytest.raises(ConfigError, match="token is missing or wrong"):
            next(connect(url, tls_root_certs=own.cert))
        for wrong in (None, other.cert):  # the system knows neither
            with pytest.raises(StoreError, match="(?i)handshake|certificate|ssl|connect"):
                next(connect(url, token=server.token, tls_root_certs=wrong))
        with pytest.raises(StoreError):
            next(connect(f"grpc://localhost:{port}", token=server.token))
        monkeypatch.setenv("SPILE_TLS_ROOT_CERTS", own.cert)
        found = list(connect(url, token=server.token))
    assert all(map(same, found, ds.batches(ds.taps, 100, **OPTIONS)))
    assert len(found) == 32
    with pytest.raises(ConfigError, match="tls_root_certs /nowhere: No such file"):
        connect(url, tls_root_certs="/nowhere")


def test_the_command_refuses_to_send_its_token_over_a_network_unencrypted(
    ds: spile.Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["serve-rows", ds.url, "--host", "0.0.0.0", "--port", "0"]) == 2
    said = capsys.readouterr().err
    assert "give --tls-cert FILE --tls-key FILE, or --insecure" in said
    assert len(said.splitlines()) == 1


def test_hostile_clients_do_not_end_it(ds: spile.Dataset) -> None:
    state = {**ds.batches(ds.taps, 100, **OPTIONS).state_dict()}
    tickets = [b"\xff" * 1000, b"[" * 60_000, b"9" * 70_000, b"[1]", b"{}x", b'{"epoch": 1}',
               json.dumps({**state, "epoch": -1}).encode(),
               json.dumps({**state, "position": 1 << 70}).encode(),
               json.dumps({**state, "seed": "x"}).encode()]  # fmt: skip
    with serving(ds) as server:
        client = flight.connect(server.url)
        for ticket in tickets:
            with pytest.raises(flight.FlightError):
                client.do_get(flight.Ticket(ticket)).read_all()
        beyond = json.dumps({**state, "epoch": 1 << 40}).encode()
        assert client.do_get(flight.Ticket(beyond)).read_all().num_rows == 0
        for call in (client.list_flights, client.list_actions):
            with pytest.raises((NotImplementedError, flight.FlightError)):
                list(call())
        with pytest.raises((NotImplementedError, flight.FlightError)):
            client.do_action("shutdown").__next__()
        port = int(server.url.rpartition(":")[2])
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", port)) as raw:
                raw.sendall(os.urandom(300))
        client.close()
        wanted = list(ds.batches(ds.taps, 100, **OPTIONS))
        assert all(map(same, list(connect(server.url)), wanted))


def test_what_reading_fails_with_is_told(tmp_path: Path) -> None:
    made = stored.build(tmp_path / "out", LENGTHS, shard_bytes=1000, compress=True)
    shard = next(s for s in made.done(4).shards)
    ds = spile.open(str(tmp_path / "out"))
    batches = ds.batches(ds.taps, 100, window=100, encoded=True, shuffle=None)
    (tmp_path / "out" / shard.key).write_bytes(b"x" * 100)
    server = RowServer(batches)
    raised: list[BaseException] = []

    def run() -> None:
        try:
            server.run(threading.Event())
        except StoreError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    connection = connect(server.url)
    with pytest.raises(StoreError):
        for _ in connection:
            pass
    thread.join(60)
    assert shard.key in str(raised[0])


def test_one_that_stalls_does_not_keep_the_command_from_ending(ds: spile.Dataset) -> None:
    command = [sys.executable, "-m", "spile.cli", "serve-rows", ds.url, "--batch-size", "10",
               "--port", "0", "--json"]  # fmt: skip
    server = zygote.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=tiny.environment()
    )
    try:
        assert server.stdout
        client = flight.connect(json.loads(server.stdout.readline())["url"])
        idle = client.do_get(flight.Ticket(b""))
        assert idle.read_chunk().data.num_rows == 10
        server.send_signal(signal.SIGINT)
        _, said = server.communicate(timeout=60)
        assert (server.returncode, "interrupted" in said) == (130, True)
        client.close()
    finally:
        server.kill()
        server.communicate()
