"""Tests that are coroutines, all of a file in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import wraps


def run_by(runner: asyncio.Runner, seconds: float = 120) -> Callable[[Callable], Callable]:
    """Return a decorator of coroutines that runs them as tests, for `seconds` at most."""

    def decorated(test):
        @wraps(test)
        def plain(*args, **kwargs):
            runner.run(asyncio.wait_for(test(*args, **kwargs), seconds))

        return plain

    return decorated
