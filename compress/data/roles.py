"""Which column of a file plays which role."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from compress.data.table import Table
from compress.errors import SourceError
from compress.recipe.places import did_you_mean
from compress.specs import DataSpec
from compress.tasks import find_torch_task
from runtime.tasks import find_task

USUAL_NAMES: dict[str, tuple[str, ...]] = {
    "image": ("image", "img", "pixel_values"),
    "text": ("text", "sentence", "sentence1"),
    "text_pair": ("text_pair", "sentence2"),
    "label": ("label", "labels", "score", "target"),
}
"""Role -> the column names it is found under when the recipe gives no `columns`."""


def resolve_roles(spec: DataSpec, table: Table, task: str, input_names: Sequence[str]) -> dict[str, str]:
    """Map each role to a column name.

    SourceError, all problems at once: an unknown role, a missing column, a missing input.
    """
    if not table.names:
        raise SourceError(f"{table.where}: holds no samples")
    task_roles = find_task(task).columns
    columns = (
        _resolve_declared(spec, table, task, input_names)
        if spec.columns
        else _match_usual_names(table, task, input_names)
    )
    required = task_roles[:1] or tuple(input_names) or tuple(role for role in columns if role != "label")[:1]
    missing = [role for role in required if role not in columns]
    as_tensors = bool(input_names) and set(input_names) <= columns.keys()
    if (missing and not as_tensors) or not columns.keys() - {"label"}:
        roles = ", ".join(missing) or "an input"
        raise SourceError(
            f"{table.where}: no column for {roles}; the file has: {', '.join(table.names) or 'no columns'}; name them "
            f"in the recipe, such as `columns: {{{missing[0] if missing else 'x'}: ...}}`{table.hint}"
        )
    lengths = {column: table.lengths[column] for column in columns.values()}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{column} {n}" for column, n in lengths.items())
        raise SourceError(f"{table.where}: columns differ in length: {shown}")
    return columns


def same_roles(parts: Sequence[tuple[str, Collection[str]]]) -> None:
    """Raise SourceError unless all files, of which (source, roles) are given, have the same roles."""
    first, roles = parts[0]
    for source, others in parts[1:]:
        if set(others) != set(roles):
            raise SourceError(
                f"{source}: also: has {', '.join(sorted(others))}, but {first} has {', '.join(sorted(roles))}; give "
                "both the same columns"
            )


def _resolve_declared(spec: DataSpec, table: Table, task: str, input_names: Sequence[str]) -> dict[str, str]:
    task_roles = find_task(task).columns
    allowed = (*task_roles, *input_names, "label")
    any_role = not task_roles and not input_names
    unknown = [role for role in spec.columns if role not in allowed and not any_role]
    problems = [
        f"{table.where}: role '{role}' is not one of {', '.join(allowed)}{did_you_mean(role, allowed)}"
        for role in unknown
    ]
    columns = {}
    for role, column in spec.columns.items():
        if isinstance(column, int):
            if not 0 <= column < len(table.names):
                problems.append(
                    f"{table.where}: there is no column {column} (for {role}): the file has {len(table.names)}, from 0"
                )
                continue
            column = table.names[column]
        if column not in table.lengths:
            shown = did_you_mean(column, table.names) or f"; the file has: {', '.join(table.names) or 'no columns'}"
            problems.append(f"{table.where}: there is no column '{column}' (for {role}){shown}{table.hint}")
        columns[role] = column
    if problems:
        raise SourceError(problems)
    return columns


def _match_usual_names(table: Table, task: str, input_names: Sequence[str]) -> dict[str, str]:
    task_roles, further = find_task(task).columns, find_torch_task(task).usual_names
    columns: dict[str, str] = {}
    for role in (*task_roles, "label"):
        usual = USUAL_NAMES.get(role, (role,)) + further.get(role, ())
        names = [name for name in usual if name in table.lengths]
        if names:
            columns[role] = names[0]
    if not task_roles:
        wanted = input_names or [name for name in table.names if name not in USUAL_NAMES["label"]]
        columns |= {name: name for name in wanted if name in table.lengths}
    return columns
