"""Predictions for other machines and numbers of workers, each with its interval."""
