"""JSON for strict parsers that keeps NaN and infinities."""

import json
import math

import numpy as np
import pytest

from probes_jax.host import strict_json


def strict(data):
    def refuse(token):
        raise AssertionError(f"bare token {token}")

    return json.loads(data, parse_constant=refuse)


def test_l071_nan_leaves_the_record_readable_and_the_finite_metrics_intact():
    record = {"loss": math.nan, "norm": 2.0, "z": np.float32(np.inf), "low": -math.inf, "count": 2**60}
    data = strict_json.dumps(record)
    assert strict(data)["loss"] == {"$float": "NaN"}
    assert (strict(data)["norm"], strict(data)["count"]) == (2.0, 2**60)
    back = strict_json.loads(data)
    assert math.isnan(back.pop("loss"))
    assert back == {"norm": 2.0, "z": math.inf, "low": -math.inf, "count": 2**60}


def test_containers_and_numpy_come_back_as_plain_values():
    value = {"a": (1, 2), "b": np.arange(3), "c": np.bool_(True), "d": [None, "é NaN"], 5: np.array([np.nan, 1.0])}
    back = strict_json.loads(strict_json.dumps(value))
    assert back["a"] == [1, 2]
    assert back["b"] == [0, 1, 2]
    assert back["c"] is True
    assert back["d"] == [None, "é NaN"]
    assert math.isnan(back["5"][0])


@pytest.mark.parametrize("value", [object(), b"bytes", {"x": 1j}, [print]])
def test_what_json_cannot_hold_is_refused(value):
    with pytest.raises(TypeError, match="cannot store"):
        strict_json.dumps(value)


def test_the_reserved_key_and_bare_tokens_are_refused():
    with pytest.raises(ValueError, match=r"\$float"):
        strict_json.dumps({"a": {"$float": "NaN"}})
    with pytest.raises(ValueError, match="bare token NaN"):
        strict_json.loads(b'{"a": NaN}')
