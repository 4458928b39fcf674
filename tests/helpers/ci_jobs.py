"""Run a composite GitHub action and a GitLab job here: their shell steps, in order, as their machines would.

What they install and fetch is here already: `compress` and `compress-run` judge in the fewest calls, pip, git, gh and
curl are stand-ins that say what they were asked for (`asked.txt`) and give what a test put in their place.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from places import HELPERS, ROOT
from shortcuts import COMMAND

EXPRESSION = re.compile(r"\$\{\{(.*?)\}\}", re.DOTALL)
QUICK_COMMAND = f"{COMMAND}with quick_judge(): main()"
QUICK_RUN = f"""
import sys
sys.path.append({str(HELPERS)!r})
from shortcuts import quick_judge
from runtime.__main__ import main
with quick_judge():
    sys.exit(main())
"""
STAND_INS = {
    "compress": 'exec "$PYTHON" -c "$QUICK_COMMAND" "$@"',
    "compress-run": 'exec "$PYTHON" -c "$QUICK_RUN" "$@"',
    "python": 'case "$1 $2" in "-m pip") ;; *) exec "$PYTHON" "$@" ;; esac',
    "git": 'mkdir -p "$(dirname "${@: -1}")" && ln -s "$ROOT" "${@: -1}"',
    "gh": """
case "$1 $2 $*" in
  "run list "*) [ ! -d "$PLACES/base" ] || echo 7 ;;
  "run download "*) mkdir -p "${@: -1}" && cp -r "$PLACES/base" "${@: -1}/bundle" ;;
  "api --paginate "*) cat "$PLACES/earlier.txt" 2> /dev/null || true ;;
  *) body=${@: -1} && [ ! -f "$PLACES/forbidden" ] && cp "${body#body=@}" "$PLACES/comment.md" ;;
esac
""",
    "curl": """
