"""Programs as files: the archive, its metadata, ahead-of-time compilation, loading."""
