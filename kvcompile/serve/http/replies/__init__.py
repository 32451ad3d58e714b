"""What answers look like, one file a kind."""
