"""Tasks of lm-evaluation-harness on a bundle: `python -m runtime.lm_eval_adapter DIR --tasks hellaswag --limit 100`.

Needs the package lm-eval, which is imported only when a model for it is made. What it is asked follows the
harness' own models: a context and its continuation are tokenised together, what is too long loses its beginning, and a
text is scored in windows whose tokens are each predicted once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runtime import Bundle, open_bundle
from runtime.bundle.columns import Array
from runtime.decode.generate import Generator, Request
from runtime.decode.scoring import language_encoder, logit_pieces
from runtime.errors import MissingDependency, UsageError
from runtime.metrics.fidelity import log_softmax
from runtime.processes.endings import end_command

USUAL_NEW_TOKENS = 256
"""Where a task does not say: the harness' own default."""


def lm_for(bundle: Bundle, batch_size: int = 8) -> Any:
    """Return an `lm_eval.api.model.LM` that runs on an open bundle; MissingDependency without lm-eval."""
    try:
        from lm_eval.api.model import LM  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise MissingDependency("lm-eval", "running tasks of lm-evaluation-harness") from error
    scorer = Scorer(bundle, batch_size)

    class BundleLM(LM):
        """The three questions that the harness asks, passed on."""

        tokenizer_name = f"{bundle.manifest.name}-{bundle.manifest.digest[:12]}"

        def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            return scorer.continuations([request.args for request in requests])

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            return [scorer.text(request.args[0]) for request in requests]

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            return [scorer.answer(*request.args) for request in requests]

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            from runtime.encode.chat import render_chat

            return render_chat(scorer.generator.model_dir, chat_history, add_generation_prompt)

    return BundleLM()


