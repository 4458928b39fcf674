"""The command line. No logic here; everything else is imported inside the command that needs it."""

from __future__ import annotations

import gc
import os
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from compress.version import BUILD_SIDE, DISTRIBUTION, __version__

try:
    import typer
except ModuleNotFoundError as error:  # a machine that only runs bundles
    if sys.argv[1:2] == ["doctor"]:  # which is there to say so
        from compress.commands.doctor import diagnose

        diagnose("--json" in sys.argv)
        raise SystemExit(0) from error
    raise SystemExit(f"{error}; {BUILD_SIDE}; `compress-run` runs bundles without it") from error

from compress.commands.endings import DEBUG, ending, print_json, quiet_stdout, run_program

if TYPE_CHECKING:
    from rich.console import Console

    from compress.recipe.schema import Recipe
    from compress.search.study import Study

app = typer.Typer(
    name="compress",
    help="Make a trained model smaller and faster, and know that it is.",
    epilog="Exit codes: 0 all gates hold, 1 a run failed, 2 the recipe or the call is wrong, 3 a gate fell short.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file.")]
BundleFolder = Annotated[Path, typer.Argument(metavar="DIR", help="The bundle's folder.")]
Overrides = Annotated[
    list[str], typer.Option("--set", metavar="PATH=VALUE", help="As in passes.0.bits=4 or vars.x=y; repeat it.")
]
Cache = Annotated[
    Path | None,
    typer.Option("--cache", metavar="DIR", help="Where finished work is kept; default: $COMPRESS_CACHE."),
]
Device = Annotated[
    str | None, typer.Option("--device", metavar="DEVICE", help="In the recipe's place: auto, cpu, cuda or cuda:1.")
]
Verify = Annotated[
    bool, typer.Option("--verify", help="Read the weight files' digests anew, not as the cache remembers them.")
]
Baseline = Annotated[
    Path | None,
    typer.Option(
        "--baseline",
        metavar="REPORT",
        help="An earlier report.json, or its folder: exit code 3 where something is worse, beyond noise.",
    ),
]
ModelGiven = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A folder, a hub id, an .onnx file, or module:factory or FILE.py:factory."),
]
TaskName = Annotated[
    str | None, typer.Option("--task", help="What the model does; default: found from its files, or from the data.")
]
WeightsFile = Annotated[
    str | None, typer.Option("--weights", metavar="FILE", help="Of a model from a factory, as .safetensors.")
]
PreprocessText = Annotated[
    str | None,
    typer.Option("--preprocess", metavar="YAML", help="As in '{kind: image, mean: [...]}'; default: the model's own."),
]
DataGiven = Annotated[
    str | None,
    typer.Option(
        "--data", metavar="DATA", help="A file, folder or hub id for all sets; or '{source: ..., columns: ...}'."
    ),
]
CalibrationGiven = Annotated[str | None, typer.Option("--calibration", metavar="DATA", help="In --data's place.")]
TrainGiven = Annotated[str | None, typer.Option("--train", metavar="DATA", help="In --data's place.")]
EvaluationGiven = Annotated[str | None, typer.Option("--evaluation", metavar="DATA", help="In --data's place.")]
TargetName = Annotated[
    str | None, typer.Option("--target", help="The runtime that the result is for; default: onnxruntime-cpu.")
]
RequiredSignature = Annotated[
    Path | None,
    typer.Option(
        "--require-signature",
        metavar="KEY",
        help="Refuse a bundle that this public key, or a certificate below these, did not sign: a PEM file.",
    ),
]
Short = Annotated[bool, typer.Option("--short", help="No progress, and five lines at most, as for CI.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, and nothing else there.")]


def main() -> None:
    run_program(app, sys.argv[1:])


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"compress {__version__} ({DISTRIBUTION})")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help=f"Show tracebacks; so does {DEBUG}=1.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if debug:
        os.environ[DEBUG] = "1"


