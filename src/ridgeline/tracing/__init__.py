"""Finds out what a training step must do without running it: `trace` makes a `Workload`."""
