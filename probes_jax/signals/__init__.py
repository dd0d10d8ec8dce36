"""What values mean in a model: loss, gradients, logits."""
