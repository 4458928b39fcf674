"""`python -m runtime verify|validate|bench|predict|generate|serve DIR`: judge and run a bundle, numpy and a backend.

Exit codes: 0 the gates hold, 1 a run failed, 2 the call is wrong, 3 it ran and a gate fell short.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from runtime import open_bundle, refuse_decoder
from runtime.backends import BACKENDS
from runtime.benchmark import backend_of, benchmark
from runtime.bundle import Manifest, read_manifest, verify
from runtime.errors import RuntimeFailure, UsageError
from runtime.report import Report, render_json, render_text
from runtime.validate import unjudged, validate


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. Errors go to stderr, with `--json` also as {"error": ...} to stdout."""
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except RuntimeFailure as error:
        print(f"error: {error}", file=sys.stderr)
        if options.json:
            print(json.dumps({"error": str(error), "exit_code": error.exit_code}))
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m runtime", description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _command(commands, "verify", _verify, "check every file of a bundle against its manifest", runs=False)
    _command(
        commands, "validate", _validate, "judge a bundle: quality, speed, gates; writes report.json, .md, .xml into it"
    )
    _command(commands, "bench", _bench, "measure speed and memory of baseline and candidate; writes nothing")
    predict = _command(commands, "predict", _predict, "run the compressed model on inputs")
    predict.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="image files, texts ('-' reads lines from stdin), or one .npz of columns",
    )
    predict.add_argument("--output", type=Path, metavar="FILE.npz", help="keep the outputs as arrays")
    generate = _command(commands, "generate", _generate, "continue a prompt with the compressed decoder, as it comes")
    generate.add_argument("prompt", metavar="PROMPT", help="a text; '-' reads it from stdin")
    for flag, kind, about in _SAMPLING:
        generate.add_argument(flag, type=kind, metavar="N", help=about)
    generate.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be given again")
    generate.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    server = _command(
        commands, "serve", _serve, "answer requests over HTTP, by the core of the Open Inference Protocol (v2)"
    )
    server.add_argument(
        "--host", default="127.0.0.1", metavar="NAME", help="the address to listen on; default: this machine"
    )
    server.add_argument("--port", type=int, default=8000, metavar="N", help="default: 8000")
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


def _command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], about: str, runs: bool = True
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about)
    parser.add_argument("bundle", type=Path, metavar="DIR", help="the bundle's folder")
    parser.add_argument("--json", action="store_true", help="print JSON")
    if runs:
        parser.add_argument(
            "--backend", metavar="NAME", help=f"one of {', '.join(BACKENDS)}; default: the bundle's target"
        )
        parser.add_argument("--threads", type=_threads, metavar="N", help="threads; default: what the bundle says")
    parser.set_defaults(command=run)
    return parser


def _threads(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of threads, 1 or more")
    return int(text)


def _verify(options: argparse.Namespace) -> int:
    manifest = verify(options.bundle)
    size = sum(record.size_bytes for record in manifest.files.values())
    if options.json:
        print(
            json.dumps(
                {"bundle": manifest.name, "files": len(manifest.files), "bytes": size, "digest": manifest.digest}
            )
        )
    else:
        print(f"{manifest.name}: {len(manifest.files)} files, {size} bytes, as its manifest says ({manifest.digest})")
    return 0


def _validate(options: argparse.Namespace) -> int:
    report = validate(options.bundle, [options.backend] if options.backend else None, options.threads)
    _show(report, options.json)
    return report.exit_code


def _bench(options: argparse.Namespace) -> int:
    timed = benchmark(options.bundle, options.backend, options.threads)
    _show(unjudged(read_manifest(options.bundle), timed), options.json)
    return 0


def _show(report: Report, as_json: bool) -> None:
    print(render_json(report) if as_json else render_text(report), end="")


def _predict(options: argparse.Namespace) -> int:
    manifest = read_manifest(options.bundle)
    refuse_decoder(manifest.task)
    samples = _samples(manifest, options.inputs)
    backend, note = backend_of(manifest, options.backend)
    if note:
        print(f"note: {note}", file=sys.stderr)
    with open_bundle(options.bundle, backend, options.threads or manifest.judgement.benchmark.threads) as bundle:
        outputs = bundle.predict(samples)
    predictions = outputs.pop("prediction", None)
    if options.output:
        np.savez(options.output, **outputs)
    if options.json:
        print(json.dumps(predictions or {name: values.tolist() for name, values in outputs.items()}))
    elif predictions:
        print("\n".join(f"{p['label']}\t{p['score']:.4f}" for p in predictions))
    else:
        print("\n".join(f"{name}: {values.dtype} {list(values.shape)}" for name, values in outputs.items()))
    return 0


def _generate(options: argparse.Namespace) -> int:
    manifest = read_manifest(options.bundle)
    names = [flag.removeprefix("--").replace("-", "_") for flag, _, _ in _SAMPLING]
    settings = {name: value for name in names if (value := getattr(options, name)) is not None}
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    backend, note = backend_of(manifest, options.backend)
    if note:
        print(f"note: {note}", file=sys.stderr)
    with open_bundle(options.bundle, backend, options.threads or manifest.judgement.benchmark.threads) as bundle:
        more: dict[str, Any] = {**settings, "stop": options.stop or (), "chat": options.chat}
        if options.json:
            print(json.dumps(asdict(bundle.generate(prompt, **more))))
            return 0
        for piece in bundle.generate(prompt, stream=True, **more):
            print(piece, end="", flush=True)
    print()
    return 0


def _serve(options: argparse.Namespace) -> int:
    from runtime.serve import serve

    manifest = read_manifest(options.bundle)
    backend, note = backend_of(manifest, options.backend)
    if note:
        print(f"note: {note}", file=sys.stderr)
    threads = options.threads or manifest.judgement.benchmark.threads
    with open_bundle(options.bundle, backend, threads) as bundle, serve(bundle, options.host, options.port) as server:
        print(f"{manifest.name} on http://{options.host}:{server.server_port}/v2/models/{manifest.name}", flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0


def _samples(manifest: Manifest, inputs: Sequence[str]) -> Any:
    """Arguments as what the task takes: columns of an npz, image paths, or texts."""
    if len(inputs) == 1 and inputs[0].endswith(".npz"):
        try:
            with np.load(inputs[0], allow_pickle=False) as columns:
                return dict(columns)
        except (OSError, ValueError) as error:
            raise UsageError(f"{inputs[0]}: cannot be read as arrays: {error}") from error
    if manifest.task == "generic":
        raise UsageError("a generic model takes one .npz file with an array for each model input")
    if manifest.task == "image-classification":
        return list(inputs)
    return sys.stdin.read().splitlines() if list(inputs) == ["-"] else list(inputs)


if __name__ == "__main__":
    sys.exit(main())
