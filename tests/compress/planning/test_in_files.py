"""Which models are exported with their weights left in their files, and when the float graph is run beside them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hosts import Host

from compress.planning.in_files import WHOLE_BYTES, note_missing_float, note_narrow_source, runs_float, stays_in_files

GIB = 2**30


def recipe(*stages: str, memory_gib: float | None = None, steps: Any = "auto", **model: Any) -> Any:
    passes = [SimpleNamespace(stage_on=lambda facts, stage=stage: stage) for stage in stages]
    return SimpleNamespace(
        has_onnx=True,
        passes=passes,
        export=(),
        model=SimpleNamespace(**{"decoder_only": True, "source": "dir:lm", **model}),
        root=Path(),
        validate_=SimpleNamespace(steps=steps),
        limits=SimpleNamespace(memory_gib=memory_gib),
    )


def facts(n_bytes: int = WHOLE_BYTES + 1, source: str = "torch") -> Any:
    return SimpleNamespace(n_bytes=n_bytes, source=source, structure=object())


def test_large_decoders_stay_in_files_where_nothing_needs_them_whole() -> None:
    assert stays_in_files(recipe("blocks", "blocks"), facts())
    for other in (
        (recipe("blocks"), facts(WHOLE_BYTES)),
        (recipe("blocks"), facts(source="onnx")),
        (recipe("blocks", "graph"), facts()),
        (recipe("model", "blocks"), facts()),
        (recipe(), facts()),
        (recipe("blocks", steps=True), facts()),
        (recipe("blocks", decoder_only=False), facts()),
    ):
        assert not stays_in_files(*other)


def test_the_float_graph_is_run_where_it_fits_what_is_allowed_and_what_is_there(host: Host) -> None:
    host.memory_bytes = 20 * GIB
    assert runs_float(recipe("blocks"), facts(5 * GIB))
    assert not runs_float(recipe("blocks", memory_gib=6), facts(5 * GIB))
    assert not runs_float(recipe("blocks", memory_gib=100), facts(14 * GIB))
    assert runs_float(recipe("blocks", memory_gib=0.1), facts(WHOLE_BYTES))  # as ever
    assert note_missing_float(recipe("blocks"), facts(5 * GIB)) is None
    note = note_missing_float(recipe("blocks", memory_gib=6), facts(5 * GIB))
    assert note is not None and "takes about 8.2 GiB of memory, and 6.0 GiB may be taken" in note.text


def test_files_of_sixteen_bits_are_what_a_size_is_told_beside() -> None:
    def tell(float_bytes: int, n_bytes: int = 1) -> str:
        model: Any = SimpleNamespace(source="torch", float_bytes=float_bytes, n_bytes=n_bytes, structure=object())
        note = note_narrow_source(recipe("blocks", memory_gib=6), model)
        return "" if note is None else note.text

    assert tell(2).endswith("hold 16 bits a number: what is 4x smaller than float32 is 2x smaller than these")
    assert tell(4) == "" and tell(2, 5 * GIB) == ""  # without the float graph sizes are against the files


def test_a_file_that_was_unpacked_is_not_what_sizes_are_against(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(bytes(2048))
    note = note_narrow_source(recipe("blocks", source=f"gguf:{tmp_path}/model.gguf"), facts())
    assert note is not None and "float32, to which the file (2.0 KiB) was unpacked" in note.text
