"""The transports of this release and what they are made of, one idea a file."""
