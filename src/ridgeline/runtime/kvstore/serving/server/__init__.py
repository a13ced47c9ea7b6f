"""What a server does with calls."""
