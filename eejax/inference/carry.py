"""Carries of conditionals and loops over segments: the parts of a state that they change."""

from __future__ import annotations

import dataclasses

from eejax.inference.state import EngineState
from eejax.models.cache import KVCache

# Fields of a state that no segment changes, or that `changed_from` divides. A conditional carries
# all others: what it does not carry keeps its old value, without an error.
_NOT_CARRIED = {"cache", "waiting", "reach", "prompt", "prompt_len", "clock", "plan", "request"}
_FIELDS = [f.name for f in dataclasses.fields(EngineState)]
assert _NOT_CARRIED <= {*_FIELDS}
_CARRIED = [name for name in _FIELDS if name not in _NOT_CARRIED]


def changed_from(state: EngineState, e: int) -> tuple:
    """Return the parts of a state that segments e and above change, as a conditional's carry."""
    cache = state.cache
    rows = cache.segments[e:], cache.blocks[e:], state.waiting[e:]
    fields = {name: getattr(state, name) for name in _CARRIED}
    return rows, cache.filled, fields, state.prompt if state.keeps_text else None


def replace_from(state: EngineState, e: int, changed: tuple) -> EngineState:
    """Put the parts that `changed_from` returns back into a state."""
    rows, filled, fields, prompt = changed
    old = state.cache.segments, state.cache.blocks, state.waiting
    segments, blocks, waiting = (a[:e] + b for a, b in zip(old, rows, strict=True))
    state = state.replace(cache=KVCache(segments, blocks, filled), waiting=waiting, **fields)
    return state if prompt is None else state.replace(prompt=prompt)
