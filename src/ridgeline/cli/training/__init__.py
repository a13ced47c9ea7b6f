"""`ridgeline train` from the order to the verdict."""
