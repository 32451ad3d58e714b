"""Code broken on purpose, a line at a time, to see that the quick tests notice: `python -m tests.breaks`.

A test suite that is made faster must catch what it caught before. Each break of the tables names the quick tests that
have to fail by it; it is made in a copy of the tree, and only those tests run there.
"""
