"""The asynchronous store: servers that hold values, and the workers' side of them."""
