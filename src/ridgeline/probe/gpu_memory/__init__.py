"""Levels of a GPU's memory, and what fills its multiprocessors."""
