"""What a step of the user's code can get at, besides what it is given, and taking back what it did there."""
