"""EE-LLM's formulas against the simulators, and models' memory against its other accounts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_configs import configs
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from eejax.experiments.async_1f1b import EXIT_BACKWARD, EXIT_FORWARD, async_1f1b, max_kept
from eejax.experiments.reproduce import ee_llm_formulas
from eejax.experiments.stage_memory import (
    Size,
    Sizes,
    iteration_time,
    layer_kept,
    memory_vs_1f1b,
    model_sizes,
    peak_memory,
)
from eejax.models import params
from eejax.models.config import ExitConfig, ModelConfig
from eejax.pipeline.schedule import BACKWARD, FORWARD, one_f_one_b
from eejax.pipeline.simulate import PassTime, StageCosts, simulate, stage_costs

times = st.integers(1, 20).map(lambda n: n / 4)
works = st.builds(PassTime, times, times)
SMALL = ModelConfig(vocab_size=50, n_layers=8, d_model=16, n_heads=2, context_length=32)


@st.composite
def drawn(draw):
    p = draw(st.integers(1, 6))

    def each():
        return tuple(draw(st.lists(works, min_size=p, max_size=p)))

    def some():
        return tuple(w if draw(st.booleans()) else PassTime() for w in each())

    return StageCosts(each(), some(), some(), draw(works)), draw(st.integers(1, 12))


def work_of_stages(c, exits_at_end):
    """All work of each stage, with the exits where they are asked for."""
    p = c.stages
    total = [c.layers[i].total + c.inner[i].total for i in range(p)]
    for i in range(p):
        total[i - 1 if exits_at_end and i else i] += c.entry[i].total
    total[-1] += c.final.total
    return total


@given(drawn(), st.booleans(), st.booleans())
def test_the_time_of_an_iteration(case, deferred, exits_at_end):
    c, m = case
    work = work_of_stages(c, exits_at_end)
    bound = iteration_time(c, m, exits_at_end=exits_at_end)
    assert bound == sum(work) + (m - 1) * max(work)
    time = async_1f1b(c, m, deferred=deferred, exits_at_end=exits_at_end).time
    assert time <= bound
    if work[-1] == max(work):
        assert time == bound


@st.composite
def the_papers_quantities(draw):
    """P, M, N_i of each stage, and f, b of IN, BB, EE, FE (Table 2); IN is faster than FE."""
    p, m = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    n = draw(st.lists(st.integers(0, 3), min_size=p, max_size=p))
    bb, ee, fe = (draw(works) for _ in range(3))
    share = draw(st.sampled_from((0, 0.25, 0.5)))
    return p, m, n, {"IN": PassTime(*(share * x for x in fe)), "BB": bb, "EE": ee, "FE": fe}


@given(the_papers_quantities(), st.booleans(), st.booleans())
def test_the_papers_bound_on_the_time_holds(case, deferred, exits_in_bubbles):
    p, m, n, of = case
    c = stage_costs((1,) * p, n, layer=of["BB"], exit=of["EE"], final=of["FE"], embedding=of["IN"])
    time = async_1f1b(c, m, deferred=deferred, exits_in_bubbles=exits_in_bubbles).time
    assert time <= iteration_time(c, m) <= ee_llm_formulas.time_bound(*case)


@given(the_papers_quantities(), st.data())
def test_the_papers_equations_of_memory(case, data):
    """Eq. 4 to 6, which are of at least P microbatches and deferred exits."""
    p, m, n, of = case
    size = {o: Size(data.draw(st.integers(0, 99)), data.draw(st.integers(0, 99))) for o in of}
    layers = [size["BB"]] * p
    layers[0] = layers[0].plus(size["IN"])

    def times(k, one):
        return Size(k * one.state, k * one.kept)

    exits = tuple(times(k, size["EE"]) for k in n)
    sizes = Sizes(tuple(layers), exits, (Size(),) * p, size["FE"])
    expected = ee_llm_formulas.stage_memory(p, n, size)
    np.testing.assert_array_equal(peak_memory(sizes, m + p), expected)


@given(st.integers(3, 8), st.integers(8, 20), st.integers(1, 12), st.integers(1, 8), st.data())
def test_exits_in_bubbles_add_their_backward_pass_alone(p, m, f, ee, data):
    """Remark A.2: the forward pass of the last microbatch's exits costs no time, once it is moved
    into the bubble in front of the backward step. It has to fit there: on the stage before the
    last the bubble is as long as a stage's forward pass.
    """
    assume(ee / 4 <= f)
    middle = data.draw(st.sets(st.integers(1, p - 2)))
    exit = PassTime(ee / 4, ee / 2)
    c = stage_costs(
        (1,) * p,
        [int(i in middle) for i in range(p)],
        layer=PassTime(f, 2 * f),
        exit=exit,
        final=exit,
    )
    base = async_1f1b(c.without_exits, m).time
    grown = async_1f1b(c, m, exits_in_bubbles=True).time - base
    assert grown == len(middle) * exit.backward
    assert async_1f1b(c, m).time - base == len(middle) * exit.total


@given(st.integers(2, 8), st.integers(1, 20), st.integers(1, 12), st.integers(0, 8), st.data())
def test_early_exits_add_their_own_time_once(p, m, f, ee, data):
    """A.3.1: k exits on middle stages, none slower than the final one, add k (f + b) of theirs,
    whatever M; and the lockstep table with deferred exits takes exactly as long."""
    stages = data.draw(st.sets(st.integers(1, p - 1)))
    count = [int(i in stages and i < p - 1) for i in range(p)]
    exit = PassTime(ee / 4, ee / 2)
    c = stage_costs((1,) * p, count, layer=PassTime(f, 2 * f), exit=exit, final=exit)
    without, with_exits = (async_1f1b(each, m).time for each in (c.without_exits, c))
    assert with_exits - without == sum(count) * exit.total
    table = one_f_one_b(p, m, exit_stages=[i for i in range(p) if count[i]], exits="deferred")
    assert simulate(table, c).time == with_exits


@given(drawn(), st.booleans(), st.booleans())
def test_the_paper_keeps_p_minus_i_microbatches(case, deferred, exits_at_end):
    c, m = case
    line = async_1f1b(c, m, deferred=deferred, exits_at_end=exits_at_end)
    under_way = [min(c.stages - i, m) for i in range(c.stages)]
    assert max_kept(line, FORWARD, BACKWARD).tolist() == under_way
    there = work_of_stages(c, exits_at_end)
    exits = [there[i] > c.layers[i].total for i in range(c.stages)]
    expected = [e * (1 if deferred else n) for e, n in zip(exits, under_way, strict=True)]
    assert max_kept(line, EXIT_FORWARD, EXIT_BACKWARD).tolist() == expected


@given(drawn(), st.booleans(), st.booleans(), st.data())
def test_the_paper_formula_of_memory_is_the_peak_of_what_is_kept(case, deferred, at_end, data):
    c, m = case
    p = c.stages

    def sizes_of(ws):
        return tuple(
            Size(data.draw(st.integers(0, 99)), data.draw(st.integers(0, 99)))
            if w.total
            else Size()
            for w in ws
        )

    sizes = Sizes(sizes_of(c.layers), sizes_of(c.entry), sizes_of(c.inner), Size(3, 5))
    line = async_1f1b(c, m, deferred=deferred, exits_at_end=at_end)
    got = peak_memory(sizes, m, deferred=deferred, exits_at_end=at_end)
    for i in range(p):
        exits = [sizes.inner[i]]
        exits += [sizes.entry[j] for j in range(p) if (j - 1 if at_end and j else j) == i]
        exits += [sizes.final] * (i == p - 1)
        mine = sorted([op for op in line.ops if op.stage == i], key=lambda op: (op.begin, op.end))
        now = state = sizes.layers[i].state + sum(e.state for e in exits)
        kept, peak = sum(e.kept for e in exits), state
        for op in mine:
            now += {FORWARD: sizes.layers[i].kept, EXIT_FORWARD: kept}.get(op.kind, 0)
            peak = max(peak, now)
            now -= {BACKWARD: sizes.layers[i].kept, EXIT_BACKWARD: kept}.get(op.kind, 0)
        assert now == state and got[i] == peak


def test_optimizations_take_memory_from_the_first_stages():
    """Figure 3's point: without them the exits of all microbatches under way are kept."""
    nothing = (Size(),) * 4
    sizes = Sizes((Size(0, 10),) * 4, (Size(), Size(), Size(0, 6), Size()), nothing, Size(0, 6))

    def peak(**how):
        return peak_memory(sizes, 16, **how).tolist()

    assert peak(deferred=False, exits_at_end=True) == [40, 30 + 3 * 6, 20, 10 + 6]
    assert peak(deferred=False) == [40, 30, 20 + 2 * 6, 10 + 6]
    assert peak(exits_at_end=True) == [40, 30 + 6, 20, 10 + 6]
    assert peak() == [40, 30, 20 + 6, 10 + 6]


