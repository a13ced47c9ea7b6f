"""A run: epochs of steps, evaluation, checkpoints, and the start of its workers."""
