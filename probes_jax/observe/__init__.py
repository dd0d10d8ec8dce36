"""Where values are taken: inside a model nobody edited, and between the stages of an optimizer."""