@settings(max_examples=40)
@given(configs())
def test_a_models_parameters_are_all_there_on_one_stage(config):
    sizes = model_sizes(config, [config.n_layers], state_bytes=1)
    parts = (*sizes.layers, *sizes.entry, *sizes.inner, sizes.final)
    assert sum(s.state for s in parts) == params.count(config)


def test_a_shared_table_is_there_once_on_each_stage_that_reads_it():
    exits = (ExitConfig(1), ExitConfig(2), ExitConfig(4), ExitConfig(8))
    config = SMALL.replace(exits=exits, head="tied", final_norm=False)
    sizes = model_sizes(config, (4, 2, 2), state_bytes=1, exit_kept=7)
    norm, table = 16, 50 * 16
    assert sizes.inner[0] == Size(2 * norm, 14)  # stage 0 has the input embedding
    assert sizes.entry == (Size(), Size(table + norm, 7), Size())
    assert sizes.final == Size(table + norm, 14)  # the exit at boundary 8 beside the final one


def test_what_a_layer_keeps():
    rows, length, d, f = 2, 32, 16, SMALL.d_ff
    kept = {remat: layer_kept(SMALL, rows, length, remat) for remat in ("none", "dots", "full")}
    x = 4 * rows * length * d
    assert kept["full"] == x
    # Its input; queries, keys, values and the attention's output; gate and up. Nothing reads the
    # product with the last matrix again.
    assert kept["dots"] == x + 4 * rows * length * (4 * d + 2 * f)
    assert kept["none"] > kept["dots"]


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_memory_beside_the_papers(remat):
    config = SMALL.replace(exits=(ExitConfig(2), ExitConfig(4)))
    p, m, rows, length = 4, 16, 2, 32
    ours, theirs = memory_vs_1f1b(config, (2,) * p, m, rows, length, remat=remat)
    assert ours.in_flight.tolist() == [7, 5, 3, 1] and theirs.in_flight.tolist() == [4, 3, 2, 1]
    np.testing.assert_array_equal(ours.state, theirs.state)
    np.testing.assert_array_equal(ours.total, ours.state + ours.activations)
    x, one = 4 * rows * length * 16, layer_kept(config, rows, length, remat)
    grown = ours.activations.max() - theirs.activations.max()
    # 2P - 1 of what enters a stage against P on the first stage; of the residuals of its 2 layers
    # too, unless these are made again.
    assert grown == 3 * x + (0 if remat == "full" else 3 * 2 * one)


