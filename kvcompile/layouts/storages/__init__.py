"""The storages, one family a file; `kvcompile/layouts/storage.py` lists them."""
