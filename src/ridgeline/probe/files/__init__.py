"""How fast files are written and read."""
