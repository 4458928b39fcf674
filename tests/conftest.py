"""What all tests share: nothing written here needs to outlive a power failure."""

from __future__ import annotations

import gc
import itertools
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hosts import cpuinfo, host
from hypothesis import HealthCheck, Phase, settings

__all__ = ["cpuinfo", "host"]

os.environ.setdefault("COMPRESS_TIMING", "off")  # no test's outcome depends on what this machine is fast at
# What Python compiles is kept, whatever the caller says: a child process that imports compress takes 3.1 s instead of
# 4.3, and a second collection of all tests 14 s instead of 22.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# A small model asks for few shapes twice, and keys of free sizes take longer to make than they save: a fifth of a
# small export's time.
os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")
gc.set_threshold(20_000)  # three tests that export take 16.7 s of processor time instead of 18.3

settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=40,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    # The first cases import and compile; and fixtures by which a test changes a setting hold for all of its cases.
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.function_scoped_fixture),
)
settings.load_profile("repeatable")


SHARED = {
    "tests/compress/export/test_decoder_export.py": "exported decoders",
    "tests/compress/export/test_genai.py": "exported decoders",
    "tests/compress/export/test_openvino_export.py": "exported decoders",
    "tests/compress/export/test_refill.py": "exported decoders",
    "tests/compress/export/test_weights_in_files.py": "exported decoders",
    "tests/compress/graph/test_group_query_attention.py": "exported decoders",
    "tests/compress/graph/test_last_logits.py": "exported decoders",
    "tests/e2e/test_chats.py": "a decoder's cached results",
    "tests/e2e/test_cli_golden.py": "quickstart",
    "tests/e2e/test_gguf_files.py": "a decoder's cached results",
    "tests/e2e/test_language.py": "a decoder's cached results",
    "tests/e2e/test_language_in_files.py": "a decoder's cached results",
    "tests/e2e/test_language_resume.py": "a decoder's cached results",
    "tests/e2e/test_pruned_language.py": "a decoder's cached results",
    "tests/e2e/test_qat_recipe.py": "a decoder's cached results",
    "tests/e2e/test_quickstart.py": "quickstart",
    "tests/golden/test_golden_recipes.py": "quickstart",
    "tests/e2e/test_tags.py": "quickstart",
}
"""File -> what it shares with others, which one process therefore makes once for all of them."""
LONGEST = ("tests/test_", "tests/shelf/", "tests/e2e/", "tests/compress/work/test_learning_resume.py", *SHARED)
"""What takes longest comes first, so that two processes end together."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put first what takes longest."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run the tests of a file, and of files that share what is slow to make, in one process."""
    from xdist.scheduler import LoadFileScheduling

    class BySharing(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return SHARED.get(file, file)

    return BySharing(config, log)


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_disks() -> None:
    """Without `fsync`, which takes milliseconds for each file, but for those that bring their own."""
    os.fsync = lambda handle: None  # type: ignore[assignment]


FILES = itertools.count()


@pytest.fixture(scope="module", autouse=True)
def few_objects_to_collect() -> None:
    """Let garbage collection pass over what the modules imported so far hold: judging collects, a second each time.

    In every fourth file: it takes a tenth of a second.
    """
    if next(FILES) % 4 == 0:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def projects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each task, with a small model and data under the names that pages and recipes use."""
    from sample_projects import write_projects

    folder = tmp_path_factory.mktemp("projects")
    write_projects(folder)
    return folder


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The bundle of recipes/quickstart.yaml by the command, its speed gate made lenient, and what was printed."""
    from child_processes import run_python
    from places import QUICKSTART
    from shortcuts import FEW_ROUNDS_COMMAND

    folder = tmp_path_factory.mktemp("quickstart")
    fewest = "validate.benchmark={iterations: 40, processes: 6}"  # that give an interval
    speed = ["--set", "validate.gates.3.min_speedup=0.01", "--set", fewest]
    words = ["apply", QUICKSTART, "--out", "out/q", "--cache", "cache", *speed]
    done = run_python("-c", FEW_ROUNDS_COMMAND, *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "out/q", done.stdout


@pytest.fixture(scope="session")
def tags_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of golden/recipes/tags-distill-int8.yaml. Not to be written to."""
    from golden import apply_golden
    from trained_models import write_tagger

    folder = tmp_path_factory.mktemp("tags")
    write_tagger(folder)
    return apply_golden("tags-distill-int8", folder)
