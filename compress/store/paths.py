"""Where a path that a recipe writes points to."""

from __future__ import annotations

from pathlib import Path

from compress.errors import SourceError


def resolve_path(root: Path, text: str) -> Path:
    """Return what `find_path` does, without links on the way."""
    return find_path(root, text).resolve()


def find_path(root: Path, text: str) -> Path:
    """Return the file or folder that `text` names, absolute: as seen from the working directory, else from `root`.

    The name itself may be a link. `root` is the recipe's folder. `~` is the home folder. Raises SourceError, which says
    where it looked.
    """
    path = Path(text).expanduser()
    looked = list(dict.fromkeys((Path.cwd() / path, root.absolute() / path)))  # an absolute path stays itself
    for candidate in looked:
        try:
            if candidate.exists():
                return candidate.parent.resolve() / candidate.name
        except (OSError, RuntimeError) as error:  # RuntimeError: links that lead to each other
            raise SourceError(f"{text}: cannot be looked at: {error}; give another path") from error
    raise SourceError(f"{text}: no such file or folder; looked for {' and '.join(map(str, looked))}")
