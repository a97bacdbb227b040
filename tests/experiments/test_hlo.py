"""Figures read out of a compiled program's text."""

from __future__ import annotations

import pytest

from eejax.experiments import hlo, hlo_cost

TEXT = """HloModule jit_run, is_scheduled=true

%sliced (p0: f32[24,8,64], p1: s32[]) -> f32[8,64] {
  %p0 = f32[24,8,64]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  ROOT %slice.1 = f32[1,8,64]{2,1,0} dynamic-slice(%p0, %p1), dynamic_slice_sizes={1,8,64}
}

%outer (q0: f32[24,8,64], q1: s32[]) -> f32[1,8,64] {
  %q0 = f32[24,8,64]{2,1,0} parameter(0)
  %q1 = s32[] parameter(1)
  ROOT %inner = f32[1,8,64]{2,1,0} fusion(%q0, %q1), kind=kLoop, calls=%sliced
}

%updated (u0: f32[100,64], u1: f32[1,64], u2: s32[]) -> f32[100,64] {
  %u0 = f32[100,64]{1,0} parameter(0)
  %u1 = f32[1,64]{1,0} parameter(1)
  %u2 = s32[] parameter(2)
  ROOT %update = f32[100,64]{1,0} dynamic-update-slice(%u0, %u1, %u2, %u2)
}

%stays (s: (f32[100,64])) -> (f32[100,64]) {
  %s = (f32[100,64]{1,0}) parameter(0)
  %s.0 = f32[100,64]{1,0} get-tuple-element(%s), index=0
  %copy.1 = f32[100,64]{1,0} copy(%s.0)
  ROOT %tuple.1 = (f32[100,64]{1,0}) tuple(%copy.1)
}

%works (w: (f32[100,64])) -> (f32[100,64]) {
  %w = (f32[100,64]{1,0}) parameter(0)
  %w.0 = f32[100,64]{1,0} get-tuple-element(%w), index=0
  %call.1 = (f32[100,64]{1,0}, f32[2]{0}) custom-call(%w.0), CALLED
  %call.2 = (f32[100,64]{1,0}, f32[2]{0}) custom-call(%w.0), CALLED
  %w.1 = f32[100,64]{1,0} get-tuple-element(%call.2), index=0
  ROOT %tuple.2 = (f32[100,64]{1,0}) tuple(%w.1)
}

%goes (c: (s32[], f32[100,64])) -> pred[] {
  %c = (s32[], f32[100,64]{1,0}) parameter(0)
  %c.0 = s32[] get-tuple-element(%c), index=0
  ROOT %less = pred[] compare(%c.0, %c.0), direction=LT
}

%body (b: (s32[], f32[100,64])) -> (s32[], f32[100,64]) {
  %b = (s32[], f32[100,64]{1,0}) parameter(0)
  %b.0 = s32[] get-tuple-element(%b), index=0
  %b.1 = f32[100,64]{1,0} get-tuple-element(%b), index=1
  %b.2 = (f32[100,64]{1,0}) tuple(%b.1)
  %cond.1 = (f32[100,64]{1,0}) conditional(%b.0, %b.2, %b.2), branch_computations={%stays, %works}
  %b.3 = f32[100,64]{1,0} get-tuple-element(%cond.1), index=0
  ROOT %tuple.3 = (s32[], f32[100,64]{1,0}) tuple(%b.0, %b.3)
}

ENTRY %main (a: bf16[4,16]) -> bf16[4,32] {
  %a = bf16[4,16]{1,0} parameter(0)
  %w = bf16[16,32]{1,0} parameter(1)
  %k = f32[24,8,64]{2,1,0} parameter(2)
  %i = s32[] parameter(3)
  %c = f32[100,64]{1,0} parameter(4)
  %r = f32[1,64]{1,0} parameter(5)
  %fusion.1 = f32[1,8,64]{2,1,0} fusion(%k, %i), kind=kLoop, calls=%outer
  %fusion.2 = f32[100,64]{1,0} fusion(%c, %r, %i), kind=kLoop, calls=%updated
  %start = (s32[], f32[100,64]{1,0}) tuple(%i, %fusion.2)
  %while.1 = (s32[], f32[100,64]{1,0}) while(%start), condition=%goes, body=%body, KNOWN
  ROOT %dot.1 = bf16[4,32]{1,0} dot(%a, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
BUFFER = "f32[4,16,8]"
LAYERS = {
    "kernels": """
  %call.0 = (f32[4,8]{1,0}, f32[4,16,8]{2,1,0}, f32[4,16,8]{2,1,0}) custom-call(%b.0, %b.1)
  %y.0 = f32[4,8]{1,0} get-tuple-element(%call.0), index=0
  %b.10 = f32[4,16,8]{2,1,0} get-tuple-element(%call.0), index=1
  %work.0 = f32[4,8]{1,0} add(%y.0, %y.0)
  %call.1 = (f32[4,8]{1,0}, f32[4,16,8]{2,1,0}, f32[4,16,8]{2,1,0}) custom-call(%b.2, %b.3)
  %y.1 = f32[4,8]{1,0} get-tuple-element(%call.1), index=0
  %work.1 = f32[4,8]{1,0} add(%y.1, %y.1)
  %call.2 = (f32[4,8]{1,0}, f32[4,16,8]{2,1,0}, f32[4,16,8]{2,1,0}) custom-call(%b.4, %b.5)
