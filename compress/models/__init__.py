"""The model of a recipe: where it comes from, what can be known before its weights are read, and loading it.

Doors, each in its own module so that torch is imported only where it is needed:
`preprocess.resolve_preprocess` and `source.model_digest` (no torch), `facts.model_facts`, `feeds.model_inputs`,
`feeds.feeds_shapes`, `load.load_model`.
"""
