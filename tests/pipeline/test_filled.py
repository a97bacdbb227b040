"""Filled bubbles: whole tables in no more time, and gradients that stay unbiased."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import assert_right_values, assert_slots_hold

from eejax.common.errors import ConfigError
from eejax.pipeline.schedule import BACKWARD, EXITS, FORWARD, Route, one_f_one_b, rings
from eejax.pipeline.schedule_fill import filled, filled_to, max_inserted
from eejax.pipeline.simulate import PassTime, simulate, stage_costs

times = st.integers(0, 12).map(lambda n: n / 4)


@st.composite
def drawn(draw):
    p, m = draw(st.integers(1, 8)), draw(st.integers(1, 16))
    entry = sorted(draw(st.sets(st.integers(0, p - 1), max_size=3)))
    inner = sorted(draw(st.sets(st.integers(0, p - 1), max_size=2)))
    layers = draw(st.lists(st.integers(1, 3), min_size=p, max_size=p))

    def count(where):
        return [int(i in where) for i in range(p)]

    def work():
        return PassTime(draw(times), draw(times))

    costs = stage_costs(
        layers,
        count(entry),
        count(inner),
        layer=work(),
        exit=work(),
        final=work(),
        embedding=work(),
    )
    return (
        costs,
        m,
        dict(
            exit_stages=entry,
            inner_stages=inner,
            recompute=draw(st.booleans()),
            exits=draw(st.sampled_from(["mixed", "aligned", "deferred"])),
        ),
    )


def base_of(costs, m, settings):
    return one_f_one_b(
        costs.stages, m, **{k: v for k, v in settings.items() if k != "inner_stages"}
    )


@settings(max_examples=150)
@given(drawn())
def test_whatever_is_inserted_the_table_is_whole_and_takes_no_longer(case):
    costs, m, options = case
    found = filled(costs, m, **options)
    schedule, p = found.schedule, costs.stages
    schedule.check()
    assert_right_values(schedule)
    assert_slots_hold(schedule, options["exit_stages"])
    base = base_of(costs, m, options)
    alone = simulate(base, costs).time
    assert found.alone == alone and found.time == simulate(schedule, costs).time
    assert found.time <= alone * (1 + 1e-9)
    assert schedule.microbatches == m + found.inserted
    assert schedule.recompute == options["recompute"]
    # The whole microbatches are where they were, up to the steps put between.
    mine = [
        [[op for op in ops if op.microbatch < m] for ops in step.ops] for step in schedule.steps
    ]
    theirs = [list(map(list, step.ops)) for step in base.steps]
    assert [row for row in mine if any(row)] == [row for row in theirs if any(row)]
    routes = schedule.routes
    assert all(r == Route(p - 1) for r in routes[:m])
    with_exit = {*options["exit_stages"], *options["inner_stages"]}
    for r in routes[m : m + found.part1]:
        assert r.bottom == 0 and r.top in with_exit and r.top < p - 1
    for r in routes[m + found.part1 :]:
        assert r.top == p - 1 and r.bottom > 0
    # Each exit that an inserted microbatch has a backward pass for is computed, and no other.
    edges = {*options["exit_stages"], p - 1}
    for n in range(m, schedule.microbatches):
        done = {i for kind, k, i in schedule.when if (kind, k) == (EXITS, n)}
        assert done == edges & set(range(routes[n].bottom, routes[n].top + 1))


@pytest.mark.parametrize(
    "p, f, b", [(p, f, b) for p in (2, 3, 4, 5, 6, 8, 12) for f, b in ((1, 2), (1, 1), (2, 3))]
)
@pytest.mark.parametrize("m", [2, 3, 24])
def test_part_1_is_as_full_as_the_paper_says(p, m, f, b):
    """K microbatches, of K, K - 1, ... stages, where every stage has an exit that is for free."""
    k = math.floor((p - 1) / (f / b + 1) + 1e-9)
    assert max_inserted(p, f, b) == k
    found = filled(stage_costs((1,) * p, layer=PassTime(f, b)), m, inner_stages=range(p))
    tops = [r.top + 1 for r in found.schedule.routes[m : m + found.part1]]
    assert tops == list(range(k, 0, -1))


@pytest.mark.parametrize(
    "p, f, b",
    [(p, f, b) for p in (2, 3, 4, 5, 6, 8, 12) for f, b in ((1, 2), (1, 1), (2, 3), (3, 2))],
)
@pytest.mark.parametrize("m", [1, 2, 24])
def test_part_2_is_as_full_as_the_paper_says(p, f, b, m):
    """The i-th of K microbatches takes floor(P - i (f/b + 1)) stages back."""
    k = max_inserted(p, f, b)
    found = filled(stage_costs((1,) * p, layer=PassTime(f, b)), m, part1=0)
    ways = [p - r.bottom for r in found.schedule.routes[m:]]
    assert ways == [math.floor(p - i * (f / b + 1) + 1e-9) for i in range(1, k + 1)]
    # All that this takes: K steps more, and one slot more for a state that waits.
    assert len(found.schedule.steps) <= len(one_f_one_b(p, m).steps) + k
    waiting = rings(found.schedule, ())
    assert waiting.arrived.n <= 2 and waiting.returned.n <= 2


@pytest.mark.parametrize("p", [4, 8])
def test_both_parts_are_full_where_there_are_as_many_microbatches_as_stages(p):
    found = filled(stage_costs((1,) * p, layer=PassTime(1, 2)), p, inner_stages=range(p))
    assert found.part1 == found.part2 == max_inserted(p, 1, 2) == p // 2


@pytest.mark.parametrize("p", [4, 8])
def test_without_links_of_its_own_the_end_would_hold_up_the_last_gradients(p):
    """The reason for links: the same operations take longer where all neighbours exchange."""
    costs = stage_costs((1,) * p, layer=PassTime(1, 2))
    found = filled(costs, 2 * p, part1=0)
    steps = tuple(step._replace(links=None) for step in found.schedule.steps)
    wide = dataclasses.replace(found.schedule, steps=steps)
    assert simulate(wide, costs).time > found.alone == simulate(found.schedule, costs).time


def test_a_microbatch_goes_no_further_than_its_last_exit():
    c = stage_costs((1,) * 8, layer=PassTime(1, 2))

    def tops(**where):
        return [r.top for r in filled(c, 16, part2=0, **where).schedule.routes[16:]]

    # By the paper's count four microbatches of 4, 3, 2, 1 stages.
    assert tops(inner_stages=range(8)) == [3, 2, 1, 0]
    assert tops(exit_stages=(2,)) == [2, 2]
    assert tops(exit_stages=(1,), inner_stages=(0,)) == [1, 1, 1, 0]
    assert tops(exit_stages=(5, 6)) == tops() == []
    assert tops(exit_stages=(2,), part1=1) == [2]
    assert tops(exit_stages=(2,), part1=0) == []


def test_an_insertion_that_would_take_time_is_left_out_unless_time_is_given():
    # Three times a final exit leave no room for a stage more of the last stage's work ...
    c = stage_costs((1,) * 4, layer=PassTime(1, 2), final=PassTime(3, 6))
    exact = filled(c, 12)
    assert exact.part2 == 0 and exact.time == exact.alone
    some = filled(c, 12, tolerance=0.2)  # ... but in a fifth more time there is
    assert some.part2 > 0 and exact.alone < some.time <= 1.2 * exact.alone


@settings(max_examples=40)
@given(drawn())
def test_the_same_number_in_less_time(case):
    costs, total, options = case
    found = filled_to(costs, total, **options)
    assert found.main + found.inserted == found.schedule.microbatches == total
    found.schedule.check()
    whole = simulate(base_of(costs, total, options), costs).time
    assert found.time < whole if found.inserted else found.time == whole


def test_how_much_less():
    c = stage_costs((1,) * 4, layer=PassTime(1, 2))
    found = filled_to(c, 12, inner_stages=range(4))
    # Four of twelve are inserted, each of which would take f + b.
    assert (found.main, found.part1, found.part2) == (8, 2, 2)
    whole = simulate(one_f_one_b(4, 12), c).time
    assert whole - found.time == 4 * 3
    assert filled_to(c, 1).inserted == 0
    assert filled_to(c, 12, inner_stages=range(4), part1=0).inserted == 2


def test_settings_that_cannot_be_are_named():
    c = stage_costs((1, 1), layer=PassTime(1, 2))
    with pytest.raises(ConfigError, match="part1 = -1"):
        filled(c, 2, part1=-1)
    with pytest.raises(ConfigError, match="tolerance = -0.1"):
        filled(c, 2, tolerance=-0.1)
    with pytest.raises(ConfigError, match="microbatches = 0"):
        filled(c, 0)


# A linear model of two matrices a stage with exits at the stages' beginnings and middles. The
# gradient that a table gives is written out by hand; the one it should give is the derivative of
# the whole loss by a complex step, exact in float64 but for rounding.
D = 3


class Linear:
    def __init__(self, stages, entry, inner, seed=0):
        rng = np.random.default_rng(seed)
        self.stages, self.entry, self.inner = stages, set(entry), set(inner)

        def draw(*shape):
            return rng.normal(size=shape) / math.sqrt(D)

        self.layers = draw(stages, 2, D, D)
        self.heads = draw(stages, 2, D, D)  # of the exits at its beginning, in its middle
        self.final = draw(D, D)
        self.data = [(draw(D), draw(D)) for _ in range(2)]

    def parameters(self, tied):
        """What is differentiated, as one vector. Tied: one head for all exits."""
        heads = self.final.ravel() if tied else np.append(self.heads, self.final)
        return np.append(self.layers, heads)

    def loss(self, vector, datum, tied):
        x, y = datum
        n = self.layers.size
        layers = vector[:n].reshape(self.layers.shape)
        if tied:
            final = vector[n:].reshape(D, D)
            heads = np.broadcast_to(final, self.heads.shape)
        else:
            heads = vector[n : -D * D].reshape(self.heads.shape)
            final = vector[-D * D :].reshape(D, D)
        loss = 0
        for i in range(self.stages):
            for half, exits in enumerate((self.entry, self.inner)):
                if i in exits:
                    loss += ((heads[i, half] @ x - y) ** 2).sum() / 2
                x = layers[i, half] @ x
        return loss + ((final @ x - y) ** 2).sum() / 2

    def whole_gradient(self, datum, tied):
        at = self.parameters(tied).astype(complex)
        step = 1e-30
        gradient = np.zeros(len(at))
        for k in range(len(at)):
            at[k] += 1j * step
            gradient[k] = self.loss(at, datum, tied).imag / step
            at[k] -= 1j * step
        return gradient

    def stage_gradients(self, datum, route, edges, factors, tied):
        """What a microbatch adds on its route: for each stage, a vector like `parameters`.

        edges: the stages whose EXITS it has; factors [stages] multiply the losses there.
        """
        x, y = datum
        final = self.final
        heads = np.broadcast_to(final, self.heads.shape) if tied else self.heads
        states = [[None, None] for _ in range(self.stages)]
        for i in range(route.top + 1):
            for half in range(2):
                states[i][half] = x
                x = self.layers[i, half] @ x
        last = self.stages - 1
        out, down = [], np.zeros(D)
        for i in range(route.top, route.bottom - 1, -1):
            layers, own, end = (np.zeros(a.shape) for a in (self.layers, self.heads, final))
            if i == last and i in edges:
                miss = (final @ x - y) * factors[i]
                end += np.outer(miss, x)
                down = final.T @ miss
            for half, there in ((1, i in self.inner), (0, i in self.entry and i in edges)):
                state = states[i][half]
                layers[i, half] = np.outer(down, state)
                down = self.layers[i, half].T @ down
                if there:
                    miss = (heads[i, half] @ state - y) * factors[i]
                    own[i, half] = np.outer(miss, state)
                    down = down + heads[i, half].T @ miss
            tail = (own.sum((0, 1)) + end).ravel() if tied else np.append(own, end)
            out.append((i, np.append(layers, tail)))
        return out


def of_table(model, found, tied, scaled=True):
    """[microbatches, data, parameters]: what each adds to the gradient of the table, by datum."""
    schedule = found.schedule
    losses = found.loss_factors if scaled else np.ones(model.stages)
    gradients = found.gradient_factors if scaled else np.ones(model.stages)
    rows = []
    for m, route in enumerate(schedule.routes):
        assert all(
            (BACKWARD, m, i) in schedule.when and (FORWARD, m, i) in schedule.when
            for i in range(route.bottom, route.top + 1)
        )
        edges = {i for kind, k, i in schedule.when if (kind, k) == (EXITS, m)}
        late = m >= found.main + found.part1
        factors = np.ones(model.stages) if late else losses
        rows.append(
            [
                sum(
                    gradients[i] * g
                    for i, g in model.stage_gradients(d, route, edges, factors, tied)
                )
                for d in model.data
            ]
        )
    return np.array(rows)


def filled_model(p, m):
    entry, inner = (1, p - 1), (0, p // 2)
    costs = stage_costs((1,) * p, layer=PassTime(1, 2))
    found = filled(costs, m, exit_stages=entry, inner_stages=inner)
    assert found.part1 > 0 and found.part2 > 0
    return Linear(p, entry, inner), found


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("p, m", [(4, 6), (8, 3)])
def test_of_identical_microbatches_the_gradient_is_exact(p, m, tied):
    model, found = filled_model(p, m)
    right = m * model.whole_gradient(model.data[0], tied)
    got = of_table(model, found, tied)[:, 0].sum(0)
    np.testing.assert_allclose(got, right, rtol=1e-11, atol=1e-12)
    plain = of_table(model, found, tied, scaled=False)[:, 0].sum(0)
    assert np.abs(plain - right).max() > 0.05 * np.abs(right).max()


@pytest.mark.parametrize("p, m", [(4, 3), (8, 2)])
def test_over_all_assignments_of_random_microbatches_the_gradient_is_exact(p, m):
    """The expectation of m whole ones, each datum as likely for each microbatch."""
    model, found = filled_model(p, m)
    added = of_table(model, found, tied=True)
    total, count = 0, 0
    for choice in itertools.product(range(len(model.data)), repeat=len(added)):
        total = total + added[np.arange(len(added)), list(choice)].sum(0)
        count += 1
    right = m * np.mean([model.whole_gradient(d, True) for d in model.data], 0)
    np.testing.assert_allclose(total / count, right, rtol=1e-11, atol=1e-12)


def test_factors_by_hand():
    c = stage_costs((1,) * 4, layer=PassTime(1, 2))
    found = filled(c, 6, inner_stages=range(4))
    # Part 1 comes to stages 0, 1 and to stage 0; Part 2 goes back through stages 3, 2 and to 3.
    np.testing.assert_allclose(found.loss_factors, [6 / 8, 6 / 7, 1, 1])
    np.testing.assert_allclose(found.gradient_factors, [1, 1, 6 / 7, 6 / 8])
