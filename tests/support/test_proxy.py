"""The proxy that the chaos tests inject their network faults with."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.support.proxy import CHUNK, Proxy

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that sends back what it gets."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve(connection: socket.socket) -> None:
            with connection, suppress(OSError):
                while piece := connection.recv(CHUNK):
                    connection.sendall(piece)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def proxy(echo: int) -> Iterator[Proxy]:
    with Proxy(echo) as started:
        yield started


def connect(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=5)


def echoed(connection: socket.socket, content: bytes) -> bytes:
    """What comes back, up to as many bytes as were sent."""
    sender = threading.Thread(target=lambda: connection.sendall(content))
    sender.start()
    got = b""
    while len(got) < len(content) and (piece := connection.recv(CHUNK)):
        got += piece
    sender.join()
    return got


def is_reset(connection: socket.socket) -> bool:
    try:
        while connection.recv(CHUNK):
            pass
    except ConnectionResetError:
        return True
    return False


def test_forwards_both_ways_and_counts(proxy: Proxy) -> None:
    content = bytes(range(256)) * 4000
    with connect(proxy) as connection:
        assert echoed(connection, content) == content
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
    assert proxy.forwarded == {"up": len(content), "down": len(content)}
    assert (proxy.opened, proxy.resets) == (1, 0)


def test_cut_resets_what_is_there_and_lets_new_ones_in(proxy: Proxy) -> None:
    with connect(proxy) as first, connect(proxy) as second:
        assert echoed(first, b"a") == echoed(second, b"a") == b"a"
        assert proxy.cut() == 2
        assert is_reset(first)
        assert is_reset(second)
    with connect(proxy) as third:
        assert echoed(third, b"b") == b"b"


def test_refuses_for_a_while(proxy: Proxy) -> None:
    with connect(proxy) as first:
        assert echoed(first, b"a") == b"a"
        with proxy.refusing():
            assert is_reset(first)
            with pytest.raises(ConnectionRefusedError):
                connect(proxy)
    with connect(proxy) as second:
        assert echoed(second, b"b") == b"b"


def test_a_stall_loses_nothing(proxy: Proxy) -> None:
    with connect(proxy) as old:
        assert echoed(old, b"a") == b"a"
        with proxy.stalled(), connect(proxy) as new:
            for each in (old, new):
                each.sendall(b"b")
                each.settimeout(0.2)
                with pytest.raises(TimeoutError):
                    each.recv(1)
            proxy.flow()
            for each in (old, new):
                each.settimeout(5)
                assert each.recv(1) == b"b"


def test_holds_after_a_number_of_bytes(proxy: Proxy) -> None:
    with connect(proxy) as connection:
        held = proxy.hold("up", 3 * CHUNK)
        assert echoed(connection, b"a") == b"a"
        assert not held.is_set()
        sender = threading.Thread(target=lambda: connection.sendall(bytes(10 * CHUNK)))
        sender.start()
        assert held.wait(5)
        time.sleep(0.1)
        assert proxy.forwarded["up"] <= 3 * CHUNK
        proxy.flow()
        rest = 10 * CHUNK
        while rest:
            rest -= len(connection.recv(CHUNK))
        sender.join()


def test_is_as_slow_as_asked(proxy: Proxy) -> None:
    proxy.rate = 1e6
    with connect(proxy) as connection:
        started = time.monotonic()
        echoed(connection, bytes(500_000))
        assert 0.45 < time.monotonic() - started < 3


def test_resets_a_share_of_pieces(echo: int) -> None:
    """With a chance of 1 in 20, 100 exchanges on one connection each have 2 pieces: about ten resets, seeded."""
    with Proxy(echo, seed=1) as proxy:
        proxy.reset_share = 0.05
        done = failed = 0
        while done < 100:
            with connect(proxy) as connection:
                try:
                    while done < 100 and echoed(connection, b"a") == b"a":
                        done += 1
                except ConnectionResetError:
                    failed += 1
        assert failed == proxy.resets
        assert 3 <= failed <= 25
        assert proxy.opened == failed + 1


def test_without_a_target_it_resets() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with Proxy(port) as proxy:
        try:
            connection = connect(proxy)
        except ConnectionResetError:  # even before the handshake is over
            return
        with connection:
            assert is_reset(connection)
