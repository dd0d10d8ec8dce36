"""What of a report goes online, which limits it exceeds, and what is said then; nothing is compiled."""

from __future__ import annotations

import pytest

from probes_jax.spec.layout import Entry, Layout
from probes_jax.spec.limits import count_families, count_stored, exceeded, shares
from probes_jax.spec.metric import Priority
from probes_jax.spec.online import BESIDE, for_store_only, is_one_of_many, priority_of, stored_only
from probes_jax.spec.plan import Plan
from probes_jax.spec.readings import decoder_of

POINTS = ("ln1", "attn/query", "attn/key", "attn/value", "attn/out", "attn", "ln2", "mlp/up", "mlp/down", "mlp", "")
GROUPS = ("code", "docs", "law")


def layout_of(layers: int, program: str = "full", groups: tuple[str, ...] = GROUPS) -> Layout:
    """What a decoder of so many layers reports: every point there and back, every parameter, the totals."""
    blocks = [f"block[{i}]/{point}".rstrip("/") for i in range(layers) for point in POINTS]
    words = ("logits/abs_max", "opt/learning_rate", "grad/clip_rate", "alert/co_spike", "data/tokens", "my_metric")
    words += ("loss/spike/u", "loss/spike/score", "grad/spike/u", "grad/spike/score", "sys/monitor/points_seen")
    entries = [
        Entry("mean", ("loss/mean",)),
        Entry("mean", tuple(f"loss/shard[{i}]" for i in range(64))),
        Entry("mean", tuple(f"loss/group/{group}/mean" for group in groups)),
        Entry("mean", tuple(f"loss/group/{group}/token_share" for group in groups)),
        Entry("magnitude", ("grad/{stat}",), ("norm", "abs_mean", "abs_max", "zero_fraction")),
        Entry("norm", ("update/{stat}",)),
        *(Entry("scalar", (word,)) for word in words),
    ]
    if program == "full":
        entries += [Entry("moments", tuple(f"{way}/{b}/{{stat}}" for b in blocks)) for way in ("act", "grad_act")]
        entries.append(Entry("magnitude", tuple(f"grad/{b}/kernel/{{stat}}" for b in blocks)))
        entries += [Entry("norm", tuple(f"{what}/{b}/kernel/{{stat}}" for b in blocks)) for what in ("param", "update")]
        entries += [Entry("scalar", (f"opt/stage/{stage}/cosine",)) for stage in ("clip", "adam", "lr")]
    return Layout(program, tuple(entries))


DEEP, SMALL = layout_of(192), layout_of(4)


def names_of(layout):
    return decoder_of(layout).names


def test_a_deep_model_keeps_every_signal_online_and_every_layer_in_the_store():
    stored = stored_only(DEEP, Plan().max_series)
    online = {*names_of(DEEP)} - stored.layers
    assert len(stored.layers) > 50_000 and not stored.beyond
    assert {"loss/mean", "loss/group/law/mean", "grad/norm", "act/abs_max", "opt/stage/adam/cosine"} <= online
    assert not [name for name in online if "block[" in name or "shard[" in name]
    assert online == {name for name in names_of(SMALL) if not is_one_of_many(name)}
    assert exceeded(DEEP, Plan()) == ()  # 617 kB: a usual plan of a deep model says nothing


@pytest.mark.parametrize("most", [1, BESIDE + 12, BESIDE + 15, BESIDE + 20])
def test_the_least_important_is_left_out_first(most):
    left_out = for_store_only(names_of(SMALL), most).beyond
    kept = [name for name in names_of(SMALL) if not is_one_of_many(name) and name not in left_out]
    assert all(priority_of(name) is not Priority.P0 and not name.startswith("sys/") for name in left_out)
    if any(priority_of(name) is Priority.P1 for name in left_out):
        assert not [name for name in kept if priority_of(name) is Priority.P2]
    assert len(kept) <= most or {priority_of(n) for n in kept if not n.startswith("sys/")} == {Priority.P0}
    assert for_store_only(names_of(SMALL), most + 1).beyond <= left_out  # more room costs no other its place


def test_a_series_is_online_in_both_programs_or_in_none():
    light = layout_of(4, "light")
    cuts = {most: stored_only(SMALL, most).beyond & {*names_of(light)} for most in range(BESIDE, BESIDE + 40)}
    assert all(stored_only(light, most).beyond == cut for most, cut in cuts.items())
    assert len({*cuts.values()}) > 5


def test_families_go_whole():
    names = (*(f"opt/learning_rate/{label}" for label in "abcd"), "loss/mean", "data/tokens")
    assert for_store_only(names, BESIDE + 5).beyond == {*names[:4]}
    assert for_store_only(names, BESIDE + 6).beyond == frozenset()


def test_limits_are_said_with_numbers_families_and_the_setting():
    payload = sum(4 * slot.size for slot in SMALL.slots)
    act = sum(4 * slot.size for slot in SMALL.slots if SMALL.entries[slot.entry].key.startswith("act/"))
    assert sum(share.payload for share in shares(SMALL).values()) == payload
    assert exceeded(SMALL, Plan(max_payload=payload)) == ()
    assert exceeded(layout_of(4, "light"), Plan(max_payload=1)) == ()
    (line,) = exceeded(SMALL, Plan(max_payload=payload - 1))
    for words in (f"{payload:,} bytes", f"max_payload={payload - 1:_}", f"act {act:,}", "Plan(without="):
        assert words in line
    (line,) = exceeded(SMALL, Plan(max_series=BESIDE + 15))
    left_out = stored_only(SMALL, BESIDE + 15).beyond
    assert f"max_series={BESIDE + 15}" in line and "store only" in line
    largest = sorted(count_families(left_out).items(), key=lambda item: -item[1])[:2]
    assert all(f"{family} {count}" in line for family, count in largest)
    many = layout_of(1, groups=tuple(f"g{i}" for i in range(1000)))
    assert "fewer groups" in exceeded(many, Plan())[-1]


def test_what_is_stored_is_counted_by_family():
    counted = count_stored(SMALL, Plan())
    assert counted.keys() == {"loss", "act", "grad_act", "grad", "param", "update"}
    assert counted["loss"] == 64 and counted["act"] == len([n for n in names_of(SMALL) if n.startswith("act/b")])