@app.command()
def apply(
    recipe: RecipeFile,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where the bundle goes; default: bundles/NAME.")
    ] = None,
    overrides: Overrides = [],  # noqa: B006  (typer copies it)
    as_json: AsJson = False,
    cache: Cache = None,
    device: Device = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, only the verdict.")] = False,
    short: Short = False,
    progress: Annotated[bool, typer.Option("--progress", help="With --json: progress on stderr all the same.")] = False,
    verify: Verify = False,
    baseline: Baseline = None,
) -> None:
    """Do what a recipe says, write the bundle and judge it."""
    with ending(as_json):
        loaded = _load(recipe, overrides, device)
        _tell_code(loaded)
        with quiet_stdout(as_json):
            from compress.execution.run import apply_recipe
            from compress.store.output import name_output
            from runtime.report.stored import read_stored_report

            earlier = None if baseline is None else read_stored_report(baseline)
            out = out or name_output(loaded.name)
            silent = quiet or short or (as_json and not progress)
            report = apply_recipe(loaded, out, cache, silent, verify, earlier)
        if report is not None:  # a further process of one launch has none
            _show_report(report, as_json, out, new=True, short=short)


@app.command()
def demo() -> None:
    """Apply the recipe `quickstart` that comes with the project: a small CNN in int8, its bundle and its verdict."""
    with ending():
        from compress.recipe.examples import find_example

        recipe = find_example("quickstart")
    apply(recipe)


@app.command()
def sweep(
    recipe: RecipeFile,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="The study's folder; one that is there goes on. Default: bundles/NAME."
        ),
    ] = None,
    trials: Annotated[
        int | None, typer.Option("--trials", min=1, metavar="N", help="Points to try in all; default: the recipe's.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option("--budget", metavar="TIME", help="When to end, as in 45m, 2h or 1h30m.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, metavar="N", help="Trials that are built at once; default: 1.")
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option("--ray", metavar="ADDRESS", help="Build on a Ray cluster: auto, local, HOST:PORT or ray://..."),
    ] = None,
    overrides: Overrides = [],  # noqa: B006
    as_json: AsJson = False,
    cache: Cache = None,
    device: Device = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No line for each trial, only the outcome.")] = False,
) -> None:
    """Try the points of a recipe's search, and keep the best bundles and the recipe that makes the best one."""
    with ending(as_json):
        loaded, seconds = _load(recipe, overrides, device), _read_seconds(budget)
        _tell_code(loaded)
        with quiet_stdout(as_json):
            from compress.search.sweep import sweep as search
            from compress.store.output import name_output

            out = out or name_output(loaded.name)
            n_jobs = jobs if jobs is not None else 0 if ray else 1
            silent = quiet or as_json
            if loaded.goal:
                from compress.search.pursue import pursue
                from runtime.errors import UsageError

                if trials is not None:
                    raise UsageError("--trials: it is not known how many a goal takes; give --budget, as in 45m")
                study = pursue(loaded, out, cache, budget_s=seconds, jobs=n_jobs, ray=ray, quiet=silent)
            else:
                study = search(loaded, out, cache, trials=trials, budget_s=seconds, jobs=n_jobs, ray=ray, quiet=silent)
            page = _add_front(study)
        _show_study(study, page, as_json)


@app.command()
def auto(
    model: ModelGiven,
    goal: Annotated[
        str, typer.Option("--goal", help="What is to be reached: 'size >= 6x, latency_p50 >= 3.5x, top1 drop <= 0.01'.")
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="The study's folder; the same command goes on. Default: bundles/NAME."
        ),
    ] = None,
    budget: Annotated[str, typer.Option("--budget", metavar="TIME", help="When to end, as in 45m or 2h.")] = "1h",
    task: TaskName = None,
    weights: WeightsFile = None,
    preprocess: PreprocessText = None,
    data: DataGiven = None,
    calibration: CalibrationGiven = None,
    train: TrainGiven = None,
    evaluation: EvaluationGiven = None,
    target: TargetName = None,
    as_json: AsJson = False,
    cache: Cache = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No line for each trial, only the outcome.")] = False,
) -> None:
    """Find the passes with which a model reaches a goal: its bundle, the front, and the recipe without a search."""
    with ending(as_json):
        seconds = _read_seconds(budget)
        with quiet_stdout(as_json):
            from compress.commands.auto import reach_goal
            from compress.commands.new import NewAnswers, choose_output

            said = NewAnswers(model, weights, task, preprocess, data, calibration, train, evaluation, target, goal)
            study = reach_goal(said, out or choose_output(said), seconds, cache, quiet or as_json)
            page = _add_front(study)
        _show_study(study, page, as_json)


