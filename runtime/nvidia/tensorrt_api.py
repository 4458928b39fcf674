"""TensorRT 10, TensorRT 11 and TensorRT for RTX behind one set of functions: what they call differently is here alone.

Networks are strongly typed in all of them: precision is in the ONNX file, and nothing here sets one. TensorRT 11 has no
other networks, no calibrators and no precision flags; TensorRT for RTX compiles ahead of time for several compute
capabilities, without a GPU, and makes the kernels on the machine that runs the engine.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from runtime.errors import MissingDependency, RuntimeFailure, UsageError

Compatibility = Literal["none", "ampere+", "same_compute_capability"]
Shapes = Mapping[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]
"""One profile: input -> (min, opt, max) shape."""
ERRORS = ("ERROR", "INTERNAL_ERROR")
OLDEST = 10
"""The first major version of TensorRT whose API this is."""


@dataclass(frozen=True)
class Library:
    """A TensorRT: the Python modules that it comes as, tried in this order, and what pip calls it."""

    modules: tuple[str, ...]
    package: str


LIBRARIES = {
    "tensorrt": Library(("tensorrt",), "tensorrt"),
    "tensorrt-rtx": Library(("tensorrt_rtx", "tensorrt_rtx_bindings"), "tensorrt-rtx-cu13-bindings"),
}
_COMPATIBILITY = {
    "none": "NONE",
    "ampere+": "AMPERE_PLUS",
    "same_compute_capability": "SAME_COMPUTE_CAPABILITY",
}


@dataclass(frozen=True)
class BuildOptions:
    """How an engine is built, in trtexec's words.

    `workspace_bytes`: the most scratch memory; None: the library's default. `compute_capabilities`: such as ("8.6",
    "8.9"), for TensorRT for RTX alone; empty: of the GPU that is here. `timing_cache`: as an earlier build left it;
    b"" begins one; None: none is kept.
    """

    workspace_bytes: int | None = None
    builder_optimization_level: int = 3
    version_compatible: bool = False
    hardware_compatibility_level: Compatibility = "none"
    strip_weights: bool = False
    allow_weight_streaming: bool = False
    tf32: bool = True
    compute_capabilities: tuple[str, ...] = ()
    timing_cache: bytes | None = None

    def with_cache(self, data: bytes | None) -> BuildOptions:
        return replace(self, timing_cache=data)


def load(runtime: str) -> Any:
    """Return the library's module. MissingDependency where it is not installed; RuntimeFailure where it is too old.

    It may crash the process where its libraries or the driver are broken: ask in a process of its own first.
    """
    library = LIBRARIES[runtime]
    for name in library.modules:
        try:
            trt = importlib.import_module(name)
        except ImportError:
            continue
        if runtime == "tensorrt" and major(trt) < OLDEST:
            raise RuntimeFailure(f"tensorrt {trt.__version__} is too old; needs {OLDEST}: pip install -U tensorrt")
        return trt
    raise MissingDependency(library.package, runtime)


def major(trt: Any) -> int:
    """Return the major number of the library's version."""
    return int(str(trt.__version__).partition(".")[0])


def list_capabilities(trt: Any) -> tuple[str, ...]:
    """Return compute capabilities that engines can be compiled for without the GPU; empty: only for the one here."""
    names = [name for name in _list_members(trt, "ComputeCapability") if name.startswith("SM")]
    return tuple(f"{name[2:-1]}.{name[-1]}" for name in sorted(names, key=lambda name: int(name[2:])))


class Messages:
    """What a library said while it worked: (severity, text), or of that the errors. `logger` is what it is given."""

    def __init__(self, trt: Any, errors_only: bool = False) -> None:
        said: list[tuple[str, str]] = []

        class Logger(trt.ILogger):
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, text: str) -> None:
                if not errors_only or severity.name in ERRORS:
                    said.append((severity.name, text))

        self.said, self.logger = said, Logger()

    def errors(self) -> list[str]:
        """Return the texts of errors alone."""
        return [text for severity, text in self.said if severity in ERRORS]


def read_network(trt: Any, builder: Any, logger: Any, path: Path) -> Any:
    """Read the strongly typed network of an ONNX file. RuntimeFailure with what the parser says, node by node."""
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(path)):
        errors = [_format_error(parser, i) for i in range(parser.num_errors)]
        raise RuntimeFailure([f"{path}: {trt.__name__} {trt.__version__} cannot take it: {text}" for text in errors])
    return network


def make_config(trt: Any, builder: Any, options: BuildOptions) -> Any:
    """Make the builder's configuration. UsageError for an option that this library does not have."""
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.builder_optimization_level = options.builder_optimization_level
    if options.workspace_bytes is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_bytes)
    for wanted, flag in (
        (options.version_compatible, "VERSION_COMPATIBLE"),
        (options.strip_weights, "STRIP_PLAN"),
        (options.allow_weight_streaming, "WEIGHT_STREAMING"),
    ):
        if wanted:
            config.set_flag(_find_member(trt, "BuilderFlag", flag))
    if not options.tf32:
        config.clear_flag(trt.BuilderFlag.TF32)
    if options.hardware_compatibility_level != "none":
        level = _COMPATIBILITY[options.hardware_compatibility_level]
        config.hardware_compatibility_level = _find_member(trt, "HardwareCompatibilityLevel", level)
    _set_capabilities(trt, config, options.compute_capabilities)
    return config


