"""A GGUF file as a model's source: unpacked once, into the cache, to the folder that Hugging Face has of a model."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from compress.errors import SourceError
from compress.facts import FLOAT_BYTES
from compress.store.cache import ResultCache, cache_key, default_root
from compress.store.digests import FileDigests
from runtime.processes.isolated import last_line, start_python
from runtime.processes.memory import available_bytes
from runtime.words import size_text

MAGIC = b"GGUF"
PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
COPIES = 1.6
"""Float copies of all weights that unpacking holds: 1.6 were measured with Qwen2.5-Coder 0.5B, of eight bits."""
HELD_BYTES = 1 << 30
"""Of torch and transformers in the process that unpacks: 0.9 GiB beside that model's weights."""
TIMEOUT_S = 4 * 3600
CHILD = "from compress.models.gguf_source import save_unpacked; save_unpacked(*sys.argv[1:])"


def unpack(file: Path) -> Path:
    """Return the folder of a GGUF file's model: config, tokenizer and weights in float32, as transformers reads them.

    It is made once for a file's content and lies in the cache. SourceError for what is no such file, and one that
    transformers cannot read or that there is no room for.
    """
    with _open(file) as opened:
        if opened.read(len(MAGIC)) != MAGIC:
            raise SourceError(f"{file}: is no GGUF file; give one, or another kind of source")
    if PART.search(file.name):
        raise SourceError(f"{file}: is one of several parts; join them: llama-gguf-split --merge FIRST_PART JOINED")
    found = file.stat()
    return _unpack(file.resolve(), found.st_mtime_ns, found.st_size, default_root())


def _open(file: Path) -> Any:
    try:
        return file.open("rb")
    except OSError as error:
        raise SourceError(f"{file}: cannot be read: {error}; give a .gguf file") from error


@lru_cache(maxsize=8)
def _unpack(file: Path, mtime_ns: int, size: int, root: Path) -> Path:
    cache = ResultCache(root)
    key = cache_key("gguf", FileDigests(root).read(file))

    def write(folder: Path) -> dict[str, Any]:
        _check_room(file, folder)
        print(f"unpacking {file.name} ({size_text(size)}), once for this file", file=sys.stderr)
        try:
            done = start_python(CHILD, str(file), str(folder), seconds=TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise SourceError(f"{file}: unpacking took longer than {TIMEOUT_S / 3600:g} h") from error
        if done.returncode != 0:
            ended = f"ended by signal {-done.returncode}" if done.returncode < 0 else last_line(done.stderr)
            raise SourceError(f"{file}: transformers cannot unpack it: {ended}; give the model's own folder instead")
        return {"file": file.name}

    return root / key if cache.has(key) else cache.put(key, write).folder


def _check_room(file: Path, folder: Path) -> None:
    """Raise SourceError where memory or disk have no room for the unpacked weights."""
    n_bytes = FLOAT_BYTES * _count_numbers(file)  # a K type's number is a product that no half holds
    needed, allowed = int(COPIES * n_bytes) + HELD_BYTES, available_bytes()
    way = "give the model's own folder, whose weights stay in their files"
    if needed > allowed:
        raise SourceError(
            f"{file}: unpacking takes {size_text(needed)} of memory, and {size_text(allowed)} are free; {way}"
        )
    if n_bytes > (free := shutil.disk_usage(folder).free):
        raise SourceError(
            f"{file}: it unpacks to {size_text(n_bytes)}, and {size_text(free)} are free in {folder.parent}; make "
            "room, or name another cache: COMPRESS_CACHE"
        )


def _count_numbers(file: Path) -> int:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise SourceError(f"gguf:{file}: needs a package that is not here ({error}); pip install gguf") from error
    try:
        return sum(math.prod(int(size) for size in tensor.shape) for tensor in GGUFReader(file).tensors)
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        raise SourceError(f"{file}: is not whole: {error}; copy or download it again") from error


def save_unpacked(file: str, folder: str) -> None:
    """Write the folder of a GGUF file's model, in this process."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place, name = Path(file).parent, Path(file).name
    AutoTokenizer.from_pretrained(place, gguf_file=name).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(place, gguf_file=name, dtype=torch.float32)
    model.hf_quantizer = None  # type: ignore[assignment]  # else what is saved claims to be quantized
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