@app.command()
def plan(
    recipe: RecipeFile,
    overrides: Overrides = [],  # noqa: B006
    as_json: AsJson = False,
    cache: Cache = None,
    device: Device = None,
    verify: Verify = False,
) -> None:
    """Say what a recipe would do, layer by layer, and whether it can work; nothing is changed."""
    gc.set_threshold(400_000, 20, 100)  # walking again and again over what imports make is a fifth of a plan's time
    with ending(as_json):
        loaded = _load(recipe, overrides, device)
        _tell_code(loaded)
        with quiet_stdout(as_json):
            from compress.planning.make_plan import make_plan

            made = make_plan(loaded, cache, verify=verify)
        if as_json:
            print_json(made.to_dict())
        else:
            made.render(_console())


@app.command()
def check(recipe: RecipeFile, overrides: Overrides = [], as_json: AsJson = False) -> None:  # noqa: B006
    """Read a recipe strictly and print it with everything resolved and every default written out."""
    with ending(as_json):
        from compress.errors import RecipeError
        from compress.models.preprocess import explain_missing
        from compress.planning.own_metrics import own_metric_problems
        from compress.recipe.load import recipe_to_dict, recipe_to_yaml
        from compress.recipe.points import first_recipe

        loaded = _load(recipe, overrides)
        first = first_recipe(loaded)
        unsaid = explain_missing(first.model) if first.preprocess is None else ""
        if problems := [*([f"{recipe}: {unsaid}"] if unsaid else []), *own_metric_problems(first)]:
            raise RecipeError(problems)
        if as_json:
            print_json(recipe_to_dict(loaded))
        else:
            typer.echo(recipe_to_yaml(loaded), nl=False)


@app.command()
def inspect(bundle: BundleFolder, as_json: AsJson = False) -> None:
    """Show what a bundle holds: models, inputs, samples, gates, what was done to which layer."""
    with ending(as_json):
        from compress.commands.inspect import describe_bundle, inspect_bundle

        if as_json:
            print_json(describe_bundle(bundle))
        else:
            inspect_bundle(bundle, _console())


@app.command()
def verify(bundle: BundleFolder, require_signature: RequiredSignature = None, as_json: AsJson = False) -> None:
    """Check that every file of a bundle is the one its manifest names."""
    with ending(as_json):
        from runtime.bundle.format import CAME_WITHOUT, find_left_out
        from runtime.bundle.signature import check_signature
        from runtime.tasks.manifest import verify as verify_bundle

        if require_signature is not None:
            check_signature(bundle, require_signature)
        manifest, key = verify_bundle(bundle), require_signature
        left_out = find_left_out(bundle, manifest)
        n_files = len(manifest.files) - len(left_out)
        if as_json:
            said = {"verdict": "pass", "files": n_files, "digest": manifest.digest}
            print_json(said | ({"signed_with": str(key)} if key else {}) | ({"left_out": left_out} if left_out else {}))
        else:
            more = (f", signed with {key}" if key else "") + (f"; {CAME_WITHOUT}" if left_out else "")
            typer.echo(f"{bundle}: all {n_files} files are as the manifest says (digest {manifest.digest}){more}")


@app.command()
def validate(
    bundle: BundleFolder,
    report_folder: Annotated[
        Path | None, typer.Option("--report", metavar="DIR", help="Where the reports go; default: into the bundle.")
    ] = None,
    baseline: Baseline = None,
    undecided: Annotated[
        Literal["fail", "pass"] | None,
        typer.Option(
            "--undecided",
            help="What an undecided gate counts as, unless it says so itself; default: what the bundle says.",
        ),
    ] = None,
    require_signature: RequiredSignature = None,
    short: Short = False,
    as_json: AsJson = False,
) -> None:
    """Run a bundle on this machine, judge it by its gates and write its report."""
    with ending(as_json):
        with quiet_stdout(as_json):
            from runtime.bundle.signature import check_signature
            from runtime.report.stored import read_stored_report
            from runtime.report.terminal import show_progress
            from runtime.report.validate import validate as validate_bundle

            if require_signature is not None:
                check_signature(bundle, require_signature)
            earlier = None if baseline is None else read_stored_report(baseline)
            report = validate_bundle(
                bundle, report_folder=report_folder, earlier=earlier, progress=show_progress, undecided=undecided
            )
        _show_report(report, as_json, bundle, report_folder, short=short)


