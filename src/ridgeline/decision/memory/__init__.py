"""What earlier starts learned: choices, compile times, plans that failed."""
