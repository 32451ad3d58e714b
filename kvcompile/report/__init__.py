"""Views of a plan, for people: what was found and chosen, what it costs, what it does to quality."""
