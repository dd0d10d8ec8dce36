"""Reading optimized HLO: text written by hand, whose costs can be counted by hand."""

from __future__ import annotations

import pytest

from probes_jax.cost.hlo import parse
from probes_jax.cost.traffic import bytes_accessed, collectives, more

LOOP = """HloModule jit_f, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (state: (s32[], f32[8,4], f32[3,8,4])) -> (s32[], f32[8,4], f32[3,8,4]) {
  %state = (s32[], f32[8,4]{1,0}, /*index=2*/f32[3,8,4]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[8,4]{1,0} get-tuple-element(%state), index=1
  %w = f32[3,8,4]{2,1,0} get-tuple-element(%state), index=2
  %reduced = f32[8,4]{1,0} all-reduce(%x), channel_id=1, to_apply=%add, metadata={op_name="jit(f)/while/body/psum"}
  %next = f32[8,4]{1,0} fusion(%reduced, %w, %i), kind=kLoop, calls=%slice_and_add
  ROOT %out = (s32[], f32[8,4]{1,0}, f32[3,8,4]{2,1,0}) tuple(%i, %next, %w)
}

%slice_and_add (p0: f32[8,4], p1: f32[3,8,4], p2: s32[]) -> f32[8,4] {
  %p0 = f32[8,4]{1,0} parameter(0)
  %p1 = f32[3,8,4]{2,1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %row = f32[1,8,4]{2,1,0} dynamic-slice(%p1, %p2), dynamic_slice_sizes={1,8,4}
  %flat = f32[8,4]{1,0} bitcast(%row)
  ROOT %sum.1 = f32[8,4]{1,0} add(%p0, %flat)
}

%condition (state: (s32[], f32[8,4], f32[3,8,4])) -> pred[] {
  %state.1 = (s32[], f32[8,4]{1,0}, f32[3,8,4]{2,1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %limit = s32[] constant(3)
  ROOT %less = pred[] compare(%i.1, %limit), direction=LT
}

ENTRY %main (x: f32[8,4], w: f32[3,8,4]) -> f32[8,4] {
  %x.1 = f32[8,4]{1,0:T(8,128)} parameter(0)
  %w.1 = f32[3,8,4]{2,1,0} parameter(1)
  %zero = s32[] constant(0)
  %start = (s32[], f32[8,4]{1,0}, f32[3,8,4]{2,1,0}) tuple(%zero, %x.1, %w.1)
  %loop = (s32[], f32[8,4]{1,0}, f32[3,8,4]{2,1,0}) while(%start), condition=%condition, body=%body
  %near = bf16[8,4]{1,0:T(8,128)(2,1)S(1)} convert(%x.1)
  ROOT %end = f32[8,4]{1,0} get-tuple-element(%loop), index=1
}
"""
TENSOR = 8 * 4 * 4  # bytes of f32[8,4]


def test_a_loop_counts_as_often_as_it_turns():
    module = parse(LOOP)
    turn = 2 * TENSOR + (TENSOR + TENSOR + 4 + TENSOR)  # all-reduce; fusion: operand, one row of w, index, result
    convert = TENSOR  # its result lies beside the processor
    assert bytes_accessed(module) == 3 * turn + convert


def test_a_collective_says_where_it_stands():
    (found,) = collectives(parse(LOOP))
    assert (found.op, found.arrays, found.looped, found.times) == ("all-reduce", ("f32[8,4]",), True, 3)
    assert found.source == "jit(f)/while/body/psum"


def test_what_xla_says_of_a_loop_goes_before_its_condition():
    text = LOOP.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"5"}}')
    assert [found.times for found in collectives(parse(text))] == [5]


def test_two_halves_are_one_collective():
    text = """HloModule m
ENTRY %main (x: f32[4]) -> f32[8] {
  %x = f32[4]{0} parameter(0)
  %start = (f32[4]{0}, f32[8]{0}) all-gather-start(%x), dimensions={0}
  ROOT %done = f32[8]{0} all-gather-done(%start)
}
"""
    assert [found.op for found in collectives(parse(text))] == ["all-gather"]


