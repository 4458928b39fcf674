"""How our processes start, are bounded, and end."""
