"""Recurrent state: modules that carry something from token to token that is no key and no value."""
