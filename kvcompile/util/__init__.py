"""What every room needs and none owns: text for people, folders of the user's, progress, quiet tracing."""
