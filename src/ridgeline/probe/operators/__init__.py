"""Single operators of a step, issued again on tensors like the step's, and timed."""
