"""What compiled programs take for granted of classes, hooks and settings, watched from outside."""
