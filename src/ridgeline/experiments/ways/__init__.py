"""What `async`, `parallel` and `overlap` share: ways to do the same work, checked and timed in turns."""
