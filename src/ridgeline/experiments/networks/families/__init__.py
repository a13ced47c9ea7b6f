"""The networks, one module for each family; each has a tuple `NETWORKS`."""
