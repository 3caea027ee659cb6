"""What is said of a server that cannot be asked."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
import pytest

from dsec.layers.http_words import words


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (TimeoutError(), "no answer in time"),
        (aiohttp.SocketTimeoutError("Timeout on reading data from socket"), "no answer in time"),
        (aiohttp.ServerDisconnectedError(), "it closed the connection"),
        (aiohttp.ClientPayloadError("Response payload is not completed: <TransferEncodingError: 400>"), "what it sent broke off"),
        (ConnectionResetError(104, "Connection reset by peer"), "Connection reset by peer"),
        (aiohttp.ClientOSError(32, "whatever"), "Broken pipe"),
    ],
)
def test_errors_in_few_words(error: Exception, text: str) -> None:
    """Nobody is shown aiohttp's objects."""
    assert words(error) == text


async def test_a_closed_port() -> None:
    """As the kernel says it, without addresses and what TLS would have been."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientConnectorError) as caught:
                await session.get(f"http://127.0.0.1:{taken.getsockname()[1]}/")
    assert words(caught.value) == "Connection refused"


async def test_a_server_that_hangs_up_and_one_that_speaks_something_else() -> None:
    """Both are told apart from one that is not there."""
    answers = [b"", b"SSH-2.0-x\r\n"]

    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answers[0])
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    said = []
    async with aiohttp.ClientSession() as session:
        for _ in range(2):
            with pytest.raises(aiohttp.ClientError) as caught:
                await session.get(url)
            said.append(words(caught.value))
            answers.pop(0) if len(answers) > 1 else None
    server.close()
    assert said[0] in ("it closed the connection", "Connection reset by peer")
    assert said[1].startswith("its answer is not HTTP")
