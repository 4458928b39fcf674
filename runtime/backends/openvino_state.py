"""Rewrite a decoder that OpenVINO has read so that it keeps keys and values itself, as OpenVINO GenAI needs it.

What a file has as inputs (past) and outputs (present) becomes state, which stays where the model computes. A further
input `beam_idx`, int32 [batch], says which row of the state each row of a call goes on from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BEAMS = "beam_idx"
"""Which row of the state each row of a call goes on from: OpenVINO GenAI's name."""
READ_STATE, SHARED_ATTENTION = "ReadValue", "GroupQueryAttention"
"""OpenVINO's names of what reads a state, and of ONNX Runtime's own attention."""


def has_operator(model: Any, kind: str) -> bool:
    """Return whether an OpenVINO model has an operator of one kind."""
    return any(operator.get_type_name() == kind for operator in model.get_ops())


def keep_cache(model: Any, pairs: Mapping[str, str], tokens: str) -> None:
    """Make the inputs `pairs` (past -> the output that is its present) a state of an OpenVINO model, in place.

    `tokens`: the input whose first size is the batch. A state that was reset holds no token, for the batch of the call.
    """
    import numpy as np
    import openvino.opset13 as ops
    from openvino._offline_transformations import apply_make_stateful_transformation

    beams = ops.parameter([-1], np.int32, name=BEAMS)
    beams.output(0).set_names({BEAMS})
    axis = ops.constant(0, np.int64)
    for past in pairs:
        port = model.input(past)
        readers = port.get_target_inputs()
        chosen = ops.gather(port, beams, axis)  # [batch, heads, past, size]
        for reader in readers:
            reader.replace_source_output(chosen.output(0))
    model.add_parameters([beams])
    model.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(model, dict(pairs))
    # Free sizes of a state begin at 0, the batch too, and to join that with one row reads beyond its memory (2026.4):
    # every state begins as [batch, heads, 0, size] instead.
    shape = ops.shape_of(model.input(tokens), output_type="i64")
    batch = ops.gather(shape, ops.constant([0], np.int64), axis)
    for operator in model.get_ops():
        if operator.get_type_name() == READ_STATE:
            fixed = [size.get_length() if size.is_static else 0 for size in operator.get_output_partial_shape(0)]
            sizes = ops.concat([batch, *(ops.constant([size], np.int64) for size in fixed[1:])], 0)
            empty = ops.constant(0, dtype=operator.get_output_element_type(0))
            operator.set_arguments([ops.broadcast(empty, sizes)])
    model.validate_nodes_and_infer_types()
