"""What a step leaves under names in Python, and its program puts there."""
