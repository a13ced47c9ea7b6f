"""`ridgeline simulate` over layers, numbers of workers, and as a page."""