PLAIN = """HloModule plain

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%maximum (c: f32[], d: f32[]) -> f32[] {
  %c = f32[] parameter(0)
  %d = f32[] parameter(1)
  ROOT %most = f32[] maximum(%c, %d)
}

ENTRY %main (x: f32[1,6]) -> f32[1,6] {
  %x = f32[1,6]{1,0} parameter(0)
  %largest = f32[1,6]{1,0} all-reduce(%x), channel_id=1, to_apply=%maximum
  ROOT %total = f32[1,6]{1,0} all-reduce(%largest), channel_id=2, to_apply=%add
}
"""
# As XLA joins them on GPU: flattened and laid end to end, two that are alike and two that are not.
JOINED = (
    PLAIN.partition("ENTRY")[0]
    + """%both (e: f32[6], f: f32[6]) -> f32[12] {
  %e = f32[6]{0} parameter(0)
  %f = f32[6]{0} parameter(1)
  ROOT %laid = f32[12]{0} concatenate(%e, %f), dimensions={0}
}

ENTRY %main (x: f32[6], y: f32[6], z: f32[4]) -> f32[10] {
  %x = f32[6]{0} parameter(0)
  %y = f32[6]{0} parameter(1)
  %z = f32[4]{0} parameter(2)
  %end.to.end = f32[12]{0} fusion(%x, %y), kind=kLoop, calls=%both
  %largest = f32[12]{0} all-reduce-start(%end.to.end), channel_id=1, to_apply=%maximum
  %done = f32[12]{0} all-reduce-done(%largest)
  %more = f32[10]{0} concatenate(%x, %z), dimensions={0}
  ROOT %total = f32[10]{0} all-reduce(%more), channel_id=2, to_apply=%add
}
"""
)


def test_what_is_joined_and_flattened_is_found_part_by_part():
    plain, joined = collectives(parse(PLAIN)), collectives(parse(JOINED))
    assert [(found.reduction, found.arrays, found.parts) for found in joined] == [
        ("maximum", ("f32[12]",), ("f32[6]", "f32[6]")),
        ("add", ("f32[10]",), ("f32[6]", "f32[4]")),
    ]
    assert [(found.reduction, found.arrays) for found in more(joined, plain)] == [
        ("maximum", ("f32[6]",)),
        ("add", ("f32[4]",)),
    ]
    assert more(plain, plain) == more(joined, joined) == ()
    assert more(joined, ()) == tuple(joined)


def test_what_is_the_same_as_a_whole_is_paired_first():
    joined, plain = collectives(parse(JOINED)), collectives(parse(PLAIN))
    (largest,) = more([*joined, plain[0]], joined)
    assert largest == plain[0]
    assert [found.arrays for found in more([joined[0], *plain], plain)] == [("f32[12]",)]


@pytest.mark.parametrize(
    ("kind", "size"), [("pred[3]", 3), ("s4[3]", 2), ("f8e4m3fn[2,2]", 4), ("c64[2]", 16), ("f32[]", 4), ("token[]", 0)]
)
def test_sizes_of_types(kind, size):
    text = f"HloModule m\nENTRY %main (x: {kind}) -> {kind} {{\n  ROOT %x = {kind} parameter(0)\n}}\n"
    (_, instruction, _, _) = next(iter(parse(text).walk()))
    assert instruction.arrays[0].size == size


def test_an_update_in_place_costs_what_it_changes():
    text = """HloModule m
ENTRY %main (x: f32[100,8], u: f32[1,8], i: s32[]) -> f32[100,8] {
  %x = f32[100,8]{1,0} parameter(0)
  %u = f32[1,8]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %out = f32[100,8]{1,0} dynamic-update-slice(%x, %u, %i, %i)
}
"""
    assert bytes_accessed(parse(text)) == 2 * 8 * 4


def test_other_text_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        parse("module @jit_f {}")