@app.command()
def report(
    bundle: BundleFolder,
    report_folder: Annotated[
        Path | None,
        typer.Option("--report", metavar="DIR", help="Where report.json lies and the page goes; default: the bundle."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write report.html, the page of a bundle's last judgement, also of one that was judged elsewhere."""
    with ending(as_json):
        from compress.commands.report import make_page
        from runtime.report.report import to_dict

        page, judged = make_page(bundle, report_folder)
        if as_json:
            print_json({"page": str(page), "report": to_dict(judged)})
        else:
            typer.echo(f"{page}: written")


@app.command()
def compile(
    bundle: BundleFolder,
    again: Annotated[bool, typer.Option("--again", help="Also those engines that are there and run here.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compile the engines that a bundle waits for, on this machine, and judge it anew."""
    with ending(as_json):
        with quiet_stdout(as_json):
            from compress.commands.compile import compile_bundle

            report = compile_bundle(bundle, again)
        _show_report(report, as_json, bundle, new=True)


@app.command()
def parity(
    bundle: BundleFolder,
    backend: Annotated[
        str, typer.Option("--backend", help="tensorrt, tensorrt-rtx or onnxruntime-cpu; default: by the target.")
    ] = "",
    cache: Cache = None,
    as_json: AsJson = False,
) -> None:
    """Compare every form of a model with the one before, and name the first tensor or layer that differs."""
    with ending(as_json):
        with quiet_stdout(as_json):
            from compress.commands import ladder, parity

            engine = backend or parity.choose_engine(bundle)
            if engine in ("", parity.REFERENCE):
                climbed = ladder.climb(bundle, cache)
                found, holds, texts = ladder.to_dict(climbed), climbed.holds, ladder.describe_ladder(climbed)
            else:
                compared = parity.bundle_parity(bundle, engine)
                found, holds, texts = parity.to_dict(compared), compared.holds, parity.lines(compared)
        if as_json:
            print_json(found)
        else:
            typer.echo("\n".join(texts))
        raise typer.Exit(0 if holds else 3)


@app.command()
def blame(
    bundle: BundleFolder,
    budget: Annotated[float, typer.Option("--budget", metavar="MINUTES", min=0.05, help="How long it may take.")] = 3.0,
    metric: Annotated[
        str, typer.Option("--metric", metavar="NAME", help="Of the bundle's; default: that of its first gate.")
    ] = "",
    cache: Cache = None,
    as_json: AsJson = False,
) -> None:
    """Find the layers that carry a bundle's loss, and say what putting them back to float gives and costs."""
    with ending(as_json):
        with quiet_stdout(as_json):
            from compress.commands.blame import blame_bundle, render_blame, to_dict
            from runtime.report.terminal import show_progress

            found = blame_bundle(bundle, budget, metric, cache, show_progress)
        if as_json:
            print_json(to_dict(found))
        else:
            render_blame(found, _console())


@app.command()
def why(
    bundle: BundleFolder,
    backend: Annotated[str | None, typer.Option("--backend", help="Default: the bundle's target.")] = None,
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="Default: the bundle's.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say where the time of a bundle's calls goes on this machine, why it is no less, and what to change."""
    with ending(as_json):
        from runtime.judge.explain import explain_path
        from runtime.report.terminal import find_width
        from runtime.report.why import render_explanation

        with quiet_stdout(as_json):
            explanation = explain_path(bundle, backend, threads)
        if as_json:
            print_json(asdict(explanation))
        else:
            typer.echo(render_explanation(explanation, find_width()), nl=False)


@app.command()
def deploy(
    bundle: BundleFolder,
    to: Annotated[str, typer.Option("--to", metavar="PLACE", help="triton, docker or genai.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder to write; it must not exist.")],
    backend: Annotated[str, typer.Option("--backend", help="Default: the bundle's target.")] = "",
    max_batch_size: Annotated[
        int | None, typer.Option("--max-batch-size", min=1, help="triton: requests together.")
    ] = None,
    instances: Annotated[int, typer.Option("--instances", min=1, help="triton: copies of the model.")] = 1,
) -> None:
    """Write what a server reads: a Triton model repository, a Docker build context, an onnxruntime-genai folder."""
    with ending():
        from compress.deploy.places import deploy as write
        from compress.deploy.places import find_place
        from compress.deploy.triton import Serving

        serving = Serving(max_batch_size=max_batch_size, instances=instances, backend=backend)
        typer.echo(f"{write(bundle, find_place(to), out, serving)}: written")


@app.command()
def bom(bundle: BundleFolder) -> None:
    """Write bom.cdx.json, a CycloneDX bill of materials: files, origin, data, passes, metrics, versions."""
    with ending():
        from compress.commands.bom import write_bom
        from runtime.bundle.format import SIGNATURE

        typer.echo(f"{write_bom(bundle)}: written")
        if (bundle / SIGNATURE).exists():
            typer.echo(f"note: {bundle / SIGNATURE} was made without it: run `compress sign` again", err=True)


@app.command()
def sign(
    bundle: BundleFolder,
    key: Annotated[Path, typer.Option("--key", metavar="FILE", help="An elliptic-curve private key, PEM.")],
    password_env: Annotated[
        str | None, typer.Option("--password-env", metavar="NAME", help="The variable that holds the key's password.")
    ] = None,
    certificate: Annotated[
        Path | None,
        typer.Option("--certificate", metavar="FILE", help="The key's, PEM, then those up to the root; default: none."),
    ] = None,
    builder: Annotated[
        str, typer.Option("--builder", metavar="URI", help="Who builds, for the provenance, as a workflow's address.")
    ] = "",
) -> None:
    """Write provenance.json, how a bundle was built, and model.sig, the OpenSSF signature over all of it."""
    with ending():
        from compress.commands.sign import read_password, sign_bundle
        from runtime.bundle.format import SIGNATURE

        manifest = sign_bundle(bundle, key, read_password(password_env, certificate), certificate, builder)
        typer.echo(f"{bundle / SIGNATURE}: written (digest {manifest.digest})")


@app.command()
def push(
    bundle: BundleFolder,
    to: Annotated[str, typer.Argument(metavar="TO", help="hf://OWNER/NAME or oci://HOST/NAME:TAG.")],
    public: Annotated[bool, typer.Option("--public", help="hf: everybody may read it; default: private.")] = False,
    with_evaluation: Annotated[
        bool,
        typer.Option(
            "--with-evaluation", help="Send the evaluation data, too: without it nobody can judge the bundle there."
        ),
    ] = False,
    licence: Annotated[
        str, typer.Option("--license", metavar="ID", help="As in apache-2.0; default: that of the model's own card.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Send a bundle to a model hub or a registry: whole or not at all, private, without its evaluation data."""
    with ending(as_json):
        with quiet_stdout(as_json):
            from compress.commands.push import push_bundle, render_push

            pushed = push_bundle(bundle, to, public, with_evaluation, licence)
        if as_json:
            print_json({"verdict": "pass", **asdict(pushed)})
        else:
            typer.echo(render_push(pushed))


@app.command()
def reproduce(
    bundle: BundleFolder,
    overrides: Overrides = [],  # noqa: B006
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Keep the new bundle here; default: nothing is kept.")
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(
            "--cache", metavar="DIR", help="Where finished results are taken up; default: all work is done again."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Build a bundle again from its own recipe, and say which files differ (exit code 3 if any does)."""
    with ending(as_json):
        with quiet_stdout(as_json):
            from compress.commands.reproduce import render_reproduction
            from compress.commands.reproduce import reproduce as build_again

            result = build_again(bundle, overrides, out, cache, as_json)
        if as_json:
            print_json({"verdict": "pass" if result.same else "fail", **asdict(result)})
        else:
            typer.echo(render_reproduction(result))
        raise typer.Exit(0 if result.same else 3)


@app.command()
def compare(
    bundles: Annotated[
        list[Path], typer.Argument(metavar="A B...", help="Judged bundles, or their reports; each is compared with A.")
    ],
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Also write a page.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say which differences between bundles are beyond noise, and what recipes and layers differ in."""
    with ending(as_json):
        from compress.commands.compare import compare_bundles, print_comparison, to_dict, write_page

        compared = compare_bundles(bundles)
        if html is not None:
            write_page(compared, html)
        if as_json:
            print_json(to_dict(compared))
        else:
            print_comparison(compared, _console())


@app.command()
def schema(out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Default: stdout.")] = None) -> None:
    """Print the recipe's JSON Schema, with which editors complete and check recipes."""
    with ending():
        import json

        from compress.recipe.templates import write_new
        from compress.recipe.vocabulary import editor_schema

        text = json.dumps(editor_schema(), indent=2) + "\n"
        if out is None:
            typer.echo(text, nl=False)
        else:
            write_new(out, text, replace=True)


@app.command()
def new(
    task: TaskName = None,
    source: Annotated[
        str | None,
        typer.Option("--source", help="Put into a template; nothing is looked at: hf:, dir:, python: or onnx:..."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="MODEL", help="One that is there: its recipe works as it is written."),
    ] = None,
    weights: WeightsFile = None,
    preprocess: PreprocessText = None,
    data: DataGiven = None,
    calibration: CalibrationGiven = None,
    train: TrainGiven = None,
    evaluation: EvaluationGiven = None,
    target: TargetName = None,
    goal: Annotated[
        str | None, typer.Option("--goal", help="In the place of passes: 'size >= 6x, top1 drop <= 0.01'.")
    ] = None,
    example: Annotated[
        str | None,
        typer.Option("--example", metavar="NAME", help="Copy a recipe that comes with the project; list: name all."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The recipe to write.")] = Path("recipe.yaml"),
) -> None:
    """Write a recipe to start from: of a model and its data, of a task, or an example; asks in a terminal."""
    with ending():
        from compress.commands.new import NewAnswers, can_ask, write_recipe

        said = NewAnswers(model, weights, task, preprocess, data, calibration, train, evaluation, target, goal)
        ask = (lambda question, usual: typer.prompt(question, usual)) if can_ask() else None
        typer.echo("\n".join(write_recipe(out, said, source, ask, example)))


@app.command()
def bench(
    model: ModelGiven,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Rows and the best recipe; the same command goes on from it.")
    ] = Path("bench"),
    task: TaskName = None,
    weights: WeightsFile = None,
    preprocess: PreprocessText = None,
    data: DataGiven = None,
    calibration: CalibrationGiven = None,
    evaluation: EvaluationGiven = None,
    budget: Annotated[str, typer.Option("--budget", metavar="TIME", help="When to end, as in 90s or 5m.")] = "5m",
    html: Annotated[bool, typer.Option("--html", help="Also write DIR/bench.html.")] = False,
    as_json: AsJson = False,
    cache: Cache = None,
) -> None:
    """Measure every format on every backend that this machine has, in one table, and write the best one's recipe."""
    with ending(as_json):
        seconds = _read_seconds(budget)
        with quiet_stdout(as_json):
            from compress.commands.bench import bench_model, write_page
            from compress.commands.bench_rows import render_table, to_dict
            from compress.commands.new import NewAnswers

            said = NewAnswers(model, weights, task, preprocess, data, calibration, None, evaluation)
            table = bench_model(said, out, seconds, cache, lambda text: typer.echo(text, err=True))
            page = write_page(table, out) if html else None
        if as_json:
            print_json(to_dict(table))
        else:
            typer.echo(render_table(table))
            if page is not None:
                typer.echo(f"page: {page}")


@app.command()
def quantize(
    model: ModelGiven,
    scheme: Annotated[str, typer.Option("--scheme", help="W4A16, W8A8, INT8, FP8, Q4_K, ...")] = "",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="The bundle; its recipe goes to DIR.yaml. Default: bundles/NAME-SCHEME."
        ),
    ] = None,
    task: TaskName = None,
    weights: WeightsFile = None,
    preprocess: PreprocessText = None,
    data: DataGiven = None,
    calibration: CalibrationGiven = None,
    evaluation: EvaluationGiven = None,
    target: TargetName = None,
    as_json: AsJson = False,
    cache: Cache = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, only the verdict.")] = False,
    short: Short = False,
) -> None:
    """Bring a model to a scheme by the passes that usually do, write the bundle and its recipe, and judge it."""
    with ending(as_json):
        with quiet_stdout(as_json):
            from compress.commands.new import NewAnswers, choose_output
            from compress.commands.quantize import quantize_model

            said = NewAnswers(model, weights, task, preprocess, data, calibration, None, evaluation, target)
            out = out or choose_output(said, f"-{scheme.lower()}")
            report = quantize_model(said, scheme, out, cache, quiet or short or as_json)
        if report is not None:
            _show_report(report, as_json, out, new=True, short=short)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Say what is installed and works here, and how to mend what does not."""
    with ending(as_json):
        from compress.commands.doctor import diagnose

        diagnose(as_json)


@app.command()
def mcp() -> None:
    """Offer check, plan, bench, apply, report, why and blame to an agent, over MCP on stdin and stdout."""
    with ending():
        from compress.commands.mcp_server import serve

        serve()


def _load(recipe: Path, overrides: list[str], device: str | None = None) -> Recipe:
    from compress.recipe.load import load_recipe

    return load_recipe(recipe, overrides if device is None else [*overrides, f"device={device}"])


def _read_seconds(budget: str | None) -> float | None:
    """Return the seconds of "45m", "1h30m" or "90s"; None of None. Raises UsageError for anything else."""
    from runtime.errors import UsageError

    if budget is None:
        return None
    parts = re.findall(r"(\d+(?:\.\d+)?)([hms])", budget)
    if not parts or "".join(map("".join, parts)) != budget:
        raise UsageError(f"--budget {budget}: write hours, minutes or seconds, as in 45m, 2h or 1h30m")
    seconds = sum(float(number) * {"h": 3600, "m": 60, "s": 1}[unit] for number, unit in parts)
    if seconds <= 0:
        raise UsageError(f"--budget {budget}: no time at all; write 45m")
    return seconds


def _tell_code(recipe: Recipe) -> None:
    """Say on stderr whose Python is about to run, of a recipe that stands outside of the working directory."""
    if recipe.root.resolve().is_relative_to(Path.cwd()):
        return
    foreign = [source for source in recipe.code_sources if not source.startswith("python:compress.")]
    if foreign:
        listed = ", ".join(foreign)
        typer.echo(f"note: Python of this recipe's model runs now, also to plan it: {listed} (SECURITY.md)", err=True)
    if recipe.own_metrics:
        listed = ", ".join(recipe.own_metrics)
        typer.echo(f"note: Python of this recipe's metrics runs where it is built: {listed} (SECURITY.md)", err=True)


def _show_report(
    report: Any,
    as_json: bool,
    bundle: Path,
    report_folder: Path | None = None,
    new: bool = False,
    short: bool = False,
) -> None:
    """Write its page, print it, and where the bundle is if that is `new`; end with the verdict's exit code."""
    from compress.commands.report import add_page
    from runtime.report.report import render_short, render_text, to_dict
    from runtime.report.terminal import find_width

    with quiet_stdout(as_json):
        page = add_page(bundle, report, report_folder)
    if as_json:
        print_json(to_dict(report))
    else:
        places = [f"bundle: {bundle}"] * new + ([] if page is None else [f"page: {page}"])
        render = render_short if short else render_text
        typer.echo(render(report, find_width(), bundle, places), nl=False)
    raise typer.Exit(report.exit_code)


def _add_front(study: Study) -> Path | None:
    """Write the page of a study's best bundle anew, with the front in it; None where there is no bundle."""
    from compress.commands.report import add_page
    from runtime.report.stored import read_report

    if study.bundle is None:
        return None
    return add_page(study.bundle, read_report(study.bundle / "report.json"), frontier=study.frontier)


def _show_study(study: Study, page: Path | None, as_json: bool) -> None:
    """Print a study, and end with its exit code."""
    if as_json:
        print_json(study.to_dict())
    else:
        study.render(_console())
        if page is not None:
            typer.echo(f"page: {page}")
    raise typer.Exit(study.exit_code)


def _console() -> Console:
    from compress.store.run_log import open_console

    return open_console()


if __name__ == "__main__":
    main()
