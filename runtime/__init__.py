"""Run and judge a bundle, with numpy and ONNX Runtime alone.

```python
import runtime
with runtime.open_bundle("out/resnet") as bundle:
    print(bundle.predict(["cat.png"]).predictions)
with runtime.open_bundle("out/llama") as bundle:
    print(bundle.generate("Once upon a time", max_new_tokens=64).text)
```
"""

from runtime.processes import search_path  # noqa: F401  # isort: skip  (first of all, so that no `from __future__` stands here)
from runtime.processes import telemetry  # noqa: F401  # isort: skip  (before anything that would load onnxruntime)

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, overload

if TYPE_CHECKING:
    from runtime.backends import Session
    from runtime.bundle.manifest import Manifest
    from runtime.decode.answers import AnswerGenerator
    from runtime.decode.generate import GeneratedText, Generator, Request
    from runtime.encode.preprocess import Preprocessor
    from runtime.measure.benchmark import BenchmarkResult
    from runtime.report.report import Report

__all__ = ["Bundle", "assert_passes", "open_bundle"]


class Outputs(dict[str, Any]):
    """A model's outputs by name, a row for each sample; `predictions`: what they say of each sample, or None.

    `outputs["prediction"]` gives the predictions, too, of a model that has no output of that name.
    """

    def __init__(self, outputs: Mapping[str, Any], predictions: list[Any] | None) -> None:
        super().__init__(outputs)
        self.predictions = predictions

    def __missing__(self, name: str) -> Any:
        if name == "prediction" and self.predictions is not None:
            return self.predictions
        raise KeyError(name)


