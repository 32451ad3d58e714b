"""Parts of the roles that write the cache (append, group)."""
