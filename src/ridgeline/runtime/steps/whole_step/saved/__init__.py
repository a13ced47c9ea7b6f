"""Training steps in files."""
