"""Every fault at every point: one call on a file fails, and nothing is lost, nothing of others touched, all is said."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import ERRORS, Faults, failing
from fuzzing import FULL, SEED, assert_done_or_refused
from workshop import Workshop, bundle_files, open_workshop

import runtime
from runtime.report.validate import validate
from runtime.tasks.manifest import verify

SHARE = 0.005
"""Of FUZZ_CASES, for each scenario: FUZZ_CASES=1000000 is every error at every point (a case takes half a second)."""
PARTS = 8 if FULL else 1
"""Pieces of a scenario's cases, which two processes share."""


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    with open_workshop(tmp_path_factory.mktemp("faults")) as made:
        yield made


@dataclass(frozen=True)
class Scenario:
    """`run`: what is done while the fault is on. `replaces`: whether it may leave the new bundle under the name."""

    warm: bool
    replaces: bool
    run: Callable[[Workshop], Any]
    quick: int


def predict(shop: Workshop) -> Any:
    with runtime.open_bundle(shop.bundle) as bundle:
        return bundle.predict({"x": np.zeros((2, 16), np.float32)})


SCENARIOS = {
    "apply": Scenario(False, True, Workshop.apply, 8),
    "cached apply": Scenario(True, True, Workshop.apply, 8),
    "validate": Scenario(True, False, lambda shop: validate(shop.bundle), 4),
    "predict": Scenario(True, False, predict, 4),
    "verify": Scenario(True, False, lambda shop: verify(shop.bundle), 4),
}
Case = tuple[int, int, bool]
"""Number of the call that fails, error, whether it lasts."""


def cases(shop: Workshop, scenario: Scenario, name: str, part: int) -> list[Case]:
    """All that there are, or a seeded sample; one part of them."""
    shop.begin(scenario.warm)
    with failing(Faults(shop.disks)) as seen:
        scenario.run(shop)
    every = [
        (n, number, lasting)
        for n, call in enumerate(seen.calls)
        for number in ERRORS
        if call.may_give(number)
        for lasting in (False, True)
    ]
    wanted = round(FULL * SHARE) if FULL else scenario.quick
    rng = random.Random(f"{name} {SEED}")
    return sorted(rng.sample(every, min(wanted, len(every))))[part::PARTS]


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_fault_at_every_point(shop: Workshop, name: str, part: int) -> None:
    scenario = SCENARIOS[name]
    for case in cases(shop, scenario, name, part):
        try:
            check_case(shop, scenario, name, *case)
        except BaseException as failure:
            failure.add_note(f"{name}: call {case[0]}, {errno.errorcode[case[1]]}, lasting: {case[2]}")
            raise


def check_case(shop: Workshop, scenario: Scenario, name: str, at: int, number: int, lasting: bool) -> None:
    shop.begin(scenario.warm)
    faults = Faults(shop.disks, at, number, lasting)
    error: list[BaseException] = []

    def run() -> Any:
        with failing(faults):
            try:
                return scenario.run(shop) or True
            except BaseException as failure:
                error.append(failure)
                raise

    done = assert_done_or_refused(f"fault in {name}", run) is not None
    if error:
        assert str(faults.broken) in str(error[0]), f"{faults.calls[at]}: {faults.broken} is not named in: {error[0]}"
    shop.check_foreign()
    check_bundle(shop, scenario, done, lasting)
    if scenario.replaces:
        shop.apply()
        assert bundle_files(shop.bundle) == shop.new
        shop.check_foreign()
        left = {path.name for path in (shop.root / "out").iterdir() if not path.name.endswith(".compress.log")}
        assert left == {"b", "notes.txt", ".b.previous", ".b.lock"}


def check_bundle(shop: Workshop, scenario: Scenario, done: bool, lasting: bool) -> None:
    """The old bundle stands there whole, or the new one; or, where no name can be given any more, the old one waits."""
    stands = shop.bundle if shop.bundle.exists() or not lasting else shop.root / "out/.b.partial/old"
    files = bundle_files(stands)
    assert files == shop.new or (files == shop.old and not (done and scenario.replaces))
    verify(stands)


def test_the_layer_sees_what_a_run_does(shop: Workshop) -> None:
    """Counts of calls, so that a scenario that bypasses the layer is noticed."""
    shop.begin(warm=False)
    with failing(Faults(shop.disks)) as seen:
        shop.apply()
    kinds = {(call.name, Path(call.path).relative_to(shop.root).parts[0]) for call in seen.calls}
    for name, place in [("open", "src"), ("read", "src"), ("rename", "out"), ("rename", "cache"), ("fsync", "out")]:
        assert (name, place) in kinds
    assert {("write", "tmp"), ("unlink", "tmp"), ("fsync", "cache"), ("mkdir", "out"), ("mkdir", "cache")} <= kinds
