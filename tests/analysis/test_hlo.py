"""Figures read out of a compiled program's text."""

from __future__ import annotations

import pytest

from eejax.analysis import hlo

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
CACHE, RATES = 100 * 64 * 4, hlo.Rates(1e9, 1e12, launch=0.0, decision=0.0)


def program(kernel: str = "triton_kernel_call_ffi") -> hlo.Program:
    called = f'custom_call_target="{kernel}", output_to_operand_aliasing={{{{0}}: (0, {{}})}}'
    known = 'backend_config={"known_trip_count":{"n":"3"}}'
    return hlo.parse(TEXT.replace("CALLED", called).replace("KNOWN", known))


def test_what_is_no_program_is_refused():
    with pytest.raises(ValueError, match="ENTRY"):
        hlo.parse("HloModule of_nobody")


def test_copies_count_where_they_are_a_conditionals():
    assert hlo.copies(program()) == {"stays": CACHE}
    assert hlo.copies(program(), least=CACHE + 1) == {}
    assert hlo.copies(program(), inside="while") == {"stays": CACHE}


def test_launches_are_those_of_a_computation_alone():
    found = program()
    assert hlo.launches(found, "main") == 3 and hlo.launches(found, "works") == 2
    assert found.loops() == ["body"]
    changes = [i.name for i in found.computations["works"] if hlo.changes_operand(found, i)]
    assert changes == ["call.1", "call.2"]
    assert hlo.between(found, "works", lambda i: hlo.changes_operand(found, i)) == 1.0
    assert hlo.between(found, "main", lambda i: hlo.changes_operand(found, i)) == 0.0


@pytest.mark.parametrize("kernel, decisions", [
    ("triton_kernel_call_ffi", 0), ("triton_kernel_call", 2),
])  # fmt: skip
def test_a_kernel_in_the_older_form_keeps_loop_and_conditional_on_the_host(kernel, decisions):
    assert hlo.on_host(program(kernel)) == decisions


def test_a_slice_reads_and_an_update_writes_a_part():
    found = program()
    for name, moved in (("fusion.1", 2 * 8 * 64 * 4 + 4), ("fusion.2", 2 * 64 * 4 + 4)):
        (i,) = [i for i in found.computations["main"] if i.name == name]
        assert hlo._cost(found, RATES, "main", i).bytes == pytest.approx(moved, abs=8)


def test_a_loop_counts_as_often_as_it_is_known_to_run():
    found = program()
    least = hlo.estimate(found, "main", RATES, hlo.cheapest)
    most = hlo.estimate(found, "main", RATES, hlo.dearest)
    dot = 2 * 4 * 16 * 32
    assert least.flops == most.flops == dot
    # The conditional's branches: a copy reads and writes the cache; calls change it in place.
    assert {least.launches, most.launches} <= {3 + 3, 3 + 6}
    copied, called = 2 * CACHE, 2 * (CACHE + 2 * 4)
    assert most.bytes - least.bytes == pytest.approx(3 * abs(copied - called))
    assert most.decisions == 3 * 2


def test_temporaries_are_what_is_written():
    found = hlo.temporaries(program())
    assert found["f32[100,64]"] == CACHE and "bf16[16,32]" not in found
