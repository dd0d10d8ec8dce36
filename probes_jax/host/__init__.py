"""What happens to a report after the step: sinks, the run folder, the store. No JAX computation here."""
