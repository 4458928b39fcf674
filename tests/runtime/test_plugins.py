"""What tables take from entry points, and every way in which they refuse it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from compress.formats.targets import accept_target
from compress.passes import KINDS, accept_pass
from runtime import plugins
from runtime.backends import BACKENDS, Backend
from runtime.errors import PluginError
from runtime.metrics import MEASURED, Metric
from runtime.plugins import BACKEND_GROUP, METRIC_GROUP, PASS_GROUP, Plugin, PluginTable, check_entry, find_plugins
from runtime.tasks.metrics import METRICS

METRIC = """
from runtime.tasks.metrics import METRICS
from dataclasses import replace
ONE = replace(METRICS["top1"], name="one")
"""
PASS = """
from typing import ClassVar, Literal
from compress.facts import PassPlan
from compress.passes import Pass
class Idle(Pass):
    work: ClassVar[str] = "mine:work"
    kind: Literal["idle"] = "idle"
    def check(self, facts, target): return PassPlan(facts)
class Lazy(Idle):
    work: ClassVar[str] = ""
class Blind(Pass):
    work: ClassVar[str] = "mine:work"
    kind: Literal["idle"] = "idle"
"""
BACKEND = """
from dataclasses import replace
from runtime.backends import BACKENDS
GOOD = replace(BACKENDS["onnxruntime-cpu"], name="mine", planned_as="openvino")
LOST = replace(GOOD, planned_as="abacus")
"""
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install distributions for one test: a group, its entry points, the module `mine`, the distribution's name."""

    def lay(group: str, points: str, code: str = "", name: str = "mine-kit") -> None:
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir(exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[{group}]\n{points}\n")
        (tmp_path / "mine.py").write_text(code)
        plugins._read_entry_points.cache_clear()

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.setattr(plugins, "_LOADED", [])
    yield lay
    sys.modules.pop("mine", None)
    plugins._read_entry_points.cache_clear()


def metrics() -> PluginTable[Metric]:
    return PluginTable(METRIC_GROUP, METRICS.own, partial(check_entry, kind=Metric), taken=MEASURED)


def test_a_table_has_its_own_first_and_then_those_of_others(install: Install) -> None:
    install(METRIC_GROUP, "one = mine:ONE", METRIC)
    table = metrics()
    assert [*table] == [*METRICS.own, "one"]
    assert len(table) == len(METRICS.own) + 1
    assert plugins.plugin_versions() == {}
    assert table["one"].name == "one"
    assert table["one"] is table["one"]
    assert plugins.plugin_versions() == {"mine-kit": "1.0"}
    assert "two" not in table
    with pytest.raises(KeyError):
        table["two"]


@pytest.mark.parametrize(
    ("points", "problem"),
    [
        ("top1 = mine:ONE", "the name is taken by what is built in"),
        ("latency_p50 = mine:ONE", "the name is taken by what is built in"),
        ("two = mine:ONE", "it calls itself 'one', and must have the name of its entry point"),
        ("one = mine:METRICS", "it is a PluginTable, and must be a runtime.metrics.base.Metric"),
        ("one = mine:TWO", "importing mine:TWO ends in AttributeError: module 'mine' has no attribute 'TWO'"),
        ("one = mine", "'mine' is not of the form package.module:attribute"),
        ("one = yours:ONE", "importing yours:ONE ends in ModuleNotFoundError: No module named 'yours'"),
    ],
)
def test_metrics_that_are_refused(install: Install, points: str, problem: str) -> None:
    install(METRIC_GROUP, points, METRIC)
    table, name = metrics(), points.partition(" ")[0]
    assert table["top1"] is METRICS["top1"]
    with pytest.raises(PluginError) as caught:
        dict(table)
    path = points.partition("= ")[2]
    assert str(caught.value) == (
        f"plug-in '{name}' of runtime.metrics, {path} in mine-kit 1.0: {problem}; mend it, or remove it: pip uninstall "
        "mine-kit"
    )


def test_two_distributions_with_one_name(install: Install) -> None:
    install(METRIC_GROUP, "one = mine:ONE", METRIC)
    install(METRIC_GROUP, "one = mine:ONE", METRIC, name="other-kit")
    with pytest.raises(PluginError, match=r"taken by the plug-in 'one' of .* in (mine|other)-kit 1\.0; mend"):
        list(metrics())


def test_entry_points_that_cannot_be_read(install: Install) -> None:
    install(METRIC_GROUP, "one", METRIC)
    with pytest.raises(PluginError, match=r"mine-kit 1\.0: its entry_points.txt cannot be read: "):
        list(metrics())


@pytest.mark.parametrize(
    ("points", "problem"),
    [
        ("idle = mine:PassPlan", "it is no class that derives from compress.passes.Pass"),
        ("gptq = mine:Idle", "the name is taken by what is built in"),
        ("busy = mine:Idle", r"it needs the field kind: Literal\['busy'\] = 'busy', as its entry point is called"),
        ("idle = mine:Lazy", "it does not say what does its work"),
        ("idle = mine:Blind", "it has no check"),
    ],
)
def test_passes_that_are_refused(install: Install, points: str, problem: str) -> None:
    install(PASS_GROUP, points, PASS)
    with pytest.raises(PluginError, match=problem):
        dict(PluginTable(PASS_GROUP, KINDS.own, accept_pass))


def test_a_backend_from_outside_is_a_target_as_the_one_it_names(install: Install) -> None:
    install(BACKEND_GROUP, "mine = mine:GOOD", BACKEND)
    assert PluginTable(BACKEND_GROUP, BACKENDS.own, partial(check_entry, kind=Backend))["mine"].planned_as == "openvino"
    target = PluginTable(BACKEND_GROUP, {}, accept_target)["mine"]
    assert (target.name, target.variant, target.reads) == ("mine", "u8s8", "onnx")


def test_a_backend_that_says_no_target_is_none(install: Install) -> None:
    install(BACKEND_GROUP, "mine = mine:LOST", BACKEND)
    with pytest.raises(PluginError, match="planned_as is 'abacus', and must be a target: one of onnxruntime-cpu, open"):
        PluginTable(BACKEND_GROUP, {}, accept_target)["mine"]


def test_the_record_of_a_plugin_changes_with_its_code(install: Install) -> None:
    def read() -> dict[str, str]:
        (plugin,) = (plugin for plugin in find_plugins(METRIC_GROUP) if plugin.distribution == "mine-kit")
        assert isinstance(plugin, Plugin)
        return plugin.to_record()

    install(METRIC_GROUP, "one = mine:ONE", METRIC)
    before = read()
    assert before == read()
    install(METRIC_GROUP, "one = mine:ONE", METRIC + "# another\n")
    assert {name: value for name, value in read().items() if name != "code"} == {
        "distribution": "mine-kit",
        "version": "1.0",
    }
    assert read()["code"] != before["code"]
