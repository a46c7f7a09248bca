"""The bytes that devices send are read from a program's text."""

import pytest

from spile.compile.collectives import Collective, read_collectives, sent_by_all

LOOP = '"known_trip_count":{"n":"28"}'
PROGRAM = f"""\
HloModule jit_run, is_scheduled=true, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {{
  ROOT %sum = f32[] add(%x, %y)
}}

%body (p: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {{
  %all-reduce.1 = bf16[8,16]{{1,0}} all-reduce(%x), replica_groups=[4,2]<=[8], to_apply=%add
  %gathered = f32[1,64]{{1,0}} all-gather(%w), replica_groups={{{{0,1,2,3}},{{4,5,6,7}}}}
  %fused = bf16[8,16] fusion(%x), kind=kLoop, calls=%inner
}}

%inner (p: bf16[4]) -> bf16[4] {{
  %moved = bf16[4]{{0}} collective-permute(%p), source_target_pairs={{{{0,1}}}}
}}

%condition (p: (s32[], bf16[8,16])) -> pred[] {{
  ROOT %less = pred[] compare(%i, %n), direction=LT
}}

ENTRY %main (p: bf16[8,16]) -> bf16[8,16] {{
  %loop = (s32[], bf16[8]) while(%init), condition=%condition, body=%body, backend_config={{{LOOP}}}
  %start = (bf16[2,4], bf16[8,4]) all-gather-start(%p), replica_groups=[2,4]<=[8], dimensions={{0}}
  %done = bf16[8,4] all-gather-done(%start)
  %alone = f32[4] all-reduce(%q), replica_groups=[8,1]<=[8], to_apply=%add
}}
"""


def test_what_stands_in_a_loop_counts_as_often_as_it_runs() -> None:
    found = read_collectives(PROGRAM, 8)
    assert found == {
        "all-reduce": Collective(28, 28 * (2 * 8 * 16 * 2) // 2),
        "all-gather": Collective(29, 28 * (64 * 4) * 3 // 4 + (8 * 4 * 2) * 3 // 4),
        "collective-permute": Collective(28, 28 * 4 * 2),
    }
    assert sent_by_all(found) == sum(each.sent for each in found.values())


def test_a_loop_without_a_trip_count_is_counted_as_the_loop_over_blocks() -> None:
    silent = PROGRAM.replace(LOOP, "")
    assert read_collectives(silent, 8, trips=5)["all-reduce"].count == 5
    assert read_collectives(PROGRAM, 8, trips=5)["all-reduce"].count == 28


def test_what_a_compiler_has_widened_can_be_counted_as_it_was() -> None:
    wide, narrow = (read_collectives(PROGRAM, 8, narrow=n)["all-gather"] for n in (False, True))
    outside = (8 * 4 * 2) * 3 // 4
    assert wide.sent - outside == 2 * (narrow.sent - outside)


def test_a_program_that_sends_nothing_has_none() -> None:
    assert read_collectives("ENTRY %main (p: f32[]) -> f32[] {\n  ROOT %p = f32[]\n}", 8) == {}
    assert read_collectives("", 8) == {}


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", 4),
        ("[2,4]<=[4,2]T(1,0)", 4),
        ("mesh['a'=2,'b'=1,'c'=4], device_ids=([4,2]T(1,0)) {'a'}", 2),
        ("mesh['a'=2,'b'=4] {'a','b'}", 8),
        ("mesh['a'=8] {'a':(1)4}", 4),
        ("{}", 8),
    ],
)
def test_groups_are_read_however_they_are_written(groups: str, size: int) -> None:
    line = f"  %sum = f32[1000] all-reduce(%p), replica_groups={groups}, to_apply=%add"
    found = read_collectives(f"ENTRY %main (p: f32[1000]) -> f32[1000] {{\n{line}\n}}", 8)
    assert found["all-reduce"].sent == round(2 * 4000 * (size - 1) / size)
