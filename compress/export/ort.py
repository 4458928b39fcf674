"""Write a graph in ONNX Runtime's own format, which builds for phones load, with the list of operators of such a build.

`model.ort` is optimized for Arm: blocked layouts of x86 are left out, and products of signed 8-bit inputs stay (what
`onnxruntime.tools.convert_onnx_models_to_ort --target_platform arm` does). Its tables come in an order of chance: of
17,512 bytes 120 differ from one call to the next. Every other build of ONNX Runtime of this version or a later one
reads it, too. `model.required_operators_and_types.config` goes to ONNX Runtime's build script:
`--minimal_build --include_ops_by_config FILE --enable_reduced_operator_type_support`.
"""

from __future__ import annotations

import io
import logging
import warnings
from contextlib import redirect_stdout
from pathlib import Path

from compress.errors import ExportError
from runtime.backends.onnxruntime_cpu import failures, onnxruntime_library, open_session


def write_ort(graph: Path, folder: Path) -> Path:
    """Write the files of a graph [model.onnx] into `folder`; return the .ort. ExportError where it does not load."""
    from onnxruntime.tools.convert_onnx_models_to_ort import OptimizationStyle, convert_onnx_models_to_ort

    path = folder / f"{graph.stem}.ort"
    refused: tuple[type[Exception], ...] = (*failures(), ValueError)
    logging.getLogger("ort_format_model.utils").setLevel(logging.WARNING)  # it tells each step, on stdout, too
    try:
        with redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # it leaves closing its files to Python
            convert_onnx_models_to_ort(
                graph, folder, [OptimizationStyle.Fixed], target_platform="arm", enable_type_reduction=True
            )
    except refused as error:
        version = onnxruntime_library().__version__
        raise ExportError(f"{graph.name}: ONNX Runtime {version} cannot write its ORT format: {error}") from error
    open_session(path, 1, {}).close()
    return path
