"""wrap() picks the framework and says what it cannot wrap; patches are put back."""

from __future__ import annotations

import subprocess
import sys
import threading

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from probes_jax.observe.linen import LinenBinding
from probes_jax.observe.nnx import NNXBinding
from probes_jax.observe.patch import patched
from probes_jax.observe.wrap import wrap


def test_it_picks_the_framework_and_leaves_a_binding_alone():
    linen, flax_nnx = wrap(nn.Dense(2)), wrap(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    assert isinstance(linen, LinenBinding)
    assert isinstance(flax_nnx, NNXBinding)
    assert wrap(linen) is linen


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (nn.Dense, r"the class Dense; pass an instance, Dense\(...\)"),
        (nnx.Linear, "the class Linear"),
        (lambda x: x, "got function"),
        (None, "got NoneType"),
        ({"params": {}}, "got dict"),
    ],
)
def test_what_is_no_module_is_refused(value, message):
    with pytest.raises(TypeError, match=message):
        wrap(value)


def test_a_bound_linen_module_is_refused():
    module = nn.Dense(2)
    bound = module.bind(module.init(jax.random.key(0), jnp.ones((1, 2))))
    with pytest.raises(ValueError, match="unbound"):
        wrap(bound)


def test_importing_wrap_imports_no_framework():
    code = "import sys, probes_jax.observe.wrap; sys.exit(any(name.startswith('flax') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class Owner:
    def method(self):
        return "original"

    @staticmethod
    def static():
        return "original"


def replacement(original):
    return lambda *args: "patched"


def test_patches_are_put_back_also_after_an_exception():
    before = dict(vars(Owner))
    with pytest.raises(KeyError), patched([(Owner, "method", replacement), (Owner, "absent", replacement)]):
        assert Owner().method() == "patched"
        assert not hasattr(Owner, "absent")
        raise KeyError
    assert dict(vars(Owner)) == before


def test_nested_patches_end_with_the_last():
    with patched([(Owner, "method", replacement)]):
        with patched([(Owner, "method", replacement)]):
            pass
        assert Owner().method() == "patched"
    assert Owner().method() == "original"


def test_patches_in_threads_end_with_the_last():
    inside, leave = threading.Event(), threading.Event()

    def hold():
        with patched([(Owner, "method", replacement)]):
            inside.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    with patched([(Owner, "method", replacement)]):
        thread.start()
        inside.wait()
    assert Owner().method() == "patched"
    leave.set()
    thread.join()
    assert Owner().method() == "original"


def test_a_patch_that_cannot_be_made_leaves_nothing():
    def fails(original):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), patched([(Owner, "method", replacement), (Owner, "static", fails)]):
        pass
    assert Owner().method() == Owner.static() == "original"
