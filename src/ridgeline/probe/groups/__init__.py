"""Worker processes that measure together."""
