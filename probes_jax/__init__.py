"""The monitoring library that every JAX/Flax pretraining run should carry.

    import optax, probes_jax as pj

    model = pj.wrap(module)
    tx = pj.chain(("clip", optax.clip_by_global_norm(1.0)), ("adam", optax.scale_by_adam()),
                  ("lr", optax.scale_by_learning_rate(3e-4)))
    plan = pj.Plan()
    state = pj.TrainState.create(model=model, tx=tx, loss_fn=loss_fn, plan=plan, rngs=key, batch=example)
    with pj.Recorder("runs/demo", plan) as recorder:
        for batch in pj.timed(batches):
            state, report = pj.monitored_train_step(state, batch)
            recorder.record(report)

Names are resolved on first use, so that tools which only read a finished run never import JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Coverage": "probes_jax.spec.coverage",
    "EventWriter": "probes_jax.host.writers.event",
    "Guard": "probes_jax.spec.plan",
    "GuardStopped": "probes_jax.host.verdict",
    "LiveSignals": "probes_jax.present.progress",
    "Monitor": "probes_jax.step.own_loop",
    "Loss": "probes_jax.step.loss",
    "LossScale": "probes_jax.step.loss_scale",
    "MetricSpec": "probes_jax.spec.metric",
    "Plan": "probes_jax.spec.plan",
    "Priority": "probes_jax.spec.metric",
    "REGISTRY": "probes_jax.spec.catalog",
    "Readings": "probes_jax.spec.readings",
    "Recorder": "probes_jax.host.recorder",
    "Report": "probes_jax.step.report",
    "Rngs": "probes_jax.observe.rngs",
    "TrainState": "probes_jax.step.state",
    "chain": "probes_jax.observe.chain",
    "find_divergence": "probes_jax.step.divergence",
    "inspect": "probes_jax.cost.inspection",
    "layerwise_learning_rates": "probes_jax.observe.layerwise",
    "monitored_train_step": "probes_jax.step.train",
    "observe": "probes_jax.observe",
    "observe_gate": "probes_jax.observe.named",
    "observe_routing": "probes_jax.observe.named",
    "open_run": "probes_jax.host.run_folder",
    "preview": "probes_jax.cost.preview",
    "print_screen": "probes_jax.present.screen",
    "restore_state": "probes_jax.step.restore",
    "timed": "probes_jax.host.timed",
    "topology": "probes_jax.cost.topology",
    "wrap": "probes_jax.observe.wrap",
}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'probes_jax' has no attribute {name!r}")
    home = importlib.import_module(_HOMES[name])
    value = home if _HOMES[name] == f"{__name__}.{name}" else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:
    from probes_jax.cost.inspection import inspect as inspect
    from probes_jax.cost.preview import preview as preview
    from probes_jax.cost.topology import topology as topology
    from probes_jax.host.recorder import Recorder as Recorder
    from probes_jax.host.run_folder import open_run as open_run
    from probes_jax.host.timed import timed as timed
    from probes_jax.host.verdict import GuardStopped as GuardStopped
    from probes_jax.host.writers.event import EventWriter as EventWriter
    from probes_jax.observe.chain import chain as chain
    from probes_jax.observe.layerwise import layerwise_learning_rates as layerwise_learning_rates
    from probes_jax.observe.named import observe as observe
    from probes_jax.observe.named import observe_gate as observe_gate
    from probes_jax.observe.named import observe_routing as observe_routing
    from probes_jax.observe.rngs import Rngs as Rngs
    from probes_jax.observe.wrap import wrap as wrap
    from probes_jax.present.progress import LiveSignals as LiveSignals
    from probes_jax.present.screen import print_screen as print_screen
    from probes_jax.spec.catalog import REGISTRY as REGISTRY
    from probes_jax.spec.coverage import Coverage as Coverage
    from probes_jax.spec.metric import MetricSpec as MetricSpec
    from probes_jax.spec.metric import Priority as Priority
    from probes_jax.spec.plan import Guard as Guard
    from probes_jax.spec.plan import Plan as Plan
    from probes_jax.spec.readings import Readings as Readings
    from probes_jax.step.divergence import find_divergence as find_divergence
    from probes_jax.step.loss import Loss as Loss
    from probes_jax.step.loss_scale import LossScale as LossScale
    from probes_jax.step.own_loop import Monitor as Monitor
    from probes_jax.step.report import Report as Report
    from probes_jax.step.restore import restore_state as restore_state
    from probes_jax.step.state import TrainState as TrainState
    from probes_jax.step.train import monitored_train_step as monitored_train_step