@dataclass
class Bundle:
    """An open bundle: its manifest, and its compressed model loaded in one backend."""

    root: Path
    manifest: "Manifest"
    backend: str
    threads: int
    session: "Session"
    preprocessor: "Preprocessor"

    def __repr__(self) -> str:
        return f"<Bundle {self.manifest.name}: {self.manifest.task} on {self.backend}, {self.root}>"

    def predict(self, samples: Any, batch_size: int = 32) -> Outputs:
        """Return the model's outputs over `samples`, in their order, as `runtime.tasks.predict.run_samples` gives them.

        `samples` is a list of images (paths, uint8 arrays, Pillow images) or an array of them, a list of audio (paths,
        {"array", "sampling_rate"}), a list of texts or of (text, text) pairs, columns by name, or the path of a folder
        of images or sounds, of a .jsonl or an .npz. `predictions` of a
        classifier's outputs are {"label", "score"} for each sample; of several answers (`postprocess.top_k`) a list of
        them; a rejected sample's label is None.
        """
        from runtime.tasks import find_task
        from runtime.tasks.predict import facts_of, make_columns, run_samples

        refuse_decoder(self.manifest)
        task = find_task(self.manifest.task)
        columns, names = make_columns(self.manifest, samples), self.manifest.class_names
        facts = facts_of(self.manifest)
        outputs = run_samples(self.session, self.preprocessor, task.name, columns, batch_size, facts=facts)
        return Outputs(outputs, task.predict(outputs, names))

    def evaluate(self) -> dict[str, float]:
        """Return the quality metrics that the bundle asks for (default: all that fit), over its frozen samples.

        No intervals, no gates, nothing that was recorded at the build: `validate` has these. UsageError without an
        evaluation set; BundleError if it is broken.
        """
        from runtime.bundle.format import read_outputs, read_samples
        from runtime.judge.evidence import select_metrics

        task, judgement = self.manifest.task, self.manifest.judgement
        columns, baseline = read_samples(self.root, self.manifest), read_outputs(self.root, self.manifest)
        labels = columns.get("label")
        metrics = select_metrics(task, baseline, labels, judgement)
        outputs = self._run_frozen_samples(columns)
        return {m.name: m.compute(outputs, labels if m.against == "labels" else baseline) for m in metrics}

    def _run_frozen_samples(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Return the candidate's outputs over the frozen samples; a decoder's are scored beside the baseline's."""
        from runtime.backends import find_backend, open_artifact
        from runtime.tasks.predict import facts_of, run_samples

        task, batch_size = self.manifest.task, self.manifest.judgement.batch_size
        if not self.manifest.generates:
            return run_samples(
                self.session, self.preprocessor, task, columns, batch_size, facts=facts_of(self.manifest)
            )
        if self.manifest.alone:
            from runtime.judge.bundle import run_candidate_alone

            return dict(run_candidate_alone(self.root, self.manifest, columns, self.session))
        baseline = self.manifest.baseline_for(self.backend)
        exact = find_backend(self.backend).exact
        with closing(open_artifact(self.root, baseline, self.backend, self.threads, exact)) as reference:
            return run_samples(self.session, self.preprocessor, task, columns, batch_size, reference)

    @overload
    def generate(self, prompt: str, /, *, stream: Literal[True], **settings: Any) -> Iterator[str]: ...

    @overload
    def generate(self, prompt: str, /, *, stream: Literal[False] = False, **settings: Any) -> "GeneratedText": ...

    @overload
    def generate(
        self, prompt: Sequence[Any], /, *, stream: Literal[True], **settings: Any
    ) -> Iterator[tuple[int, str]]: ...

    @overload
    def generate(
        self, prompt: Sequence[Any], /, *, stream: Literal[False] = False, **settings: Any
    ) -> "list[GeneratedText]": ...

    def generate(self, prompt: Any, /, *, stream: bool = False, **settings: Any) -> Any:
        """Return the model's answer to a prompt; for a list of prompts a list of answers, made in one batch.

        A prompt is a text that is continued; of an encoder-decoder what its encoder reads: a text, a recording. Of a
        model that also sees, messages (`chat`) may have images: {"type": "image", "image": "cat.png"} in a content that
        is a list of parts.

        An answer is a `runtime.decode.generate.GeneratedText`. `settings` are `runtime.decode.generate.Request`'s:
        max_new_tokens, temperature (0: greedy, the default), top_k, top_p, min_p, repetition_penalty, stop (a list of
        texts), seed, chat (prompts are what a user says, or lists of messages). With `stream` it is an iterator of text
        as soon as it is certain; for a list of (row, text). Same settings, same text. UsageError for a model that is no
        decoder, settings out of range, and a prompt that leaves no room for the answer, and chat with a model that has
        no template for it; BundleError where it has no cache.
        """
        from runtime.decode.generate import Request

        request, generator = _make_request(Request, settings), self.generator()
        single = isinstance(prompt, (str, Path)) or (request.chat and bool(prompt) and isinstance(prompt[0], Mapping))
        prompts = [prompt] if single else list(prompt)
        if not stream:
            results = generator.generate(prompts, request)
            return results[0] if single else results
        pieces = generator.stream(prompts, request)
        return (text for _, text in pieces) if single else pieces

    def generator(self) -> "Generator | AnswerGenerator":
        """Return the generator that `generate` runs; errors as there."""
        from runtime.decode.answers import AnswerGenerator, answer_encoder
        from runtime.decode.generate import Generator
        from runtime.decode.kv_cache import Decoder, EncodedDecoder
        from runtime.decode.scoring import language_encoder
        from runtime.errors import UsageError
        from runtime.tasks import find_task

        if self.manifest.generation is None:
            raise UsageError(f"a model for {self.manifest.task} generates no text: use predict")
        task = find_task(self.manifest.task)
        if task.encodes:
            encoder = answer_encoder(self.preprocessor)
            answering = EncodedDecoder(self.session, encoder.target.start_tokens)
            return AnswerGenerator(answering, encoder, task.to_columns)
        decoder = Decoder(self.session, self.manifest.candidate_for(self.backend).cache)
        folder = (self.root / self.manifest.artifact("candidate").path).parent
        language, images = language_encoder(self.preprocessor), self.manifest.images
        return Generator(decoder, language, self.manifest.generation, folder, images)

    def benchmark(self) -> "BenchmarkResult":
        """Measure speed and memory of baseline and candidate in this backend; `runtime.measure.benchmark.benchmark`."""
        from runtime.measure.benchmark import benchmark

        return benchmark(self.root, self.backend, self.threads)

    def validate(self) -> "Report":
        """Judge the bundle in this backend and write the report into it; `runtime.report.validate.validate`.

        Threads are what the bundle's gates were written for, not this session's.
        """
        from runtime.report.validate import validate

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
    from runtime.backends import find_backend, open_artifact
    from runtime.bundle.files import name_file
    from runtime.errors import UsageError
    from runtime.tasks import manifest as manifests
    from runtime.tasks.predict import bundle_preprocessor

    root = Path(path)
    find_backend(backend)  # an unknown one is told before the files are read
    with name_file(root):
        manifest = manifests.verify(root) if verify else manifests.read_manifest(root)
        candidate = manifest.candidate_for(backend)
        if manifest.is_scored(backend):
            what = "checkpoint" if candidate.is_checkpoint else "graph"
            raise UsageError(
                f"{root}: the candidate is a {what} for {candidate.target}: open {candidate.path} with that"
            )
        session = open_artifact(root, candidate, backend, threads, options)
        return Bundle(root, manifest, backend, threads, session, bundle_preprocessor(root, manifest, session.inputs))


def assert_passes(
    path: str | Path,
    *,
    baseline: str | Path | None = None,
    undecided: Literal["fail", "pass"] | None = None,
    report_folder: str | Path | None = None,
) -> "Report":
    """Judge the bundle in the folder `path`, for a test; return its report where nothing falls short.

    AssertionError with the verdict, each gate that does not hold and each regression. `baseline`: an earlier
    report.json, or its folder, that the bundle must not be worse than, beyond noise. `undecided`: what an undecided
    gate counts as, unless it says so itself; default: what the bundle says. One that counts as a pass is warned of.
    `report_folder`: where the report goes; default: into the bundle. A bundle without gates and without a baseline
    cannot fall short, which is an AssertionError, too. Raises what `runtime.report.validate.validate` raises.
    """
    from runtime.report.differences import regression_lines
    from runtime.report.report import verdict_line
    from runtime.report.stored import read_stored_report
    from runtime.report.validate import validate

    __tracebackhide__ = True  # pytest ends the traceback in the test
    earlier = None if baseline is None else read_stored_report(Path(baseline))
    folder = None if report_folder is None else Path(report_folder)
    report = validate(path, report_folder=folder, earlier=earlier, undecided=undecided)
    if report.verdict == "unjudged" and earlier is None:
        raise AssertionError(f"{path}: has no gates, so that nothing can fall short; build it with `validate.gates`")
    if report.exit_code:
        lines = [verdict_line(report, str(path))]
        lines += [f"  {gate.verdict} {gate.metric} {gate.rule}: {gate.why}" for gate in report.gates if not gate.holds]
        lines += [f"  {line}" for line in (regression_lines(report.since) if report.since is not None else ())]
        raise AssertionError("\n".join(lines))
    for gate in report.gates:
        if gate.verdict == "undecided":
            warnings.warn(f"{path}: undecided {gate.metric} {gate.rule}: {gate.why}", stacklevel=2)
    return report


def refuse_decoder(manifest: "Manifest") -> None:
    """Raise UsageError for a model that generates text: it has no outputs for each sample to give."""
    from runtime.errors import UsageError

    if manifest.generates:
        raise UsageError(
            "a decoder generates text: use generate(prompt), or `compress-run generate DIR PROMPT`; "
            "its quality: evaluate() or validate()"
        )


def _make_request(request: "type[Request]", settings: Mapping[str, Any]) -> "Request":
    from dataclasses import fields

    from runtime.errors import UsageError
    from runtime.words import suggest

    known = [field.name for field in fields(request)]
    for name in settings:
        if name not in known:
            raise UsageError(f"generate: unknown setting '{name}'{suggest(name, known)}")
    return request(**settings)
