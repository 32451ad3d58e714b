"""The roles of retention by scores: which slot a token gets, and what queries add to scores."""
