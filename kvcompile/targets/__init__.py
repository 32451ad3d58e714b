"""Export targets: each writes a model with its cache as files, and opens them as a session that runs."""
