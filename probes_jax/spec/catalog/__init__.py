"""All metrics, one module a family. Docs, `probes metrics`, writer metadata and dashboards come from here."""

from probes_jax.spec.catalog import attention, gradient, loss, optimizer, residual, router, system, tensor
from probes_jax.spec.registry import Registry

REGISTRY = Registry(
    [
        *loss.METRICS,
        *gradient.METRICS,
        *tensor.METRICS,
        *residual.METRICS,
        *router.METRICS,
        *attention.METRICS,
        *optimizer.METRICS,
        *system.METRICS,
    ]
)
