"""What programs ask of objects: containers, and values of Python's library."""
