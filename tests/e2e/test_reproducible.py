"""Same recipe, same inputs: same bytes. And nothing is done twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from makers import apply, bundle_bytes, changed, cli, plan, write_recipe

from compress.cache import StepCache

Net = tuple[Path, dict[str, Any]]


def test_another_process_folder_and_cache_give_the_same_bytes(net: Net, bundle: Path, tmp_path: Path) -> None:
    recipe = write_recipe(net[0] / "again.yaml", net[1])
    done = cli(["apply", str(recipe), "--out", "elsewhere/tiny", "--cache", "fresh", "--quiet"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert bundle_bytes(tmp_path / "elsewhere/tiny") == bundle_bytes(bundle)


def test_a_second_run_does_nothing_again(
    net: Net, bundle: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a finished step was done again")

    monkeypatch.setattr(StepCache, "put", refuse)
    monkeypatch.setattr("compress.passing.load_model", refuse)
    apply(net[1], tmp_path / "b", cache, net[0])
    assert bundle_bytes(tmp_path / "b") == bundle_bytes(bundle)


@pytest.mark.parametrize(
    ("change", "cached"),
    [
        ({"name": "other"}, [True, True, True]),
        ({"validate": {"benchmark": {"iterations": 11}}}, [True, True, True]),
        ({"validate": {"gates": [{"metric": "agreement", "min": 0.5}]}}, [True, True, False]),
        ({"passes": [{"kind": "int8", "calibration": "minmax"}]}, [True, True, False]),
        ({"target": "openvino"}, [True, False, False]),
        ({"data": {"evaluation": {"source": "npz:test.npz", "samples": 90}}}, [True, False, False]),
        ({"data": {"calibration": {"source": "npz:train.npz", "samples": 60}}}, [False, False, False]),
        ({"preprocess": {"kind": "image", "channels": "L", "mean": [0.5]}}, [False, False, False]),
        ({"model": {"args": {"hidden": 32}}}, [False, False, False]),
    ],
)
def test_a_step_depends_on_what_decides_it(
    net: Net, bundle: Path, cache: Path, change: dict[str, Any], cached: list[bool]
) -> None:
    steps = plan(changed(net[1], **change), net[0], cache).steps
    assert [step.cached for step in steps] == cached
