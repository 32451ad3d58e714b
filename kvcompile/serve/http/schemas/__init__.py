"""What requests may say, one file a concern; pydantic checks it."""
