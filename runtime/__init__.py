"""Run and judge a bundle, with numpy and ONNX Runtime alone.

```python
import runtime
with runtime.open_bundle("out/resnet") as bundle:
    print(bundle.predict(["cat.png"])["prediction"])
```
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from runtime.backends import Session
    from runtime.benchmark import BenchmarkResult
    from runtime.findings import Report
    from runtime.manifest import Manifest
    from runtime.preprocess import Preprocessor

__all__ = ["Bundle", "open_bundle"]


@dataclass
class Bundle:
    """An open bundle: its manifest, and its compressed model loaded in one backend."""

    root: Path
    manifest: Manifest
    backend: str
    threads: int
    session: Session
    preprocessor: Preprocessor

    def predict(self, samples: Any, batch_size: int = 32) -> dict[str, Any]:
        """The model's outputs over `samples`, in their order, as `runtime.predict.run_samples` gives them.

        `samples` is a list of images (paths, uint8 arrays, Pillow images) or an array of them, a list of texts or of
        (text, text) pairs, or columns by name. A classifier also gives "prediction": {"label", "score"} a sample.
        """
        from runtime.predict import classify, run_samples

        columns = as_columns(self.manifest.task, samples)
        outputs: dict[str, Any] = dict(
            run_samples(self.session, self.preprocessor, self.manifest.task, columns, batch_size)
        )
        if "logits" in outputs and outputs["logits"].shape[1] > 1:  # a single column is a score, not a choice
            outputs["prediction"] = classify(outputs["logits"], self.manifest.class_names)
        return outputs

    def evaluate(self) -> dict[str, float]:
        """The quality metrics that the bundle asks for (default: all that fit), over its frozen samples.

        No intervals, no gates: `validate` decides. UsageError without an evaluation set; BundleError if it is broken.
        """
        from runtime.bundle import read_outputs, read_samples
        from runtime.evidence import select_metrics
        from runtime.predict import run_samples

        task, judgement = self.manifest.task, self.manifest.judgement
        columns, baseline = read_samples(self.root, self.manifest), read_outputs(self.root, self.manifest)
        labels = columns.get("label")
        metrics = select_metrics(task, baseline, labels, judgement)
        outputs = run_samples(self.session, self.preprocessor, task, columns, judgement.batch_size)
        return {m.name: m.compute(outputs, labels if m.against == "labels" else baseline) for m in metrics}

    def benchmark(self) -> BenchmarkResult:
        """Speed and memory of baseline and candidate in this backend; `runtime.benchmark.benchmark`."""
        from runtime.benchmark import benchmark

        return benchmark(self.root, self.backend, self.threads)

    def validate(self) -> Report:
        """Judge the bundle in this backend and write the report into it; `runtime.validate.validate`.

        Threads are what the bundle's gates were written for, not this session's.
        """
        from runtime.validate import validate

        return validate(self.root, [self.backend])

    def close(self) -> None:
        """Free the model."""
        self.session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_bundle(
    path: str | Path,
    backend: str = "onnxruntime-cpu",
    threads: int = 1,
    verify: bool = True,
    options: Mapping[str, Any] | None = None,
) -> Bundle:
    """Load the compressed model of the bundle in the folder `path`.

    `verify` compares every file with its hash first; without it only the manifest is checked. `threads` is inside one
    operator; `options` are the backend's own. BundleError if the bundle is damaged or does not load; UsageError for an
    unknown backend or option; MissingDependency if the backend is not installed.
    """
    from runtime import bundle as format_
    from runtime.backends import find_backend
    from runtime.predict import bundle_preprocessor

    root, opened = Path(path), find_backend(backend)
    manifest = format_.verify(root) if verify else format_.read_manifest(root)
    session = opened.open(root / manifest.candidate_for(backend).path, threads, options or {})
    return Bundle(root, manifest, backend, threads, session, bundle_preprocessor(root, manifest, session.inputs))


def as_columns(task: str, samples: Any) -> dict[str, Any]:
    """What a user has in hand -> columns; UsageError where it does not fit the task."""
    from runtime.errors import UsageError

    if isinstance(samples, Mapping):
        return dict(samples)
    if task == "generic":
        raise UsageError("a generic model takes columns: give a dict with an array for each model input")
    if isinstance(samples, (str, Path)):
        raise UsageError("give a list of samples; for a single one: [sample]")
    if task == "image-classification":
        return {"image": samples}
    samples = list(samples)
    if samples and all(isinstance(sample, (tuple, list)) and len(sample) == 2 for sample in samples):
        return {"text": [first for first, _ in samples], "text_pair": [second for _, second in samples]}
    return {"text": samples}
