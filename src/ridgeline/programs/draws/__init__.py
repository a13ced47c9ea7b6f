"""Random numbers that torch's compiler would draw otherwise, or not at all."""
