"""Waits that would not end, and work that was cut short or came too early."""
