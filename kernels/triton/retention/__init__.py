"""What retention by scores needs: which slot a token gets (a part of append), and the roles that add to scores."""