""",
    "updates": """
  %key.0 = f32[4,16,8]{2,1,0} dynamic-update-slice(%b.0, %r, %i, %i, %i)
  %key.00 = f32[4,16,8]{2,1,0} fusion(%key.0, %r, %i), kind=kLoop, calls=%rows
  %value.0 = f32[4,16,8]{2,1,0} dynamic-update-slice(%b.1, %r, %i, %i, %i)
  %work.0 = f32[4,8]{1,0} conditional(%i, %key.00, %value.0), branch_computations={%two, %one}
  %copy.0 = f32[4,16,8]{2,1,0} copy(%b.2)
  %key.1 = f32[4,16,8]{2,1,0} dynamic-update-slice(%copy.0, %r, %i, %i, %i)
  %key.2 = f32[4,16,8]{2,1,0} bitcast(%key.1)
  %key.3 = f32[4,16,8]{2,1,0} dynamic-update-slice(%key.2, %r, %i, %i, %i)
  %value.1 = f32[4,16,8]{2,1,0} scatter(%b.3, %i, %r)
  %key.4 = f32[4,16,8]{2,1,0} dynamic-update-slice(%b.4, %r, %i, %i, %i)
""",
}


def layers(kind: str) -> hlo.HloProgram:
    taken = [
        f"  %b.{n} = {BUFFER}{{2,1,0}} get-tuple-element(%caches), index={n}" for n in range(6)
    ]
    branches = """
%two (t: f32[4,16,8]) -> f32[4,8] {
  %t = f32[4,16,8]{2,1,0} parameter(0)
  %t.0 = f32[4,8]{1,0} slice(%t)
  ROOT %t.1 = f32[4,8]{1,0} add(%t.0, %t.0)
}

%one (o: f32[4,16,8]) -> f32[4,8] {
  %o = f32[4,16,8]{2,1,0} parameter(0)
  ROOT %o.0 = f32[4,8]{1,0} slice(%o)
}

