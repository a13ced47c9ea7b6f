"""Programs as graphs: operations, what they touch, and what must come before what."""
