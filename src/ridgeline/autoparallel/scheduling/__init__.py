"""Schedules: which lane runs what and when, and what no schedule can beat."""