def _set_capabilities(trt: Any, config: Any, wanted: Sequence[str]) -> None:
    known = list_capabilities(trt)
    if not wanted:
        return
    if not known:
        raise UsageError(f"compute_capabilities: {trt.__name__} builds for the GPU that is here alone; leave it out")
    unknown = [capability for capability in wanted if capability not in known]
    if unknown:
        raise UsageError(
            f"compute_capabilities: {trt.__name__} {trt.__version__} does not compile for {', '.join(unknown)}; known: "
            f"{', '.join(known)}"
        )
    config.num_compute_capabilities = len(wanted)
    for index, capability in enumerate(wanted):
        config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{capability.replace('.', '')}"), index)


def add_profile(builder: Any, config: Any, shapes: Shapes) -> None:
    """Add one more optimization profile. RuntimeFailure where the library refuses it."""
    profile = builder.create_optimization_profile()
    for name, (least, usual, most) in shapes.items():
        profile.set_shape(name, least, usual, most)
    if config.add_optimization_profile(profile) < 0:
        raise RuntimeFailure(f"profile {dict(shapes)}: refused; every free size of every input needs min <= opt <= max")


def use_timing_cache(trt: Any, config: Any, data: bytes | None, messages: Messages) -> str | None:
    """Begin with what earlier builds timed; return what to tell the user where it cannot be read and is begun anew.

    The library raises nothing for bytes that it cannot read: it warns, and gives an empty cache. TensorRT for RTX times
    nothing ahead of time, and has none.
    """
    if data is None or list_capabilities(trt):
        return None
    before = len(messages.said)
    cache = config.create_timing_cache(data)
    attached = cache is not None and config.set_timing_cache(cache, False)
    broken = any("timing cache" in text.lower() for severity, text in messages.said[before:] if severity != "VERBOSE")
    if attached and not broken:
        return None
    if not attached:
        config.set_timing_cache(config.create_timing_cache(b""), False)
    return "the timing cache could not be read, or is of another GPU or version: begun anew"


def timing_cache(config: Any) -> bytes | None:
    """Return what the build timed, for the next one."""
    cache = config.get_timing_cache()
    return None if cache is None else bytes(memoryview(cache.serialize()))


def load_engine(trt: Any, messages: Messages, data: bytes, host_code: bool = False) -> Any:
    """Load the engine; None where that cannot be done, and `messages` says why.

    `host_code`: it may run code of its own on the CPU, as version-compatible ones do.
    """
    loader = trt.Runtime(messages.logger)
    if host_code:
        loader.engine_host_code_allowed = True
    return loader.deserialize_cuda_engine(data)


def stream_weights(engine: Any, budget_bytes: int) -> None:
    """Let no more than so many bytes of weights be on the GPU at a time; to be called before a context is made.

    UsageError for an engine that was built without allow_weight_streaming, or more than it has. Named anew in TensorRT
    10.1.
    """
    name = "weight_streaming_budget_v2" if hasattr(engine, "weight_streaming_budget_v2") else "weight_streaming_budget"
    most = int(engine.streamable_weights_size)
    if not 0 <= budget_bytes <= most:
        raise UsageError(
            f"weight_streaming_budget: {budget_bytes} bytes, and the engine can stream {most}; it streams what it was "
            "built for with allow_weight_streaming"
        )
    setattr(engine, name, budget_bytes)


def describe_engine(trt: Any, messages: Messages, data: bytes, host_code: bool = False) -> str | None:
    """Return what the engine inspector says of every layer, JSON; None where the engine cannot load here: no GPU."""
    engine = load_engine(trt, messages, data, host_code)
    if engine is None:
        return None
    text: str = engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON)
    return text


def refit(trt: Any, messages: Messages, engine: Any, path: Path) -> None:
    """Put the weights of an ONNX file into an engine that was built without them, or with others. RuntimeFailure."""
    refitter = trt.Refitter(engine, messages.logger)
    parser = trt.OnnxParserRefitter(refitter, messages.logger)
    if not parser.refit_from_file(str(path)):
        errors = [
            f"{path}: its weights do not fit the engine: {_format_error(parser, i)}" for i in range(parser.num_errors)
        ]
        raise RuntimeFailure(errors or [f"{path}: its weights do not fit the engine; compile it again"])
    if not refitter.refit_cuda_engine():
        missing = ", ".join(refitter.get_missing_weights()) or "; ".join(messages.errors()) or "no reason given"
        raise RuntimeFailure(f"{path}: the engine lacks weights after it was refitted: {missing}; compile it again")


def _format_error(parser: Any, index: int) -> str:
    return str(parser.get_error(index).desc())


def _list_members(trt: Any, enum: str) -> tuple[str, ...]:
    return tuple(getattr(getattr(trt, enum, None), "__members__", ()))


def _find_member(trt: Any, enum: str, name: str) -> Any:
    if name not in _list_members(trt, enum):
        raise UsageError(f"{trt.__name__} {trt.__version__} has no {enum}.{name}; upgrade it, or leave the option out")
    return getattr(getattr(trt, enum), name)
