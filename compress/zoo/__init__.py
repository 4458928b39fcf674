"""Small models with real weights or known weights' layout, for the example recipes, the tests and the benchmarks.

`digits_resnet` comes with trained weights and data in `digits/`; `cifar_resnet` fits published CIFAR-10 checkpoints.
"""
