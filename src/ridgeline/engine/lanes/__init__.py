"""Lanes: where tasks run."""
