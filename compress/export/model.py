"""The float graph of a model: of one that is called, of a decoder, or of an encoder and its decoder."""

from __future__ import annotations

import onnx_ir as ir

from compress.data.sight import Sight
from compress.errors import ExportError
from compress.export.decoder import export_decoder
from compress.export.encoder_decoder import export_encoder_decoder
from compress.export.onnx import export_float
from compress.graph.run import Feeds
from compress.models.load import OnnxModel, TorchModel
from runtime.tasks import find_task


def export_model(
    loaded: TorchModel | OnnxModel, example: Feeds, opset: int, sight: Sight | None = None, repeat: bool = True
) -> ir.Model:
    """Export a model as its task has it, as a float32 graph; `example`: a batch of its inputs. Raises ExportError.

    `sight`, `repeat`: as of `export_decoder`.
    """
    task = find_task(loaded.task)
    if task.unit == "call":
        return export_float(loaded, example, opset)
    if isinstance(loaded, OnnxModel):
        what = "a language model" if task.decoder_only else "an encoder-decoder"
        raise ExportError(f"{what} is exported from torch, and an onnx: source is none")
    module = getattr(loaded.module, "wrapped", loaded.module)
    if task.decoder_only:
        return export_decoder(module, opset, repeat=repeat, sight=sight)
    return export_encoder_decoder(module, example, opset)