class Scorer:
    """What the harness asks, on a bundle's decoder; no part of lm-eval is needed."""

    def __init__(self, bundle: Bundle, batch_size: int = 8) -> None:
        self.bundle, self.batch_size = bundle, batch_size
        self.encoder = language_encoder(bundle.preprocessor)
        generator = bundle.generator()
        assert isinstance(generator, Generator)  # a language model's encoder, just above
        self.generator = generator
        self.length = self.generator.settings.context_length

    def continuations(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Return (log probability in nats, whether greedy decoding gives it) of each (context, continuation)."""
        return self._score_continuations(
            [self._tokenize_pair(context, continuation) for context, continuation in pairs]
        )

    def text(self, text: str) -> float:
        """Return the log probability of a whole text in nats; its first token follows the prefix token."""
        ids = np.array(self.encoder.tokens(text), np.int64)
        return sum(
            score for score, _ in self._score_continuations(list(windows(ids, self._prefix_token(), self.length)))
        )

    def answer(self, context: str, settings: dict[str, Any]) -> str:
        """Generate a text, up to one of `until`; a context that leaves no room loses its beginning."""
        n_new = int(settings.get("max_gen_toks", settings.get("max_new_tokens", USUAL_NEW_TOKENS)))
        n_new = min(n_new, self.length - 1)
        until = settings.get("until") or []
        sampled = settings.get("do_sample", True) and settings.get("temperature", 0.0) > 0
        request = Request(
            max_new_tokens=n_new,
            temperature=float(settings["temperature"]) if sampled else 0.0,
            top_k=settings.get("top_k"),
            top_p=settings.get("top_p"),
            stop=tuple([until] if isinstance(until, str) else until),
            repetition_penalty=1.0,
        )
        ids = self.encoder.prompt(context)[-(self.length - n_new) :]
        return self.generator.continue_tokens([ids], request)[0].text

    def _tokenize_pair(self, context: str, continuation: str) -> tuple[Array, int]:
        """Return (token ids, how many at the end are the continuation's).

        Spaces at a context's end belong to what follows.
        """
        stripped = context.rstrip()
        first = list(self.encoder.tokens(stripped))
        whole = self.encoder.tokens(context + continuation)
        n_new = len(whole) - len(first)
        if n_new < 1:
            raise UsageError(f"continuation {continuation!r} adds no token to its context")
        bos = self.encoder.spec.bos_token_id
        ids = np.array([*([self._prefix_token()] if not first or bos is not None else []), *whole], np.int64)
        return ids, n_new

    def _prefix_token(self) -> int:
        """Return the token before a text: the first of every text, else the model's own or what ends a text."""
        settings = self.generator.settings
        known = [self.encoder.spec.bos_token_id, settings.bos_token_id, *settings.eos_token_ids]
        prefix = next((token for token in known if token is not None), None)
        if prefix is None:
            raise UsageError("the model has neither a first nor a last token: nothing to score a first word after")
        return prefix

    def _score_continuations(self, asked: Sequence[tuple[Array, int]]) -> list[tuple[float, bool]]:
        """Return for each (ids, n) the log probability of the last n tokens, and whether each is the likeliest one."""
        cut = [(ids[-(self.length + 1) :], n) for ids, n in asked]  # the last token is predicted, not read
        late = next((n for ids, n in cut if n >= len(ids)), None)
        if late is not None:
            raise UsageError(f"a continuation of {late} tokens leaves no context within {self.length}")
        results = [(0.0, True)] * len(cut)
        pieces = logit_pieces([self.bundle.session], self.encoder, [ids for ids, _ in cut], self.batch_size)
        for row, places, (logits,) in pieces:
            ids, n = cut[row]
            first = max(len(ids) - 1 - n - places.start, 0)
            targets = ids[1:][places][first:]
            scores = log_softmax(logits[first:].astype(np.float64))  # [of the last n, vocab]
            chosen = np.take_along_axis(scores, targets[:, None], axis=1)
            total, sure = results[row]
            results[row] = total + float(chosen.sum()), sure and bool((scores.argmax(axis=1) == targets).all())
        return results


def windows(ids: Array, prefix: int, length: int) -> Iterator[tuple[Array, int]]:
    """Yield (ids, n) whose last n tokens are to be predicted: each token of a text once, after at most `length` others.

    Every window but the last predicts `length` tokens; the last one reads as much before its own as fits.
    """
    tokens = np.concatenate([[prefix], ids])
    for end in range(length, len(ids) + length, length):
        n = min(length, len(ids) - (end - length))
        stop = min(end, len(ids))
        yield tokens[max(0, stop - length) : stop + 1], n


def evaluate(
    path: str | Path,
    tasks: Sequence[str],
    limit: int | None = None,
    threads: int = 1,
    include_path: str | Path | None = None,
) -> dict[str, Any]:
    """Return the harness' results of some of its tasks on the bundle in `path`; tasks may need the network.

    `include_path`: a folder with YAML files of further tasks. UsageError for a task that neither has.
    """
    with open_bundle(path, threads=threads) as bundle:
        model = lm_for(bundle)
        import lm_eval  # type: ignore[import-not-found, unused-ignore]
        from lm_eval.tasks import TaskManager  # type: ignore[import-not-found, unused-ignore]

        manager = TaskManager(include_path=None if include_path is None else str(include_path))
        unknown = [name for name in tasks if not manager.match_tasks([name])]
        if unknown:
            raise UsageError(f"lm-eval has no task {', '.join(unknown)}; give --include-path for one of your own")
        arguments = {"model": model, "tasks": list(tasks), "limit": limit, "task_manager": manager}
        results: dict[str, Any] = lm_eval.simple_evaluate(**arguments)["results"]
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the results as JSON; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m runtime.lm_eval_adapter", description=__doc__)
    parser.add_argument("bundle", type=Path, metavar="DIR")
    parser.add_argument("--tasks", required=True, help="names, separated by commas")
    parser.add_argument("--include-path", type=Path, metavar="DIR", help="a folder with YAML files of further tasks")
    parser.add_argument("--limit", type=int, help="samples of each task")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)

    def run() -> int:
        tasks = options.tasks.split(",")
        results = evaluate(options.bundle, tasks, options.limit, options.threads, options.include_path)
        print(json.dumps(results, indent=2, default=str))
        return 0

    return end_command(run, as_json=False)


if __name__ == "__main__":
    sys.exit(main())
