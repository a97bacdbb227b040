"""Clients that leave, over real connections."""

from __future__ import annotations

import json
import logging
import socket
import time

import httpx
import pytest
from served import STALL, said
from server_threads import serving


@pytest.fixture(scope="module")
def server():
    with serving() as (address, service):
        yield address, service


def until(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def sent(address: str, **asked) -> socket.socket:
    """A connection over which a completion was asked for."""
    host, port = address.removeprefix("http://").split(":")
    body = json.dumps(dict(model="m", max_tokens=60) | asked).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    connection = socket.create_connection((host, int(port)))
    connection.sendall(head.encode() + body)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_frees_the_slot_or_the_place(server, stream, caplog):
    address, service = server
    running = [sent(address, prompt=[STALL, i], stream=stream) for i in range(4)]
    until(lambda: service.load.running == 4)
    waiting = [sent(address, prompt=[STALL, 9], stream=stream) for _ in range(3)]
    until(lambda: service.active == 7)
    for connection in waiting:  # before their first token
        connection.close()
    until(lambda: service.active == 4)
    for connection in running:
        connection.close()
    until(lambda: service.active == 0 and service.load.running == 0)
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]
    asked = dict(model="m", prompt="abc", max_tokens=3)
    answer = httpx.post(f"{address}/v1/completions", json=asked).json()
    want = bytes(said(tuple(b"abc"), i)[0] for i in range(3)).decode()
    assert answer["choices"][0]["text"] == want


def test_who_does_not_read_holds_nobody_up(server):
    address, service = server
    silent = [sent(address, prompt=[STALL, i], stream=True, n=4, max_tokens=20) for i in range(3)]
    until(lambda: service.active == 12)
    asked = dict(model="m", prompt="abc", max_tokens=3, priority=1)
    assert httpx.post(f"{address}/v1/completions", json=asked, timeout=60).status_code == 200
    for connection in silent:
        connection.close()
    until(lambda: service.active == 0)
