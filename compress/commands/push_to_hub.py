"""Send a bundle to a model hub: one commit, which holds all of it and the card, or nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.commands.inspect import read_json
from compress.commands.parcel import Parcel, Push, describe_push
from compress.errors import PushError
from compress.export.card import FOLDER, hub_card
from compress.recipe.network import reach_hub
from compress.tasks import TORCH_TASKS
from runtime.bundle.format import MANIFEST
from runtime.errors import UsageError
from runtime.tasks.metrics import METRICS

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import ModelInfo

CARD = "README.md"
OF_A_PUSH = ("library_name", "pipeline_tag", "base_model_relation", "datasets", "model-index")
"""Keys of a card's header that are of one bundle and not of the next."""
AS_IT_WAS = ("float32", "as it was")
"""What the weights of a model that was not quantized are stored in."""


def check_hub() -> None:
    """Raise UsageError where the hub is out of reach by the user's own word, or knows nobody of here."""
    from huggingface_hub import get_token

    with reach_hub():
        if get_token() is None:
            raise UsageError("no token for the hub: log in with `hf auth login`, or set HF_TOKEN")


def push_to_hub(parcel: Parcel, repo_id: str, public: bool) -> Push:
    """Commit the bundle into the folder FOLDER of a hub's repository, with the repository's card; errors as there."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    with reach_hub():
        api, new = HfApi(), {f"{FOLDER}/{name}": path for name, path in parcel.files.items()}
        with _name_failure(repo_id, "no file was sent"):
            there = _open_repository(api, repo_id, public)
            kept = _read_header(api, repo_id, there)
        card = _write_card(parcel, repo_id, kept)
        removed = [name for name in _list_files(there) if name.startswith(f"{FOLDER}/") and name not in new]
        with _name_failure(repo_id, "a push is one commit: all of it is there, or what was there before; push again"):
            commit = api.create_commit(
                repo_id,
                [
                    CommitOperationAdd(CARD, card.encode()),
                    *(CommitOperationAdd(name, path) for name, path in new.items()),
                    *(CommitOperationDelete(name) for name in sorted(removed)),
                ],
                commit_message=f"{parcel.manifest.name}, digest {parcel.manifest.digest[:12]}",
                parent_commit=there.sha,
            )
    name = repo_id.rpartition("/")[2]
    get = f"hf download {repo_id} --local-dir {name}", f"compress-run verify {name}/{FOLDER}"
    return describe_push(parcel, f"hf://{repo_id}", str(commit.oid), public, [], *get)


def _open_repository(api: HfApi, repo_id: str, public: bool) -> ModelInfo:
    """Return the repository, made where there is none; UsageError where it is not one for this bundle."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        there = api.model_info(repo_id)
    except RepositoryNotFoundError:
        api.create_repo(repo_id, private=not public, exist_ok=True)
        there = api.model_info(repo_id)
    if bool(there.private) == public:
        is_now, way = ("private", "leave --public out") if there.private else ("public", "say --public")
        raise UsageError(f"hf://{repo_id} is {is_now}, and stays so: {way}, or change it in its settings on the hub")
    names = _list_files(there) - {".gitattributes"}
    if names and f"{FOLDER}/{MANIFEST}" not in names:
        raise UsageError(f"hf://{repo_id} holds something else than a bundle, which stays: push to another name")
    return there


def _list_files(there: ModelInfo) -> set[str]:
    return {file.rfilename for file in there.siblings or ()}


def _read_header(api: HfApi, repo_id: str, there: ModelInfo) -> dict[str, Any]:
    """Return the header of the repository's card without what the last push knew; {} where none can be read."""
    from huggingface_hub import ModelCard

    if CARD not in _list_files(there):
        return {}
    text = Path(api.hf_hub_download(repo_id, CARD, revision=there.sha)).read_text("utf-8")
    try:
        header: dict[str, Any] = ModelCard(text).data.to_dict()
    except Exception:  # noqa: BLE001  (people's own YAML: what cannot be read is written anew)
        return {}
    return {key: value for key, value in header.items() if key not in OF_A_PUSH}


def _write_card(parcel: Parcel, repo_id: str, kept: dict[str, Any]) -> str:
    """Return the repository's card; what people added to its header (`kept`) stays where this says nothing of it."""
    from huggingface_hub import EvalResult, ModelCardData
    from huggingface_hub.repocard_data import CardData

    manifest, lock, report = parcel.manifest, parcel.lock, parcel.report
    candidate, task = manifest.artifact("candidate"), TORCH_TASKS.get(manifest.task)
    tag = task.hub_tag if task is not None else ""
    hub_sets = {name: found for name, record in lock["data"].items() if (found := _find_hub_sets(record["source"]))}
    judged_on = (hub_sets.get("evaluation") or [f"{manifest.name}-evaluation"])[0]
    metrics = {} if report is None else report.candidate.metrics
    by_labels = {n: value for n, value in metrics.items() if n not in METRICS or METRICS[n].against == "labels"}
    n_samples = 0 if manifest.evaluation is None else manifest.evaluation.n_samples
    results = [
        EvalResult(
            task_type=tag or manifest.task,
            dataset_type=judged_on,
            dataset_name=f"{judged_on}, {n_samples} samples",
            metric_type=name,
            metric_name=name,
            metric_value=float(f"{value:.6g}"),
        )
        for name, value in (by_labels or metrics).items()
        if math.isfinite(value)
    ]
    source = str(lock["model"]["source"])
    base = source.removeprefix("hf:") if source.startswith("hf:") else kept.get("base_model")
    quantized = candidate.precision not in AS_IT_WAS
    ours = ModelCardData(
        license=parcel.licence.lower() or None,
        library_name="onnx" if candidate.kind == "onnx" else None,
        pipeline_tag=tag or None,
        base_model=base,
        base_model_relation=("quantized" if quantized else "finetune") if base else None,
        datasets=sorted({name for names in hub_sets.values() for name in names}) or None,
        tags=["compressed", manifest.target, *kept.get("tags", [])],
        model_name=manifest.name if results else None,
        eval_results=results or None,
    ).to_dict()
    header = CardData(**{**kept, **ours}).to_yaml()
    layers = read_json(parcel.files["layers.json"]) if "layers.json" in parcel.files else []
    return hub_card(manifest, lock, layers, report, header, repo_id, judged=not parcel.left_out)


def _find_hub_sets(source: Any) -> list[str]:
    """Return the hub's names of the data sets in a record of the lock: one source, or several by name."""
    sources = list(source.values()) if isinstance(source, dict) else [source]
    return [str(name).removeprefix("hf:").partition(":")[0] for name in sources if str(name).startswith("hf:")]


@contextmanager
def _name_failure(repo_id: str, there: str) -> Iterator[None]:
    """Turn what the hub's library raises into a PushError that says what is on the hub now."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        cause = f" {error.__cause__}" if isinstance(error.__cause__, Exception) else ""  # which file, and then why
        line = " ".join(f"{error}{cause}".split()) or type(error).__name__
        raise PushError(f"hf://{repo_id}: {line}; {there}") from error
