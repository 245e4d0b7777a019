"""What many clients ask at once, read once."""
