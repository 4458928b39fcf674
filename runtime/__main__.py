"""`compress-run verify|validate|bench|why|predict|generate|serve DIR`: judge and run a bundle, numpy and a backend.

`python -m runtime` is the same. Exit codes: 0 the gates hold, 1 a run failed, 2 the call is wrong, 3 it ran and a gate
fell short, 130 stopped by Ctrl-C, 143 by SIGTERM, 141 whoever read the output went away.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from runtime.errors import MissingDependency, RuntimeFailure, UsageError
from runtime.processes.endings import end_command, print_json, read_stdin, report_failure

try:
    import numpy  # noqa: F401
except ImportError as error:  # all below needs it, so that the command ends here and not in `main`
    absent = error.name == "numpy"
    sys.exit(report_failure(MissingDependency("numpy", "running a bundle") if absent else error, "--json" in sys.argv))

from runtime import open_bundle, refuse_decoder
from runtime.backends import BACKENDS
from runtime.bundle.format import CAME_WITHOUT, Manifest, find_left_out
from runtime.bundle.manifest import MOST_THREADS
from runtime.bundle.samples import write_npz
from runtime.bundle.signature import check_signature
from runtime.decode.generate import Request
from runtime.decode.talk import converse, write_answer
from runtime.encode.chat import ask_about
from runtime.judge.bundle import report_unjudged
from runtime.judge.explain import explain_path
from runtime.judge.findings import Findings
from runtime.measure.benchmark import backend_of, benchmark
from runtime.report.report import finite, render_short, render_text, to_dict
from runtime.report.stored import read_stored_report
from runtime.report.terminal import find_width, show_progress
from runtime.report.validate import validate
from runtime.report.why import render_explanation
from runtime.serving import MIB, ServingLimits, require_http_packages, serve
from runtime.tasks import find_task
from runtime.tasks.manifest import read_manifest, verify
from runtime.tasks.sources import read_sources

MOST_INPUT = 2**26
"""Characters of stdin: more is no text to predict or to continue."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    What goes wrong is said on stderr, with `--json` also as a document on stdout.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)

    def run() -> int:
        parser = _build_parser()
        options, rest = parser.parse_known_args(words)  # which takes no PROMPT that stands behind an option
        if len(rest) == 1 and not rest[0].startswith("-") and getattr(options, "prompt", "") is None:
            options.prompt = rest[0]
        elif rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        command: Callable[[argparse.Namespace], int] = options.command
        return command(options)

    return end_command(run, "--json" in words)


