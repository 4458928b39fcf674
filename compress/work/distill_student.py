"""The student of `distill` put in the model's place, before it learns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from compress.blocks.sizes import shapes_of
from compress.context import PassContext
from compress.distill.student import start_from
from compress.errors import PassError
from compress.models.load import LoadedModel
from compress.passes.depth import depth_problem
from compress.passes.distill_student import Student
from compress.prune.depth import Skipping, shorten
from compress.work.prune_layers import UNCONFIGURED, removable_blocks


def student_model(
    student: Student, loaded: LoadedModel, sample: Mapping[str, Tensor], seed: int, context: PassContext
) -> LoadedModel:
    """Return the student as it starts: blocks of `loaded` (changed in place), or a new model. PassError.

    `sample`: feeds of one sample, by parameter. The same whenever it is called.
    """
    if not student.separate:
        return _keep_some_blocks(student, loaded, sample, context)
    if context.student is None:
        raise PassError("distill: there is nothing to make a student with: an onnx: source has no torch model")
    made: LoadedModel = context.student(student, seed)
    if made.input_names != loaded.input_names:
        raise PassError(
            f"distill: the student takes {', '.join(made.input_names)}, the teacher {', '.join(loaded.input_names)}; "
            "give one that takes the same"
        )
    if not student.config:
        return made
    assert made.module is not None and loaded.module is not None
    start_from(made.module, loaded.module, student.starts)
    changed = shapes_of(made.module).since(shapes_of(loaded.module))
    return replace(made, shapes=loaded.shapes.then(changed))


def _keep_some_blocks(
    student: Student, loaded: LoadedModel, sample: Mapping[str, Tensor], context: PassContext
) -> LoadedModel:
    module = loaded.module
    assert module is not None
    before, blocks = shapes_of(module), removable_blocks(module, sample)
    stay = student.stay(len(blocks))
    if problem := depth_problem(blocks, stay, len(stay)):
        raise PassError(f"distill: student: {problem}")
    skipping = Skipping(module, [block.name for block in blocks], sample)
    gone = [block.name for number, block in enumerate(blocks) if number not in stay]
    if not shorten(skipping, gone, sample):
        context.log(f"distill: {UNCONFIGURED}")
    return replace(loaded, shapes=loaded.shapes.then(shapes_of(module).since(before)))
