"""Trials of plans: which next, how long, and what they tell of the others."""
