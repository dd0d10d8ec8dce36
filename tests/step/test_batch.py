"""What of a batch is refused by name: text among its leaves, keys that it lacks."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import optax
import pytest

import probes_jax as pj
from probes_jax.step.batch import check_leaves
from tests.step.small import Model, loss_fn, make_batch, make_state


@pytest.mark.parametrize(
    ("leaf", "found"),
    [
        ("a.txt", "the str 'a.txt'"),
        (b"raw", "the bytes b'raw'"),
        (np.array(["a", "b"]), "an array of dtype <U1"),
        (np.array([{}, None]), "an array of dtype object"),
        (np.datetime64("2026-01-01"), r"an array of dtype datetime64\[D\]"),
        (range(3), r"the range range\(0, 3\)"),
    ],
)
def test_a_leaf_that_is_no_number_is_named_with_its_path(leaf, found):
    match = rf"batch\['meta'\]\[1\] is {found}, and a train step takes numbers only: leave it out"
    with pytest.raises(TypeError, match=match):
        check_leaves({"tokens": np.zeros(3), "meta": [np.zeros(3), leaf]})


def test_numbers_of_every_kind_are_taken():
    kinds = (np.float32, np.int8, np.uint32, np.bool_, np.complex64, jax.numpy.bfloat16, jax.numpy.int4)
    arrays = [np.zeros(2, kind) for kind in kinds]
    check_leaves([*arrays, jax.ShapeDtypeStruct((2,), np.float32), jax.random.key(0), 1, 2.0, True, None])
    jax.jit(lambda x: check_leaves({"x": x}))(np.zeros(2))


def named(batch):
    return batch | {"name": "a.txt"}


@pytest.mark.parametrize(
    "call",
    [
        lambda batch: make_state(batch=named(batch)),
        lambda batch: pj.monitored_train_step(make_state(), named(batch)),
        lambda batch: pj.inspect(make_state(), named(batch), by=None),
        lambda batch: pj.preview(make_state(), named(batch)),
        lambda batch: pj.Monitor.create(
            tx=optax.sgd(0.1), params=make_state().params, model=Model(), loss_fn=loss_fn, batch=named(batch)
        ),
    ],
    ids=["create", "step", "inspect", "preview", "monitor"],
)
def test_each_call_that_takes_a_batch_says_so(call):
    with pytest.raises(TypeError, match=r"batch\['name'\] is the str 'a.txt'"):
        call(make_batch())


def without(batch):
    return {key: value for key, value in batch.items() if key != "mask"}


@pytest.mark.parametrize(
    "call",
    [
        lambda batch: make_state(batch=without(batch)),
        lambda batch: pj.monitored_train_step(make_state(), without(batch)),
        lambda batch: pj.monitored_train_step(make_state(microbatches=2), without(batch)),
        lambda batch: pj.inspect(make_state(), without(batch), by=None),
        lambda batch: pj.preview(make_state(), without(batch)),
        lambda batch: pj.Monitor.create(
            tx=optax.sgd(0.1), params=make_state().params, model=Model(), loss_fn=loss_fn, batch=without(batch)
        ),
    ],
    ids=["create", "step", "microbatches", "inspect", "preview", "monitor"],
)
def test_a_key_that_the_batch_lacks_is_named_once_beside_the_users_own_traceback(call):
    with pytest.raises(KeyError) as raised:
        call(make_batch())
    (note,) = [text for text in raised.value.__notes__ if "batch=" in text]
    assert note.startswith("The batch= argument has no 'mask': its keys are 'source', 'targets', 'tokens'.")
    assert raised.value.args == ("mask",) and raised.traceback[-1].name == "loss_fn"


def test_a_key_that_is_missing_elsewhere_is_not_blamed_on_the_batch():
    def looks_up(model, batch, rngs):
        return {}["tokens"]

    with pytest.raises(KeyError) as raised:
        make_state(loss_fn=looks_up)
    assert not [text for text in getattr(raised.value, "__notes__", ()) if "batch=" in text]


def test_an_error_of_the_loss_function_stays_what_it_is():
    state = make_state()

    def broken(model, batch, rngs):
        raise TypeError("mine")

    settings = dataclasses.replace(state.settings, loss_fn=broken, programs={})
    with pytest.raises(TypeError) as raised:
        pj.monitored_train_step(dataclasses.replace(state, settings=settings), make_batch())
    assert raised.value.args == ("mine",) and raised.traceback[-1].name == "broken"
