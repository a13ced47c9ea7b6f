"""Trials of plans: which next, how long, and what they say about the others."""
