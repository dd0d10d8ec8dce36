"""What the measured values mean together: where a trouble began."""
