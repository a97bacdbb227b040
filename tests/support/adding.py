"""Requests under ids in the order in which they are made."""

from __future__ import annotations

import itertools

from eejax.inference.request import EngineRequest

_numbers = itertools.count()


def request(prompt, max_tokens, *args, **settings) -> EngineRequest:
    """Make a request with an id of its own."""
    return EngineRequest(f"r{next(_numbers):07d}", prompt, max_tokens, *args, **settings)


def add(scheduler, prompt, max_tokens, *, tokens=(), **settings) -> str:
    """Add a request to a scheduler or a fleet, and return its id."""
    made = request(prompt, max_tokens, **settings)
    scheduler.add_request(made, *([tokens] if tokens else []))
    return made.request_id
