"""Simulated latencies against events and the paper's formula."""

import heapq
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eejax.common.errors import ConfigError
from eejax.experiments.latency import ForwardTimes, pipelined, recompute
from eejax.models.config import ExitConfig, ModelConfig
from eejax.pipeline.partition import Partition


def model(n_layers, boundaries):
    return ModelConfig(
        vocab_size=8,
        n_layers=n_layers,
        d_model=8,
        n_heads=1,
        context_length=8,
        exits=tuple(ExitConfig(b) for b in boundaries),
    )


@st.composite
def cases(draw):
    """(partition, times in whole numbers, trace)."""
    layers = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
    total = sum(layers)
    boundaries = sorted(draw(st.sets(st.integers(0, total), max_size=4)))
    config = model(total, boundaries)
    p = Partition(config, layers, draw(st.sampled_from(["earlier", "later"])))
    n = config.n_exits + 1

    def cost(size, most):
        return tuple(draw(st.lists(st.integers(0, most), min_size=size, max_size=size)))

    trace = draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=12))
    return p, ForwardTimes(cost(total, 5), cost(n, 2)), trace


def by_events(trace, p, times, cap, hop):
    """The same by a queue of events: stages that take up pieces of work, one at a time."""
    pieces = []  # of each stage, in order: (time, exit or None)
    for i in range(p.stages):
        own = []
        for n in range(p.layers[i] + 1):
            own += [(times.layers[p.starts[i] + n - 1], None)] if n else []
            own += [
                (times.exits[q.exit], q.exit) for q in p.places if (q.stage, q.layers) == (i, n)
            ]
        pieces.append(own)
    inbox = [[] for _ in range(p.stages)]
    at = [None] * p.stages  # (token, pieces done)
    emitted, through, started = {}, 0, 0
    number = itertools.count()
    events = [(0, next(number), "look", 0, None)]
    while events:
        now = events[0][0]
        while events and events[0][0] == now:
            _, _, what, i, token = heapq.heappop(events)
            if what == "comes":
                inbox[i].append(token)
            elif what == "done":
                token, k = at[i]
                exit_ = pieces[i][k][1]
                if exit_ is not None and token not in emitted and exit_ == trace[token]:
                    emitted[token] = now
                at[i] = (token, k + 1)
        progress = True
        while progress:
            progress = False
            for i in range(p.stages):
                if at[i] is not None and not any(e[2] == "done" and e[3] == i for e in events):
                    token, k = at[i]
                    if k == len(pieces[i]):
                        at[i], progress = None, True
                        if i + 1 < p.stages:
                            heapq.heappush(events, (now + hop, next(number), "comes", i + 1, token))
                        else:
                            through += 1
                    else:
                        cost, exit_ = pieces[i][k]
                        skip = exit_ is not None and token in emitted  # it passes by
                        heapq.heappush(
                            events, (now + (0 if skip else cost), next(number), "done", i, None)
                        )
                if at[i] is None and i and inbox[i]:
                    at[i], progress = (inbox[i].pop(0), 0), True
            if at[0] is None and started < len(trace) and len(emitted) == started:
                if cap is None or started - through < cap:
                    at[0], progress = (started, 0), True
                    started += 1
    return [emitted[t] for t in range(len(trace))]


@given(case=cases(), cap=st.none() | st.integers(1, 5), hop=st.sampled_from([0, 0, 3]))
def test_stages_equal_events(case, cap, hop):
    p, times, trace = case
    got = pipelined(trace, p, times, cap=cap, hop=hop)
    assert got.tolist() == by_events(trace, p, times, cap, hop)


def up_to(p, times, exit_):
    """Forward time of a token up to and with its exit, by the model alone."""
    return sum(times.layers[: p.config.exit_boundaries[exit_]]) + sum(times.exits[: exit_ + 1])


def by_formula(trace, p, times):
    """The paper's: a token takes the time up to its exit, and of the first stage all."""
    now, emitted = 0, []
    for e in trace:
        on_first = [q.exit for q in p.on(0) if q.exit <= e]
        stage = sum(times.layers[: p.layers[0]]) + sum(times.exits[f] for f in on_first)
        emitted.append(now + up_to(p, times, e))
        now += max(up_to(p, times, e), stage)
    return emitted


@given(case=cases())
def test_latency_is_the_papers_where_nothing_waits_and_never_less(case):
    p, times, trace = case
    got, want = pipelined(trace, p, times), by_formula(trace, p, times)
    assert (got >= want).all()
    # A first stage that is slower than any other with all its exits keeps them all waiting.
    slow = list(times.layers)
    slow[0] += 100
    slower = ForwardTimes(tuple(slow), times.exits)
    assert pipelined(trace, p, slower).tolist() == by_formula(trace, p, slower)
    # One device runs the same layers one after the other.
    alone = recompute(trace, p.config, times, cap=10**6)
    assert (alone[0] == got[0]) and alone.tolist() == np.cumsum(
        [up_to(p, times, e) for e in trace]
    ).tolist()


def test_a_backlog_delays_the_tokens_behind_it():
    """Worked by hand: one layer, then three, and an exit between."""
    p = Partition(model(4, [1]), (1, 3), "earlier")
    times = ForwardTimes((1.0,) * 4, (0.0, 0.0))
    # Three tokens leave at 1, 2 and 3, when the second stage is still at the first: until 4, then
    # 7 and 10. The fourth token comes there at 4, and is through at 13.
    assert pipelined([0, 0, 0, 1], p, times).tolist() == [1, 2, 3, 13]
    # One token at a time: nothing is emitted before the last is through.
    assert pipelined([0, 0, 0, 1], p, times, cap=1).tolist() == [1, 5, 9, 16]
    # Waiting rows that cost nothing, or as much as a token.
    assert recompute([0, 0, 0, 1], p.config, times).tolist() == [1, 2, 3, 7]
    each = recompute([0, 0, 0, 1], p.config, times, rows=float)
    assert each.tolist() == [1, 2, 3, 3 + 1 + 4 * 3]
    # The second token that waits goes through all layers, with the one before it.
    assert recompute([0, 0, 0, 1], p.config, times, cap=2).tolist() == [1, 5, 6, 10]


def test_times_of_segments_and_what_does_not_fit():
    config = model(4, [0, 3])
    times = ForwardTimes.of_segments(config, [0.0, 6.0, 5.0], 1.0)
    assert times == ForwardTimes((2.0, 2.0, 2.0, 5.0), (1.0, 1.0, 1.0))
    with pytest.raises(ConfigError, match="segments"):
        ForwardTimes.of_segments(config, [1.0])
    with pytest.raises(ConfigError, match="trace"):
        recompute([3], config, times)
    with pytest.raises(ConfigError, match="times"):
        recompute([0], model(3, [0, 3]), times)
