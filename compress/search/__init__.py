"""Many trials of one recipe: the points of its search, tried, judged, and what is best of them kept."""
