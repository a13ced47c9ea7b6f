"""What is measured of a host: memory, caches, cores, vectors, limits."""