@pytest.mark.parametrize("boundary, more", [(0, 11 - 8), (2, 8 - 7), (4, 0)])
def test_memory_grows_with_aligned_exits(boundary, more):
    """On stage i what the exit sends back is held for P - i steps beside the 2 (P - i) - 1 inputs,
    instead of for one; the rings are as large as the largest stage's."""
    config = SMALL.replace(exits=(ExitConfig(boundary),))

    def peak(exits):
        return memory_vs_1f1b(config, (2,) * 4, 16, 1, 8, exits=exits)[0].activations[0]

    assert peak("aligned") - peak("mixed") == more * 4 * 8 * 16
    assert peak("mixed") == peak("deferred")


def test_the_largest_stage_sizes_every_ring():
    ours, theirs = memory_vs_1f1b(SMALL, (1, 4, 2, 1), 16, 1, 8)
    assert len(set(ours.activations)) == 1 and len(set(theirs.activations)) == 4


def test_nothing_is_allocated():
    config = ModelConfig(
        vocab_size=50_000,
        n_layers=48,
        d_model=8192,
        n_heads=64,
        context_length=4096,
        dtype="bfloat16",
    )
    ours, theirs = memory_vs_1f1b(config, (12,) * 4, 64, 4, 4096, remat="none")
    assert ours.total.min() > theirs.total.min() > 1e11
    assert jnp.zeros(()).nbytes == 4 and len(jax.live_arrays()) < 1000
