"""From measurements to a verdict: evidence with its intervals, gates, advice."""
