"""Automatic parallelism: independent parts of a program, scheduled over lanes, streams and devices."""
