"""onnxruntime-genai's model builder: FOLDER OUT [KEY=VALUE...]. A transformers folder in, its int4 graph for CPUs out.

As `python -m onnxruntime_genai.models.builder` with these extra options.
"""

from __future__ import annotations

import runpy
import sys
import tempfile

BUILDER = "onnxruntime_genai.models.builder"


def main(folder: str, out: str, *options: str) -> None:
    extra = ["--extra_options", *options] if options else []
    with tempfile.TemporaryDirectory() as cache:
        sys.argv = [BUILDER, "-i", folder, "-o", out, "-p", "int4", "-e", "cpu", "-c", cache, *extra]
        runpy.run_module(BUILDER, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
