"""kvcompile."""
