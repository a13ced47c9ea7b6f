"""The `ridgeline` command: one file a verb."""
