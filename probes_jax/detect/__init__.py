"""Detectors inside the step: (state, reading) -> (state, verdict), pure functions with fixed shapes and dtypes."""
