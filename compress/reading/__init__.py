"""Recipe text to a tree of values that know where they stand: YAML, includes, variables, --set, and error lines."""