class _Parser(argparse.ArgumentParser):
    """A parser whose refusals are errors like all others."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}; `{self.prog} --help` shows the call")


def _build_parser() -> argparse.ArgumentParser:
    name = Path(sys.argv[0]).stem
    parser = _Parser(
        prog="python -m runtime" if name == "__main__" else name,
        description=__doc__.splitlines()[0] if __doc__ else None,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    check = _add_command(commands, "verify", _verify, "check every file of a bundle against its manifest", runs=False)
    judge = _add_command(
        commands, "validate", _validate, "judge a bundle: quality, speed, gates; writes report.json, .md, .xml into it"
    )
    judge.add_argument("--report", type=Path, metavar="DIR", help="where the reports go instead of into the bundle")
    judge.add_argument(
        "--baseline",
        type=Path,
        metavar="REPORT",
        help="an earlier report.json, or its folder: exit code 3 where something is worse, beyond noise",
    )
    judge.add_argument(
        "--undecided",
        choices=("fail", "pass"),
        help="what an undecided gate counts as, unless it says so itself; default: what the bundle says",
    )
    judge.add_argument("--short", action="store_true", help="print five lines at most, as for CI")
    about = "refuse a bundle that this public key, or a certificate below these, did not sign: a PEM file"
    for command in (check, judge):
        command.add_argument("--require-signature", type=Path, metavar="KEY", help=about)
    _add_command(commands, "bench", _bench, "measure speed and memory of baseline and candidate; writes nothing")
    _add_command(commands, "why", _why, "say where the time of a call goes, why it is no less, and what to change")
    predict = _add_command(commands, "predict", _predict, "run the compressed model on inputs")
    predict.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="image or audio files or folders of them, texts ('-' reads lines from stdin), or one .jsonl or .npz",
    )
    predict.add_argument("--output", type=Path, metavar="FILE.npz", help="keep the outputs as arrays")
    generate = _add_command(
        commands,
        "generate",
        _generate,
        "let the model write: continue a prompt, or answer a text or recording",
    )
    about = "a text, or a recording's file; '-' reads a text from stdin"
    generate.add_argument("prompt", metavar="PROMPT", nargs="?", help=about)
    about = "answer each line of stdin, the model staying in memory; with --chat an answer knows what was said before"
    generate.add_argument("--interactive", action="store_true", help=about)
    for flag, kind, about in _SAMPLING:
        generate.add_argument(flag, type=kind, metavar="N", help=about)
    generate.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be given again")
    about = "an image that the prompt is about, put before it in the chat template; may be given again"
    generate.add_argument("--image", action="append", metavar="FILE", help=about)
    generate.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    server = _add_command(
        commands, "serve", _serve, "answer requests over HTTP, by the core of the Open Inference Protocol (v2)"
    )
    server.add_argument(
        "--host", default="127.0.0.1", metavar="NAME", help="the address to listen on; default: this machine"
    )
    server.add_argument("--port", type=int, default=8000, metavar="N", help="default: 8000")
    for flag, kind, default, about in _LIMITS:
        server.add_argument(flag, type=kind, default=default, metavar="N", help=f"{about}; default: {default:g}")
    server.add_argument("--log", action="store_true", help="write a line for each request to stderr")
    return parser


_SAMPLING = (
    ("--max-new-tokens", int, "tokens at most; default: 128, or what fits"),
    ("--temperature", float, "0 (the default): the most likely token each time; above: draw"),
    ("--top-k", int, "draw from the k most likely tokens; 0: all"),
    ("--top-p", float, "draw from the most likely tokens that together reach this probability"),
    ("--min-p", float, "draw from tokens at least this fraction as likely as the most likely one"),
    ("--repetition-penalty", float, "above 1: tokens that are in the text already become less likely"),
    ("--seed", int, "of the draws; same seed, same text; default: 0"),
)
_LIMITS = (
    ("--max-body", int, ServingLimits.max_body // MIB, "MiB that the body of a request may have"),
    ("--max-batch", int, ServingLimits.max_batch, "samples that a request may have"),
    ("--max-connections", int, ServingLimits.max_connections, "connections at once"),
    ("--request-timeout", float, ServingLimits.request_timeout, "seconds in which a request must have come whole"),
    ("--call-timeout", float, ServingLimits.call_timeout, "seconds in which the model must have answered"),
    ("--drain-timeout", float, ServingLimits.drain_timeout, "seconds for requests under way after SIGTERM or Ctrl-C"),
)


def _add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], about: str, runs: bool = True
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about)
    parser.add_argument("bundle", type=Path, metavar="DIR", help="the bundle's folder")
    parser.add_argument("--json", action="store_true", help="print JSON")
    if runs:
        parser.add_argument(
            "--backend", metavar="NAME", help=f"one of {', '.join(BACKENDS)}; default: the bundle's target"
        )
        parser.add_argument(
            "--threads", type=_parse_threads, metavar="N", help="threads; default: what the bundle says"
        )
    parser.set_defaults(command=run)
    return parser


def _parse_threads(text: str) -> int:
    if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= MOST_THREADS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of threads, 1 to {MOST_THREADS}")
    return int(text)


def _verify(options: argparse.Namespace) -> int:
    if options.require_signature:
        check_signature(options.bundle, options.require_signature)
    manifest, key = verify(options.bundle), options.require_signature
    left_out = find_left_out(options.bundle, manifest)
    sizes = [record.size_bytes for name, record in manifest.files.items() if name not in left_out]
    if options.json:
        said = {"bundle": manifest.name, "files": len(sizes), "bytes": sum(sizes), "digest": manifest.digest}
        print_json(said | ({"signed_with": str(key)} if key else {}) | ({"left_out": left_out} if left_out else {}))
    else:
        text = f"{manifest.name}: {len(sizes)} files, {sum(sizes)} bytes, as its manifest says ({manifest.digest})"
        print(text + (f", signed with {key}" if key else "") + (f"; {CAME_WITHOUT}" if left_out else ""))
    return 0


def _validate(options: argparse.Namespace) -> int:
    if options.require_signature:
        check_signature(options.bundle, options.require_signature)
    backends = [options.backend] if options.backend else None
    earlier = None if options.baseline is None else read_stored_report(options.baseline)
    report = validate(
        options.bundle,
        backends,
        options.threads,
        report_folder=options.report,
        earlier=earlier,
        progress=show_progress,
        undecided=options.undecided,
    )
    _print_report(report, options)
    return report.exit_code


def _bench(options: argparse.Namespace) -> int:
    timed = benchmark(options.bundle, options.backend, options.threads, show_progress)
    _print_report(report_unjudged(read_manifest(options.bundle), timed), options)
    return 0


def _why(options: argparse.Namespace) -> int:
    explanation = explain_path(options.bundle, options.backend, options.threads)
    if options.json:
        print_json(asdict(explanation))
    else:
        print(render_explanation(explanation, find_width()), end="")
    return 0


def _print_report(report: Findings, options: argparse.Namespace) -> None:
    if options.json:
        print_json(to_dict(report))
    else:
        render = render_short if vars(options).get("short") else render_text
        print(render(report, find_width(), options.bundle), end="")


NO_ANSWER = "-"
"""In place of the label of a sample that `postprocess` rejects."""


def _predict(options: argparse.Namespace) -> int:
    manifest = read_manifest(options.bundle)
    refuse_decoder(manifest)
    check_output(options.output)
    samples = _read_inputs(manifest, options.inputs)
    backend, note = backend_of(manifest, options.backend)
    if note:
        print(f"note: {note}", file=sys.stderr)
    with open_bundle(options.bundle, backend, options.threads or manifest.judgement.benchmark.threads) as bundle:
        outputs = bundle.predict(samples)
    predictions = outputs.predictions
    if options.output:
        _write_outputs(options.output, outputs)
    if options.json:
        print_json(finite(predictions or {name: values.tolist() for name, values in outputs.items()}), indent=None)
    elif predictions:
        of_folder = not find_task(manifest.task).reads_texts and len(samples) > len(options.inputs)
        files = samples if of_folder and isinstance(samples, list) else ()
        for number, prediction in enumerate(predictions):
            words = prediction if isinstance(prediction, list) else [prediction]
            print(f"{files[number]}\t" if files else "", end="")  # of a folder nobody knows the order of its files
            print("  ".join(f"{NO_ANSWER if w['label'] is None else w['label']}\t{w['score']:.4f}" for w in words))
    else:
        print("\n".join(f"{name}: {values.dtype} {list(values.shape)}" for name, values in outputs.items()))
    return 0


def _generate(options: argparse.Namespace) -> int:
    manifest = read_manifest(options.bundle)
    names = [flag.removeprefix("--").replace("-", "_") for flag, _, _ in _SAMPLING]
    settings = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.interactive == (options.prompt is not None) or (options.interactive and options.json):
        raise UsageError("generate: give a PROMPT, or --interactive alone, which reads prompts from stdin")
    if options.image and (options.interactive or manifest.images is None):
        why = "a PROMPT has images, and --interactive has none" if options.interactive else "the model sees no images"
        raise UsageError(f"generate: --image: {why}; leave it out")
    prompt = read_stdin(MOST_INPUT) if options.prompt == "-" else options.prompt
    prompt = ask_about(options.image, prompt) if options.image else prompt
    backend, note = backend_of(manifest, options.backend)
    if note:
        print(f"note: {note}", file=sys.stderr)
    request = Request(**settings, stop=options.stop or (), chat=options.chat or bool(options.image))
    with open_bundle(options.bundle, backend, options.threads or manifest.judgement.benchmark.threads) as bundle:
        answering = bundle.generator()
        if options.interactive:
            converse(answering, request)
        elif options.json:
            print_json(asdict(answering.generate([prompt], request)[0]))
        else:
            write_answer(answering, prompt, request)
    return 0


def _serve(options: argparse.Namespace) -> int:
    require_http_packages()
    limits = ServingLimits(
        max_body=options.max_body * MIB,
        max_batch=options.max_batch,
        max_connections=options.max_connections,
        request_timeout=options.request_timeout,
        call_timeout=options.call_timeout,
        drain_timeout=options.drain_timeout,
    )
    if options.log:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    manifest = read_manifest(options.bundle)
    backend, note = backend_of(manifest, options.backend)
    if note:
        print(f"note: {note}", file=sys.stderr)
    threads = options.threads or manifest.judgement.benchmark.threads
    with (
        open_bundle(options.bundle, backend, threads) as bundle,
        serve(bundle, options.host, options.port, limits, options.log) as server,
    ):
        print(f"{manifest.name} on http://{options.host}:{server.port}/v2/models/{manifest.name}", flush=True)
        if server.run():
            return 0
        print(
            f"error: the model was still computing {limits.drain_timeout:g} s after the signal to end", file=sys.stderr
        )
        sys.stderr.flush()
        os._exit(1)  # nothing stops a thread inside a model, and Python would wait for it


def _read_inputs(manifest: Manifest, inputs: Sequence[str]) -> Any:
    """Read the arguments as what the task takes: columns of an npz, image paths, or texts."""
    if (named := read_sources(manifest, inputs)) is not None:
        return named
    task = find_task(manifest.task)
    if not task.columns and manifest.preprocess["kind"] != "image":
        raise UsageError(f"a {task.name} model takes one .npz file with an array for each model input")
    if not task.reads_texts:
        return list(inputs)
    texts = read_stdin(MOST_INPUT).splitlines() if list(inputs) == ["-"] else list(inputs)
    if task.required == 1:
        return texts
    if len(texts) % task.required:
        raise UsageError(f"give {' and '.join(task.columns[: task.required])} for each sample, one after the other")
    return list(zip(*(texts[k :: task.required] for k in range(task.required)), strict=True))


def check_output(path: Path | None) -> None:
    """Raise UsageError, before anything runs, where a file cannot be written at `path`."""
    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"--output {path}: is a folder; give the name of a file in it")
    if not path.parent.is_dir():
        raise UsageError(f"--output {path}: there is no folder {path.parent}; make it first")
    place = path if path.exists() else path.parent
    if not os.access(place, os.W_OK):
        raise UsageError(f"--output {path}: {place} cannot be written; name another place")


def _write_outputs(path: Path, outputs: Mapping[str, Any]) -> None:
    """Write the outputs into the npz file `path`; RuntimeFailure where the disk is full, or the like."""
    try:
        write_npz(path, outputs)
    except OSError as error:
        raise RuntimeFailure(f"--output {path}: cannot be written: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(main())
