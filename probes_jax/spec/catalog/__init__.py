"""All metrics, one module a family. Docs, `probes metrics`, writer metadata and dashboards come from here."""

from probes_jax.spec.catalog import (
    attention,
    gradient,
    loss,
    media,
    optimizer,
    precision,
    replica,
    residual,
    router,
    system,
    tensor,
)
from probes_jax.spec.registry import Registry

REGISTRY = Registry(
    [
        *loss.METRICS,
        *gradient.METRICS,
        *tensor.METRICS,
        *precision.METRICS,
        *residual.METRICS,
        *router.METRICS,
        *attention.METRICS,
        *media.METRICS,
        *optimizer.METRICS,
        *replica.METRICS,
        *system.METRICS,
    ]
)
