"""Graph passes of kvcompile, imported as `kvcompile.passes`."""