case "$*" in
  */jobs/artifacts/*)
    [ -d "$PLACES/base" ] || exit 22
    mkdir -p "$PLACES/zipped/$RESULTS" && cp -r "$PLACES/base" "$PLACES/zipped/$RESULTS/bundle"
    cd "$PLACES/zipped" && "$PYTHON" -m zipfile -c "$CI_PROJECT_DIR/.compress/base.zip" "$RESULTS" ;;
  *per_page*) cat "$PLACES/earlier.txt" 2> /dev/null || echo "[]" ;;
  *) cp .compress/comment.md "$PLACES/comment.md" ;;
esac
""",
}


@dataclass
class Job:
    """What became of a job: its exit code, what it printed, and its folders."""

    folder: Path
    code: int = 0
    text: str = ""
    uses: dict[str, dict[str, str]] = field(default_factory=dict)
    """Name of a step that another action does -> what it is given."""

    @property
    def results(self) -> Path:
        return self.folder / "compress-results"

    @property
    def summary(self) -> str:
        return (self.folder / "places/summary.md").read_text()

    @property
    def comment(self) -> str:
        return (self.folder / "places/comment.md").read_text()

    @property
    def asked(self) -> list[str]:
        """What the stand-ins were called with."""
        return (self.folder / "places/asked.txt").read_text().splitlines()


def open_job(folder: Path, base: Path | None) -> tuple[Job, dict[str, str]]:
    """Return a new job, and the environment of its commands. `base`: the bundle that the base branch ships."""
    places, tools = folder / "places", folder / "tools"
    for made in (places, tools):
        made.mkdir(exist_ok=True)
    for name, script in STAND_INS.items():
        tool = tools / name
        tool.write_text(f'#!/usr/bin/env bash\necho "{name} $*" >> "$PLACES/asked.txt"\n{script}\n')
        tool.chmod(0o755)
    if base is not None:
        shutil.copytree(base, places / "base")
    own = {name: os.environ[name] for name in ("HOME", "OMP_NUM_THREADS", "COMPRESS_TIMING") if name in os.environ}
    commands = {"PYTHON": sys.executable, "QUICK_COMMAND": QUICK_COMMAND, "QUICK_RUN": QUICK_RUN}
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    known = {"PATH": path, "PYTHONPATH": str(ROOT), "ROOT": str(ROOT), "PLACES": str(places)}
    return Job(folder), {**own, **commands, **known}


def run_shell(job: Job, script: str, environment: Mapping[str, str]) -> None:
    """Run a script as GitHub's `shell: bash` does; the first failure is the job's exit code."""
    command = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", script]
    done = subprocess.run(command, cwd=job.folder, env=environment, capture_output=True, text=True, check=False)
    job.text += done.stdout + done.stderr
    job.code = job.code or done.returncode


def run_action(folder: Path, inputs: Mapping[str, str], base: Path | None = None, pull: int | None = 12) -> Job:
    """Run action.yml in `folder`, as in pull request `pull`, or as after a push."""
    job, environment = open_job(folder, base)
    places, temporary = folder / "places", folder / "temporary"
    temporary.mkdir(exist_ok=True)
    environment |= {
        "GITHUB_ACTION_PATH": str(ROOT),
        "GITHUB_STEP_SUMMARY": str(places / "summary.md"),
        "GITHUB_REPOSITORY": "me/models",
        "GITHUB_BASE_REF": "main" if pull else "",
        "GITHUB_WORKFLOW_REF": "me/models/.github/workflows/model.yml@refs/heads/main",
        "RUNNER_TEMP": str(temporary),
    }
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    contexts: dict[str, Any] = {
        "inputs": {name: inputs.get(name, given["default"]) for name, given in action["inputs"].items()},
        "runner": {"os": "Linux", "temp": str(temporary)},
        "github": {
            "token": "secret",
            "event_name": "pull_request" if pull else "push",
            "event": {"pull_request": {"number": str(pull)} if pull else {}},
        },
        "steps": {},
    }
    for step in action["runs"]["steps"]:
        condition = step.get("if", "success()")
        if (job.code and "always()" not in condition) or not evaluate(condition, contexts):
            continue
        if "uses" in step:
            given = step["with"].items()
            job.uses[step["name"]] = {name: fill_in(str(value), contexts) for name, value in given}
            continue
        output = places / "output.txt"
        output.write_text("")
        given = {name: fill_in(value, contexts) for name, value in step.get("env", {}).items()}
        run_shell(job, step["run"], {**environment, **given, "GITHUB_OUTPUT": str(output)})
        found = dict(line.split("=", 1) for line in output.read_text().splitlines())
        contexts["steps"][step.get("id", "")] = {"outputs": found}
    return job


def fill_in(text: str, contexts: Mapping[str, Any]) -> str:
    return EXPRESSION.sub(lambda match: str(evaluate(match[1], contexts)), text)


def evaluate(expression: str, contexts: Mapping[str, Any]) -> Any:
    """Evaluate an expression of GitHub's, whose operators and precedence are Python's under other names."""

    def find(path: str) -> Any:
        found: Any = contexts
        for name in path.split("."):
            found = found.get(name, "") if isinstance(found, Mapping) else ""
        return found

    text = expression.strip().replace("&&", " and ").replace("||", " or ")
    text = re.sub(r"\b[a-z_]+(?:\.[a-z][\w-]*)+", lambda match: f"find({match[0]!r})", text)
    functions = {"always": lambda: True, "success": lambda: True, "format": str.format, "find": find}
    return eval(text, {"__builtins__": {}}, functions)


def run_gitlab(folder: Path, variables: Mapping[str, str], base: Path | None = None, pull: int | None = 12) -> Job:
    """Run the job of .ci/gitlab.yml in `folder`, as in merge request `pull`, or as after a push."""
    job, environment = open_job(folder, base)
    predefined = {
        "CI_PROJECT_DIR": str(folder),
        "CI_PROJECT_ID": "3",
        "CI_API_V4_URL": "https://gitlab.example/api/v4",
        "CI_JOB_NAME": "model",
        "CI_JOB_TOKEN": "secret",
    }
    if pull:
        predefined |= {"CI_MERGE_REQUEST_TARGET_BRANCH_NAME": "release/2", "CI_MERGE_REQUEST_IID": str(pull)}
    template = yaml.safe_load((ROOT / ".ci/gitlab.yml").read_text())[".compress"]
    for name, value in {**template["variables"], "COMPRESS": "https://example/compress.git", **variables}.items():
        predefined[name] = re.sub(r"\$(\w+)", lambda match: predefined[match[1]], value)
    environment |= predefined
    run_shell(job, "\n".join([*template["before_script"], *template["script"]]), environment)
    code = job.code
    run_shell(job, "\n".join(template["after_script"]), environment)
    assert job.code == code, "what comes after a job does not decide it"
    return job
