"""One file per cause that once made a decoder silently wrong, each in several spellings.

Every case is a decoder of the fuzzer's grammar (`tests.fuzz.spec`), at 320 to 700 tokens; `checks` says what is asked.
"""
