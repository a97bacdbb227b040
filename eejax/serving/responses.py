"""Responses that end when their client disconnects, and event streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from eejax.serving.http import api_error


class ClientDisconnected(Exception):
    """Error of a request whose client has disconnected."""


async def while_connected(request: Request, work: Coroutine) -> Any:
    """Return the result of `work`, which is cancelled if the client disconnects.

    Raises:
      ClientDisconnected: if the client disconnects.
    """
    task = asyncio.ensure_future(work)

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    leaving = asyncio.ensure_future(left())
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        for other in (task, leaving):
            other.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def streamed(request: Request, chunks: AsyncGenerator[dict, None]) -> Response:
    """Send chunks as server-sent events, then [DONE].

    An error before the first chunk is a plain response.
    """

    async def one() -> dict:
        return await anext(chunks)

    try:
        first = await while_connected(request, one())
    except BaseException:
        await chunks.aclose()
        raise

    async def events() -> AsyncGenerator[str, None]:
        async with contextlib.aclosing(chunks):
            try:
                yield event(first)
                async for chunk in chunks:
                    yield event(chunk)
            except Exception as error:
                yield event(api_error(error).body)
            yield "data: [DONE]\n\n"

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(events(), media_type="text/event-stream", headers=headers)


def event(chunk: dict) -> str:
    """Return a chunk as a server-sent event."""
    # ASCII, as some clients take U+2028 for the end of a line.
    return f"data: {json.dumps(chunk, allow_nan=False, separators=(',', ':'))}\n\n"
