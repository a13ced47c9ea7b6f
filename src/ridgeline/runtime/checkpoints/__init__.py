"""Checkpoints: the state of a run in a directory, complete or not there at all."""
