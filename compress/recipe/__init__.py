"""A recipe's text and what it says: YAML with positions, includes, variables and `--set`, read into typed records."""
