"""A plan becomes a judged bundle: the passes in their order, each result kept, what each left measured."""
