"""The role of a selection: how much the tokens of each page may matter to a step."""
