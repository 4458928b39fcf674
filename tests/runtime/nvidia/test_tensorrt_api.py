"""The one file that calls TensorRT, against recorded descriptions of TensorRT 10.0, 10.16, 11.4 and RTX 1.7."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tensorrt_fakes import ANSWERS, RECORDED, Library

from runtime.errors import MissingDependency, RuntimeFailure, UsageError
from runtime.nvidia import tensorrt_api as api

ALL = api.BuildOptions(
    workspace_bytes=2**20,
    builder_optimization_level=5,
    version_compatible=True,
    hardware_compatibility_level="ampere+",
    strip_weights=True,
    allow_weight_streaming=True,
    tf32=False,
)
SHAPES = {"x": ((1, 3), (2, 3), (4, 3))}


def build(library: Library, options: api.BuildOptions) -> list[tuple[str, tuple[object, ...]]]:
    """Every call that a build makes."""
    trt = library.module
    messages = api.Messages(trt)
    builder = trt.Builder(messages.logger)
    api.read_network(trt, builder, messages.logger, Path("model.onnx"))
    config = api.make_config(trt, builder, options)
    api.add_profile(builder, config, SHAPES)
    assert api.use_timing_cache(trt, config, b"", messages) is None
    assert api.timing_cache(config) == b"timed"
    assert api.describe_engine(trt, messages, b"engine") == '{"Layers": []}'
    engine = trt.Runtime(messages.logger).deserialize_cuda_engine(b"engine")
    api.refit(trt, messages, engine, Path("model.onnx"))
    return library.calls


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_every_name_that_is_called_exists_in_every_version(path: Path) -> None:
    library = Library(path)
    options = replace(ALL, compute_capabilities=("8.6", "8.9") if "rtx" in path.stem else ())
    calls = build(library, options)
    flags = {args[0].name for name, args in calls if name == "IBuilderConfig.set_flag"}
    assert flags == {"VERSION_COMPATIBLE", "STRIP_PLAN", "WEIGHT_STREAMING"}
    strongly = 1 << int(library.module.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    assert ("Builder.create_network", (strongly,)) in calls
    assert ("IOptimizationProfile.set_shape", ("x", *SHAPES["x"])) in calls
    kept = [name for name, _ in calls if name == "IBuilderConfig.create_timing_cache"]
    assert bool(kept) == ("rtx" not in path.stem)
    capabilities = [args for name, args in calls if name == "IBuilderConfig.set_compute_capability"]
    assert [(one.name, i) for one, i in capabilities] == ([("SM86", 0), ("SM89", 1)] if "rtx" in path.stem else [])


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        ("BuilderFlag.STRIP_PLAN", "has no BuilderFlag.STRIP_PLAN"),
        ("IBuilderConfig.set_memory_pool_limit", "has no IBuilderConfig.set_memory_pool_limit"),
        ("HardwareCompatibilityLevel.AMPERE_PLUS", "has no HardwareCompatibilityLevel.AMPERE_PLUS"),
    ],
)
def test_a_renamed_name_is_caught(gone: str, said: str) -> None:
    newest = next(path for path in RECORDED if path.stem.startswith("tensorrt-11"))
    with pytest.raises((AttributeError, UsageError), match=said):
        build(Library(newest, without=(gone,)), ALL)


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({"refit_from_file": False}, r"model\.onnx: its weights do not fit the engine; compile it again"),
        (
            {"refit_cuda_engine": False, "get_missing_weights": ["conv.weight"]},
            r"lacks weights after it was refitted: conv\.weight; compile it again",
        ),
    ],
)
def test_weights_that_do_not_fit_an_engine(
    answers: dict[str, object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library(RECORDED[-1])
    for name, answer in answers.items():
        monkeypatch.setitem(ANSWERS, name, answer)
    trt = library.module
    messages = api.Messages(trt)
    engine = trt.Runtime(messages.logger).deserialize_cuda_engine(b"engine")
    with pytest.raises(RuntimeFailure, match=said):
        api.refit(trt, messages, engine, Path("model.onnx"))


class WarningLibrary(Library):
    """One that warns of a timing cache that it cannot read."""

    said: list[tuple[str, str]] | None = None

    def called(self, place: str, name: str, args: tuple[object, ...]) -> object:
        if args == (b"garbage",) and self.said is not None:
            self.said.append(("WARNING", "Failed to deserialize timing cache. Returning an empty timing cache."))
        return super().called(place, name, args)


@pytest.mark.parametrize("how", ["refused", "warned"])
@pytest.mark.parametrize("path", [path for path in RECORDED if "rtx" not in path.stem], ids=lambda path: path.stem)
def test_a_corrupt_timing_cache_is_begun_anew_and_said(path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = WarningLibrary(path)
    trt = library.module
    messages = api.Messages(trt)
    config = trt.Builder(messages.logger).create_builder_config()
    if how == "refused":
        monkeypatch.setitem(ANSWERS, "set_timing_cache", False)
    else:
        library.said = messages.said
    said = api.use_timing_cache(trt, config, b"garbage", messages)
    assert said == "the timing cache could not be read, or is of another GPU or version: begun anew"
    begun = [args for name, args in library.calls if name == "IBuilderConfig.create_timing_cache"]
    assert begun == ([(b"garbage",), (b"",)] if how == "refused" else [(b"garbage",)])


def test_tensorrt_builds_for_the_gpu_that_is_here_alone() -> None:
    library = Library(next(path for path in RECORDED if path.stem.startswith("tensorrt-10.16")))
    with pytest.raises(UsageError, match="builds for the GPU that is here alone; leave it out"):
        build(library, replace(ALL, compute_capabilities=("8.9",)))


def test_a_capability_that_is_not_compiled_for() -> None:
    library = Library(next(path for path in RECORDED if "rtx" in path.stem))
    with pytest.raises(UsageError, match=r"does not compile for 9\.0; known: 7\.5, 8\.0, 8\.6, 8\.9, 12\.0"):
        build(library, replace(ALL, compute_capabilities=("9.0",)))


def test_level_that_an_old_version_lacks() -> None:
    library = Library(next(path for path in RECORDED if path.stem.startswith("tensorrt-10.0")))
    with pytest.raises(UsageError, match=r"10\.0\.1 has no HardwareCompatibilityLevel\.SAME_COMPUTE_CAPABILITY"):
        build(library, replace(ALL, hardware_compatibility_level="same_compute_capability"))


def test_a_library_that_is_not_there_or_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(api.LIBRARIES, "tensorrt", api.Library(("no_such_module",), "tensorrt"))
    with pytest.raises(MissingDependency, match="pip install tensorrt"):
        api.load("tensorrt")
    old = Library(RECORDED[0]).module
    old.__version__ = "8.6.1"  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "no_such_module", old)
    with pytest.raises(RuntimeFailure, match=r"tensorrt 8\.6\.1 is too old; needs 10"):
        api.load("tensorrt")
