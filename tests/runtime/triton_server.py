"""A stand-in for Triton: reads a repository's configurations with Triton's own schema and runs an ensemble as it would.

The models of the Python backend are its files, loaded as they are; the model between them runs in ONNX Runtime.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnxruntime
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2
from tritonclient.utils import triton_to_np_dtype


class Tensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array


class Request:
    def __init__(self, tensors: Mapping[str, np.ndarray]) -> None:
        self._tensors = [Tensor(name, array) for name, array in tensors.items()]

    def inputs(self) -> list[Tensor]:
        return self._tensors


class Response:
    def __init__(self, tensors: list[Tensor] | None = None, error: Any = None) -> None:
        self.tensors, self.error = tensors or [], error


def python_backend() -> ModuleType:
    """What Triton gives a model of its Python backend to import."""
    module = ModuleType("triton_python_backend_utils")
    module.Tensor, module.InferenceResponse, module.TritonError = Tensor, Response, str  # type: ignore[attr-defined]
    return module


def read_config(folder: Path) -> Any:
    """ParseError where Triton's schema does not know a field or a value."""
    return text_format.Parse((folder / "config.pbtxt").read_text(encoding="utf-8"), model_config_pb2.ModelConfig())


class Server:
    """All models of a repository."""

    def __init__(self, repository: Path) -> None:
        self.repository = repository
        self.configs = {folder.name: read_config(folder) for folder in sorted(repository.iterdir())}
        for name, config in self.configs.items():
            assert config.name == name, "Triton refuses a model whose folder has another name"
            assert (repository / name / "1").is_dir(), "Triton refuses a model without a version"
            assert all(one.dims for one in (*config.input, *config.output)), "Triton refuses empty dims"
            for step in config.ensemble_scheduling.step:
                self._check_step(config, step)
        self.loaded: dict[str, Any] = {}

    def _check_step(self, ensemble: Any, step: Any) -> None:
        """What a step reads has the sizes of what gives it: Triton refuses the ensemble otherwise."""
        given = {one.name: list(one.dims) for one in ensemble.input}
        for other in ensemble.ensemble_scheduling.step:
            made = {one.name: list(one.dims) for one in self.configs[other.model_name].output}
            given |= {value: made[key] for key, value in other.output_map.items()}
        for one in self.configs[step.model_name].input:
            sizes = zip(given[step.input_map[one.name]], one.dims, strict=True)
            assert all(-1 in pair or pair[0] == pair[1] for pair in sizes), f"{one.name} of {step.model_name}"

    def infer(self, name: str, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What a client gets; RuntimeError with what a model answers instead."""
        config = self.configs[name]
        self._check(config, config.input, tensors)
        if config.platform == "ensemble":
            found = self._ensemble(config, dict(tensors))
        elif config.backend == "python":
            found = self._python(name, tensors)
        else:
            found = self._onnx(name, config, tensors)
        self._check(config, config.output, found)
        return found

    def _ensemble(self, config: Any, known: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        for step in config.ensemble_scheduling.step:
            given = {key: known[value] for key, value in step.input_map.items()}
            made = self.infer(step.model_name, given)
            known |= {value: made[key] for key, value in step.output_map.items()}
        return {one.name: known[one.name] for one in config.output}

    def _python(self, name: str, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        if name not in self.loaded:
            file = self.repository / name / "1" / "model.py"
            spec = importlib.util.spec_from_file_location(f"triton_{name}", file)
            assert spec is not None and spec.loader is not None
            sys.modules["triton_python_backend_utils"] = python_backend()
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            self.loaded[name] = module.TritonPythonModel()
            self.loaded[name].initialize({"model_repository": str(self.repository / name), "model_version": "1"})
        (response,) = self.loaded[name].execute([Request(tensors)])
        if response.error is not None:
            raise RuntimeError(response.error)
        return {tensor.name(): tensor.as_numpy() for tensor in response.tensors}

    def _onnx(self, name: str, config: Any, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        assert config.platform == "onnxruntime_onnx"
        session = onnxruntime.InferenceSession(str(self.repository / name / "1" / "model.onnx"))
        names = [one.name for one in session.get_outputs()]
        return dict(zip(names, session.run(names, dict(tensors)), strict=True))

    def _check(self, config: Any, specs: Any, tensors: Mapping[str, np.ndarray]) -> None:
        """Names, types and sizes are those that the configuration names."""
        assert {one.name for one in specs} <= tensors.keys()
        for one in specs:
            array, kind = tensors[one.name], model_config_pb2.DataType.Name(one.data_type)
            shape = array.shape[1:] if config.max_batch_size else array.shape
            wanted = triton_to_np_dtype(kind.removeprefix("TYPE_").replace("STRING", "BYTES"))
            assert array.dtype == wanted, f"{one.name} is {array.dtype}, the configuration says {kind}"
            assert len(shape) == len(one.dims), f"{one.name} has {shape}, the configuration says {list(one.dims)}"
            assert all(dim in (-1, size) for dim, size in zip(one.dims, shape, strict=True))
            assert not config.max_batch_size or len(array) <= config.max_batch_size
