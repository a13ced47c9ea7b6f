"""Workers that each update a part of the parameters."""
