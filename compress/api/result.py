"""What a job leaves: its verdict, the bundle that it is of, and the compressed model itself."""

from __future__ import annotations

import shutil
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.store.output import publish, reserve_output, resolve_output

if TYPE_CHECKING:
    from torch import nn

    from compress.commands.parcel import Push
    from compress.recipe.schema import Recipe
    from compress.search.study import Study
    from runtime import Bundle
    from runtime.report.report import Report


class Result:
    """A judged bundle. What a `Report` has, a result has, too: `verdict`, `gates`, `candidate`, `metrics`, ...

    `report`: the judgement. `folder`: where the bundle lies. `recipe`: what made it. `study`: the trials, of a job that
    searched. It draws itself in a notebook.
    """

    def __init__(self, report: Report, folder: Path, recipe: Recipe, study: Study | None = None) -> None:
        self.report, self.folder, self.recipe, self.study = report, folder, recipe, study

    def __repr__(self) -> str:
        return f"<Result {self.folder}: {self.report!r}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.report, name)

    def _repr_html_(self) -> str:
        return (self.study if self.study is not None else self.report)._repr_html_()

    @cached_property
    def bundle(self) -> Bundle:
        """Return the bundle, opened: `bundle.predict(...)`, `bundle.generate(...)`."""
        import runtime

        return runtime.open_bundle(self.folder)

    def torch(self) -> nn.Module:
        """Return the compressed torch module, in eval mode on the CPU: to train on, or to export elsewhere.

        It holds what passes over the torch model left: pruned, distilled, its weights rounded. What rounds the ONNX
        graph alone, as int8 does, is in the bundle's graph. UsageError where the bundle keeps no module.
        """
        from compress.export.torch_module import load_torch
        from compress.models.load import build_as_given
        from compress.models.source import locate

        return load_torch(self.folder, lambda: build_as_given(locate(self.recipe.model, self.recipe.root)))

    def push_to_hub(self, repo_id: str, private: bool = True, with_evaluation: bool = False, licence: str = "") -> Push:
        """Send the bundle to a model hub, in one commit, as `compress push` does; return what is there and what stayed.

        `result.push_to_hub("me/resnet-int8")`. Evaluation data stays unless `with_evaluation` says otherwise: there the
        bundle runs and verifies, and cannot be judged. `licence`: in the place of that of the model that was
        compressed; a public one must have some. UsageError before anything is sent, PushError where sending failed.
        """
        from compress.commands.push import push_bundle

        return push_bundle(self.folder, f"hf://{repo_id}", not private, with_evaluation, licence)

    def save(self, folder: Path | str) -> Path:
        """Copy the bundle to `folder`, in the place of one that is there; return it. PlaceError for anything else."""
        folder = resolve_output(Path(folder))
        if folder != self.folder.resolve():
            with reserve_output(folder) as staging:
                shutil.copytree(self.folder, staging, dirs_exist_ok=True)
                publish(staging, folder)
        return folder
