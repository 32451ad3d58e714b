"""The roles that write the cache: append, group, page_copy; and the parts of their text."""