ENTRY %main (caches: (f32[4,16,8])) -> f32[] {
"""
    return hlo.parse(branches + "\n".join(taken) + LAYERS[kind] + "}\n")


@pytest.mark.parametrize(
    "kind, first, mean",
    [
        ("kernels", ("call.0", "call.1", "call.2"), (2 + 2) / 2),
        # Three writes and a branch of two; a copy, two writes and a scatter.
        ("updates", ("key.0", "key.1", "key.4"), (3 + 2 + 1 + 3) / 2),
    ],
)
def test_a_layer_begins_where_its_cache_is_written_first(kind, first, mean):
    found = layers(kind)
    assert hlo.first_writes(found, "main", BUFFER) == first
    assert hlo.between(found, "main", lambda i: i.name in first) == mean
    assert hlo.between(found, "main", lambda i: i.name == first[0]) == 0.0
    assert hlo.first_writes(found, "main", "bf16[4,16,8]") == ()


STACKS = """HloModule jit_step, is_scheduled=true

%read (p0: f32[24,8,64], p1: s32[], p2: f32[8,64]) -> f32[8,64] {
  %p0 = f32[24,8,64]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = f32[8,64]{1,0} parameter(2)
  %slice = f32[1,8,64]{2,1,0} dynamic-slice(%p0, %p1, %p1, %p1), dynamic_slice_sizes={1,8,64}
  %one = f32[8,64]{1,0} bitcast(%slice)
  ROOT %sum = f32[8,64]{1,0} add(%one, %p2)
}

%write (u0: f32[24,8,64], u1: f32[8,64], u2: s32[]) -> f32[24,8,64] {
  %u0 = f32[24,8,64]{2,1,0} parameter(0)
  %u1 = f32[8,64]{1,0} parameter(1)
  %u2 = s32[] parameter(2)
  %row = f32[1,8,64]{2,1,0} bitcast(%u1)
  ROOT %update = f32[24,8,64]{2,1,0} dynamic-update-slice(%u0, %row, %u2, %u2, %u2)
}

%nested (n0: f32[24,8,64], n1: f32[8,64], n2: s32[]) -> f32[24,8,64] {
  %n0 = f32[24,8,64]{2,1,0} parameter(0)
  %n1 = f32[8,64]{1,0} parameter(1)
  %n2 = s32[] parameter(2)
  ROOT %inner = f32[24,8,64]{2,1,0} fusion(%n0, %n1, %n2), kind=kLoop, calls=%write
}

%goes (c: STATE) -> pred[] {
  %c = STATE parameter(0)
  %c.0 = s32[] get-tuple-element(%c), index=0
  ROOT %less = pred[] compare(%c.0, %c.0), direction=LT
}

%layer (b: STATE) -> STATE {
  %b = STATE parameter(0)
  %b.0 = s32[] get-tuple-element(%b), index=0
  %weights = f32[24,8,64]{2,1,0} get-tuple-element(%b), index=1
  %gradient = f32[24,8,64]{2,1,0} get-tuple-element(%b), index=2
  %x = f32[8,64]{1,0} get-tuple-element(%b), index=3
  STEP
  ROOT %tuple = STATE tuple(%b.0, %weights, %gradient, %x)
}

ENTRY %main (a: STATE) -> STATE {
  %a = STATE parameter(0)
  ROOT %while = STATE while(%a), condition=%goes, body=%layer, KNOWN
}
"""
ONE = 8 * 64 * 4
INDEX = 4


@pytest.mark.parametrize(
    "step, moved",
    [
        # A layer of the stack read, x read, the sum written.
        (
            "%y = f32[8,64]{1,0} fusion(%weights, %b.0, %x), kind=kLoop, calls=%read",
            3 * ONE + INDEX,
        ),
        ("%y = f32[1,8,64]{2,1,0} dynamic-slice(%weights, %b.0, %b.0, %b.0)", 2 * ONE),
        # x read, a layer of the stack written.
        (
            "%y = f32[24,8,64]{2,1,0} fusion(%gradient, %x, %b.0), kind=kLoop, calls=%write",
            2 * ONE + INDEX,
        ),
        (
            "%y = f32[24,8,64]{2,1,0} fusion(%gradient, %x, %b.0), kind=kLoop, calls=%nested",
            2 * ONE + INDEX,
        ),
        ("%y = f32[24,8,64]{2,1,0} dynamic-update-slice(%gradient, %x, %b.0, %b.0, %b.0)", 2 * ONE),
    ],
)
def test_a_loop_over_layers_moves_each_layer_of_a_stack_once(step, moved):
    state = "(s32[], f32[24,8,64]{2,1,0}, f32[24,8,64]{2,1,0}, f32[8,64]{1,0})"
    known = 'backend_config={"known_trip_count":{"n":"24"}}'
    text = STACKS.replace("STEP", step).replace("STATE", state).replace("KNOWN", known)
    found = hlo_cost.estimate(hlo.parse(text), "main", RATES)
    assert found.launches == found.decisions == 24
    assert found.bytes == pytest.approx(24 * moved, rel=0, abs=24 * INDEX)
    assert found.seconds == pytest.approx(found.bytes / RATES.bandwidth)


CACHE, RATES = 100 * 64 * 4, hlo_cost.Rates(1e9, 1e12, launch=0.0, decision=0.0)


def program(kernel: str = "triton_kernel_call_ffi") -> hlo.HloProgram:
    called = f'custom_call_target="{kernel}", output_to_operand_aliasing={{{{0}}: (0, {{}})}}'
    known = 'backend_config={"known_trip_count":{"n":"3"}}'
    return hlo.parse(TEXT.replace("CALLED", called).replace("KNOWN", known))


def test_what_is_no_program_is_refused():
    with pytest.raises(ValueError, match="ENTRY"):
        hlo.parse("HloModule of_nobody")


def test_copies_count_where_they_are_a_conditionals():
    assert hlo.copies(program()) == {"stays": CACHE}
    assert hlo.copies(program(), min_bytes=CACHE + 1) == {}
    assert hlo.copies(program(), inside="while") == {"stays": CACHE}


def test_launches_are_those_of_a_computation_and_of_what_it_runs():
    found = program()
    assert [(i.name, body) for i, body in found.loops()] == [("while.1", "body")]
    # Three, and the loop three times: its conditional's dearer branch makes two calls.
    assert hlo.launches(found, "works") == 2 and hlo.launches(found, "main") == 3 + 3 * 2


@pytest.mark.parametrize(
    "kernel, decisions",
    [
        ("triton_kernel_call_ffi", 0),
        ("triton_kernel_call", 2),
    ],
)
def test_a_kernel_in_the_older_form_keeps_loop_and_conditional_on_the_host(kernel, decisions):
    assert hlo.on_host(program(kernel)) == decisions


LONG_SORT = """
%order (o0: f32[4,50304]) -> f32[4,50304] {
  %o0 = f32[4,50304]{1,0} parameter(0)
  ROOT %sort.1 = f32[4,50304]{1,0} sort(%o0), dimensions={1}, to_apply=%less_than
}

%works (w: (f32[100,64])) -> (f32[100,64]) {
  %logits = f32[4,50304]{1,0} constant({...})
  %sorted = f32[4,50304]{1,0} fusion(%logits), kind=kLoop, calls=%order
"""


@pytest.mark.parametrize("elements, decisions", [("50304", 2), ("64", 0)])
def test_a_long_sort_keeps_loop_and_conditional_on_the_host(elements, decisions):
    call = 'custom_call_target="triton_kernel_call_ffi"'
    text = TEXT.replace("CALLED", call).replace("KNOWN", "condition=%goes")
    begin = "%works (w: (f32[100,64])) -> (f32[100,64]) {"
    sorts = LONG_SORT.strip().replace("50304", elements)
    assert hlo.on_host(hlo.parse(text.replace(begin, sorts))) == decisions


def test_a_slice_reads_and_an_update_writes_a_part():
    found = program()
    types = {i.name: i.type for i in found.computations["main"]}
    for name, moved in (("fusion.1", 2 * 8 * 64 * 4 + 4), ("fusion.2", 2 * 64 * 4 + 4)):
        (i,) = [i for i in found.computations["main"] if i.name == name]
        assert hlo_cost._cost(found, RATES, types, i).bytes == pytest.approx(moved, abs=8)


def test_a_loop_counts_as_often_as_it_is_known_to_run():
    found = program()
    least = hlo_cost.estimate(found, "main", RATES, hlo_cost.cheapest)
    most = hlo_cost.estimate(found, "main", RATES, hlo_cost.dearest)
    dot = 2 * 4 * 16 * 32
    assert least.flops == most.flops == dot
    # The conditional's branches: a copy reads and writes the cache; calls change it in place.
    assert {least.launches, most.launches} <= {3 + 3, 3 + 6}
    copied, called = 2 * CACHE, 2 * (CACHE + 2 * 4)
    assert most.bytes - least.bytes == pytest.approx(3 * abs(copied - called))
    assert most.decisions == 3 * 2


def test_a_loop_may_be_said_to_run_more_or_less_often():
    def counted(n):
        return hlo_cost.estimate(program(), "main", RATES, trips=lambda loop, body: n)

    none, one, two = map(counted, range(3))
    assert none.launches == 3 and none.decisions == 1  # the loop's condition is read once
    assert two.launches - one.launches == one.launches - none.launches > 0
    text = TEXT.replace("CALLED", 'custom_call_target="f"').replace("KNOWN", "condition=%goes")
    for found, known in ((program(), True), (hlo.parse(text), False)):
        ((loop, _),) = found.loops()
        assert hlo.has_known_trips(loop) == known


def test_temporaries_are_what_is_written():
    found = hlo.temporaries(program())
    assert found["f32[100,64]"] == CACHE and "bf16[16,32]" not in found
