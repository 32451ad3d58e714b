"""The model as it was given: what is asked of it before, beside and after it is traced."""
