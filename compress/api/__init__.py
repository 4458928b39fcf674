"""The product in Python: a model and data that a program holds go in, a judged bundle comes back.

`models` and `datasets` write objects into files that a recipe can name, `jobs` makes and runs the recipe, `result` is
what comes back.
"""
