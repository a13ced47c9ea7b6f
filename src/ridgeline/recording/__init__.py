"""Recording what runs: clocks, frames, gaps between steps."""
