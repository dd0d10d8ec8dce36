"""What a metric is: its definition, its summary, and the layout of a report.

Standard library and NumPy only, so that readers of a finished run never import JAX.
"""
