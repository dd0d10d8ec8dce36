import pytest

from probes_jax.spec.metric import Cadence, MetricSpec, Priority
from probes_jax.spec.registry import Registry


def _spec(name: str, **changes) -> MetricSpec:
    fields = {
        "symbol": "x",
        "unit": "1",
        "priority": Priority.P1,
        "cadence": Cadence.EVERY_STEP,
        "definition": "d",
        "reduction": "r",
        "timing": "t",
        "catches": "c",
        "source": "s",
    }
    return MetricSpec(name, **{**fields, **changes})


def test_a_name_finds_its_entry():
    registry = Registry([_spec("loss/mean"), _spec("act/{path}/rms"), _spec("loss/group/{group}")])
    assert registry["loss/mean"].name == "loss/mean"
    assert registry["act/block[3]/mlp/rms"].name == "act/{path}/rms"
    assert registry.find("loss/group/code").name == "loss/group/{group}"
    assert [spec.name for spec in registry] == ["loss/mean", "act/{path}/rms", "loss/group/{group}"]
    assert len(registry) == 3


def test_a_word_is_one_segment_and_a_path_any_number():
    registry = Registry([_spec("a/{word}/z"), _spec("b/{path}/z")])
    assert registry.find("a/x/z") is not None
    assert registry.find("a/x/y/z") is None
    assert registry.find("b/x/y/z") is not None
    assert registry.find("b/z") is None


def test_the_exact_name_wins_and_then_the_most_literal_template():
    registry = Registry([_spec("grad/{path}"), _spec("grad/{path}/norm"), _spec("grad/all/norm")])
    assert registry["grad/all/norm"].name == "grad/all/norm"
    assert registry["grad/a/norm"].name == "grad/{path}/norm"
    assert registry["grad/a/share"].name == "grad/{path}"


def test_a_template_is_no_regular_expression():
    registry = Registry([_spec("loss/shard[{index}]"), _spec("a.b/{word}")])
    assert registry.find("loss/shard[3]") is not None
    assert registry.find("aXb/c") is None


def test_an_unknown_name_says_where_to_look():
    with pytest.raises(KeyError, match="probes metrics"):
        Registry()["nothing"]


def test_an_entry_added_later_is_found_though_it_was_missed_before():
    registry = Registry()
    assert registry.find("a/b") is None
    registry.add(_spec("a/{word}"))
    assert registry.find("a/b") is not None


def test_a_template_is_registered_once():
    with pytest.raises(ValueError, match="registered twice"):
        Registry([_spec("a"), _spec("a")])


@pytest.mark.parametrize("field", ["symbol", "unit", "definition", "reduction", "timing", "catches", "source"])
def test_every_field_must_be_filled_in(field):
    with pytest.raises(ValueError, match=field):
        _spec("a", **{field: ""})
