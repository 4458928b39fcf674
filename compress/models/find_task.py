"""Tell a model's task from its own files: the class that its config.json names, as transformers' tables have it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from compress.models.source import read_object
from compress.tasks import TORCH_TASKS

MODULES = "modules.json"
"""What sentence-transformers writes beside a model: it gives embeddings, whatever class it was trained as."""


def find_task_of_folder(folder: Path) -> tuple[str, str] | None:
    """Return the task of a Hugging Face folder and what says so; None where its files do not. SourceError."""
    if not (folder / "config.json").is_file():
        return None
    config = read_object(folder / "config.json")
    if (folder / MODULES).is_file():
        return next(name for name, task in TORCH_TASKS.items() if task.loss == "embeddings"), MODULES
    named = config.get("architectures")
    known = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    for architecture in known:
        sizes = {name: len(table) for name, table in _list_tables() if architecture in _list_classes(table)}
        if sizes:  # AutoModel's table has classes of several tasks: the smaller a table, the more it says
            base = min(sizes, key=lambda name: sizes[name])
            return _refine(base, config), f"config.json: {architecture}"
    return None


def _list_tables() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each task that has a class of its own in transformers, with that class's table: type -> model's class."""
    import transformers

    for name, task in TORCH_TASKS.items():
        mapping = getattr(getattr(transformers, task.auto_class, None), "_model_mapping", None)
        if task.auto_class and mapping is not None:
            yield name, mapping._model_mapping


def _list_classes(table: Mapping[str, Any]) -> set[str]:
    return {name for names in table.values() for name in ((names,) if isinstance(names, str) else names)}


def _refine(base: str, config: Mapping[str, Any]) -> str:
    """Return the task whose models share the class of `base`, where config.json says that the model is one of its.

    As in transformers, one label is a number where nothing else is said.
    """
    labels = config.get("id2label")
    n_labels = len(labels) if isinstance(labels, dict) else config.get("num_labels")
    problem = config.get("problem_type")
    sharing = {name: task for name, task in TORCH_TASKS.items() if task.model_task == base}
    fits = [
        n
        for n, t in sharing.items()
        if (t.problem_type == problem if problem else n_labels == 1 and t.loss == "numbers")
    ]
    return fits[0] if fits else base
