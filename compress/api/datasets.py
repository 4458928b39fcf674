"""Data that a program holds, written into a file that a recipe can name: loaders, data sets, arrays, texts."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from compress.data.columns import USUAL_NAMES
from compress.data.find_sets import DataGiven
from compress.data.live import DrawRows, hold_draws, seeded
from compress.data.table import hide_bars
from compress.errors import SourceError
from runtime.bundle.files import sha256_of, write_whole

LABEL = "label"
LABELS = (*USUAL_NAMES[LABEL], "targets", "y")
"""What mappings call the label."""
TRIED = 64
"""Samples drawn twice to see whether they change: a flip of each of 64 with probability 0.1 is missed once in 850."""
WAY_OUT = "say which is which by transform_fn=lambda item: (inputs, label)"
NO_BOX = -1.0
"""The class of the rows that fill up a sample's boxes, as arrays of boxes are read."""
Transform = Callable[[Any], Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Reads:
    """What a model reads. `names`: of the inputs that it must be given, in its order; (): its files say.

    `call`: calls the model with a batch of each input, and raises what it raises; None: it cannot be tried.
    """

    names: tuple[str, ...] = ()
    call: Callable[[Sequence[np.ndarray]], object] | None = None


def write_set(
    dataset: Any,
    stem: Path,
    argument: str,
    reads: Reads,
    transform_fn: Transform | None = None,
    most: int | None = None,
    learned: bool = False,
) -> DataGiven:
    """Return a set as recipes have it; of objects it is written to `<stem>.npz`, or .parquet.

    `dataset`: a DataLoader, a data set (torch's or `datasets`'), a mapping of columns, a list of texts, conversations,
    images, mappings or tuples, a function that yields samples or batches. A path, a hub id and a recipe's own set stay
    as they are. `argument`: what the caller calls it. `transform_fn`: makes (inputs, label), or a mapping, of an item.
    `most`: samples that are read, drawn where they can be: what stands in order, class by class, calibrates badly.
    `learned`: it is trained on: where samples of images or arrays are drawn at random, as augmentation does, the set
    says `redraw`, and each is drawn anew whenever it is learned from (see `compress.data.live`).
    SourceError: no samples, or inputs and label cannot be told apart.
    """
    if isinstance(dataset, str | Path):
        return str(dataset)
    if isinstance(dataset, Mapping) and "source" in dataset:
        return dataset
    stem.parent.mkdir(parents=True, exist_ok=True)
    if hasattr(dataset, "to_parquet") and hasattr(dataset, "features"):  # of `datasets`, with the names of its classes
        return _write_parquet(dataset.select(_draw(len(dataset), most)), stem)
    if isinstance(dataset, Mapping):
        arrays = {LABEL if name in LABELS else str(name): _to_array(values) for name, values in dataset.items()}
        return _write_columns({name: values[_draw(len(values), most)] for name, values in arrays.items()}, stem)
    read = partial(_read_columns, argument=argument, transform_fn=transform_fn)
    n = _count_places(dataset) if learned else None
    if n is None:
        return _write_columns(read(_thin_out(dataset, most), reads=reads, most=most), stem)
    with seeded(0):  # so that the file is the same again
        columns = read(_take(dataset, range(n), workers=True), reads=reads)

    def draw(rows: np.ndarray) -> dict[str, Any]:
        return read(_take(dataset, rows.tolist()), reads=replace(reads, call=None))

    given = _write_columns(columns, stem)
    if not _draws_at_random(draw, columns):
        return given
    digest = sha256_of(Path(given["source"].partition(":")[2]))
    name = f"{type(getattr(dataset, 'dataset', dataset)).__name__}-{digest[:12]}"
    hold_draws(name, draw)
    return {**given, "redraw": name}


def _read_columns(
    dataset: Any, *, argument: str, reads: Reads, transform_fn: Transform | None, most: int | None = None
) -> dict[str, Any]:
    rows = list(itertools.islice(_iter_rows(dataset, argument, reads, transform_fn), most))
    if not rows:
        raise SourceError(f"{argument}: gives no samples; give a generator as the function that makes it")
    names = rows[0].keys()
    if other := next((number for number, row in enumerate(rows) if row.keys() != names), None):
        raise SourceError(f"{argument}: sample {other} has {', '.join(rows[other])}, the first has {', '.join(names)}")
    return {name: _stack([row[name] for row in rows], name, argument) for name in names}


def _draws_at_random(draw: DrawRows, columns: Mapping[str, Any]) -> bool:
    """Return whether inputs that are arrays are others when they are drawn again."""
    inputs = {name: values for name, values in columns.items() if name != LABEL}
    n = min(TRIED, len(next(iter(inputs.values()))))
    if not all(isinstance(values[0], np.ndarray | np.generic) for values in inputs.values()):
        return False
    with seeded(1):
        again = draw(np.arange(n))
    return any(not np.array_equal(inputs[name][place], again[name][place]) for name in inputs for place in range(n))


def _draw(n: int, most: int | None) -> list[int]:
    """Draw at most so many of `n` places, always the same ones, in their order."""
    if most is None or most >= n:
        return list(range(n))
    return sorted(np.random.default_rng(0).permutation(n)[:most].tolist())


def _thin_out(dataset: Any, most: int | None) -> Any:
    """Return a data set, or a loader that keeps its order, with a part of its samples alone; any other as it is."""
    from torch.utils.data import DataLoader, SequentialSampler

    n = _count_places(dataset)
    if n is None or (isinstance(dataset, DataLoader) and not isinstance(dataset.sampler, SequentialSampler)):
        return dataset
    return _take(dataset, _draw(n, most))


def _count_places(dataset: Any) -> int | None:
    """Return how many samples a data set has, or that of a loader which gives each once; None where that is unknown."""
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

    if not isinstance(dataset, DataLoader):
        return len(dataset) if _has_places(dataset) else None
    sampler: Any = dataset.sampler
    own_batches = type(dataset.batch_sampler) not in (BatchSampler, type(None))
    once = isinstance(sampler, SequentialSampler) or (isinstance(sampler, RandomSampler) and not sampler.replacement)
    whole: Any = dataset.dataset
    if not once or own_batches or not _has_places(whole):
        return None
    return len(whole) if len(whole) == len(sampler) else None


def _take(dataset: Any, places: Sequence[int], workers: bool = False) -> Any:
    """Return the samples at these places of a data set, or of a loader, which makes its batches of them.

    `workers`: by the loader's processes, if it has any; a few samples come sooner without.
    """
    from torch.utils.data import DataLoader, Subset

    if not isinstance(dataset, DataLoader):
        return Subset(dataset, places)
    return DataLoader(
        Subset(dataset.dataset, places),
        dataset.batch_size,
        collate_fn=dataset.collate_fn,
        num_workers=dataset.num_workers if workers else 0,
        worker_init_fn=dataset.worker_init_fn,
    )


def _has_places(dataset: Any) -> bool:
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")


def _iter_rows(dataset: Any, argument: str, reads: Reads, transform_fn: Transform | None) -> Iterator[Row]:
    """Yield the samples, each as a mapping of its columns."""
    batched = _yields_batches(dataset)
    for number, item in enumerate(_iter_items(dataset, argument)):
        row = _name_values(item if transform_fn is None else transform_fn(item), argument, reads)
        if number == 0:
            batched = _try_first(row, argument, reads, batched)
        yield from _split_batch(row, argument) if batched else (row,)


def _yields_batches(dataset: Any) -> bool | None:
    """Return whether a data set yields batches; None: that is to be found out."""
    from torch.utils.data import DataLoader

    if isinstance(dataset, DataLoader):
        return dataset.batch_sampler is not None
    return None if callable(dataset) and not hasattr(dataset, "__getitem__") else False


def _iter_items(dataset: Any, argument: str) -> Iterator[Any]:
    if _has_places(dataset) and not hasattr(dataset, "__iter__"):
        yield from (dataset[place] for place in range(len(dataset)))  # as torch's data sets are
        return
    items = dataset() if callable(dataset) and not hasattr(dataset, "__iter__") else dataset
    if not isinstance(items, Iterable):
        raise SourceError(
            f"{argument}: a {type(dataset).__name__} is no data; give a DataLoader, a data set, arrays by name, a "
            "list, or a function that yields samples"
        )
    yield from items


def _name_values(item: Any, argument: str, reads: Reads) -> Row:
    """Return an item's inputs under their names, and its label. SourceError where they cannot be told apart."""
    if isinstance(item, str):
        return {"text": item}
    if _is_image(item):
        return {"image": np.asarray(item)}
    if isinstance(item, Mapping):
        return _name_mapping(item, argument, reads)
    if isinstance(item, list) and item and isinstance(item[0], Mapping) and "content" in item[0]:
        return {"messages": item}
    leaves = list(_flatten(item))
    if not reads.names:
        return _name_by_kind(leaves, argument)
    if len(leaves) not in (len(reads.names), len(reads.names) + 1):
        raise SourceError(
            f"{argument}: an item has {len(leaves)} parts, and the model reads {', '.join(reads.names)}; {WAY_OUT}"
        )
    row = {name: _to_array(value) for name, value in zip(reads.names, leaves, strict=False)}
    return row | ({LABEL: _to_label(leaves[-1])} if len(leaves) > len(reads.names) else {})


def _name_mapping(item: Mapping[str, Any], argument: str, reads: Reads) -> Row:
    if missing := [name for name in reads.names if name not in item]:
        raise SourceError(
            f"{argument}: the model reads {', '.join(reads.names)}, and an item has {', '.join(map(str, item))}, "
            f"without {', '.join(missing)}; {WAY_OUT}"
        )
    label = next((name for name in LABELS if name in item and name not in reads.names), None)
    kept = {name: _to_value(item[name]) for name in reads.names or item if name != label}
    return kept | ({} if label is None else {LABEL: _to_label(item[label])})


def _name_by_kind(leaves: Sequence[Any], argument: str) -> Row:
    """Name the parts of an item for a model whose files say what it reads: texts, an image, and a label behind them."""
    row: Row = {}
    for place, leaf in enumerate(leaves):
        kind = "image" if _is_image(leaf) else "text" if isinstance(leaf, str) else LABEL
        name = "text_pair" if kind == "text" and "text" in row else kind
        if name in row or (kind == LABEL and place != len(leaves) - 1):
            raise SourceError(f"{argument}: an item has {len(leaves)} parts, and what they are is not known; {WAY_OUT}")
        row[name] = _to_label(leaf) if kind == LABEL else _to_value(leaf)
    return row


def _flatten(item: Any) -> Iterator[Any]:
    if isinstance(item, tuple | list) and not (item and isinstance(item[0], Mapping | int | float)):
        for part in item:
            yield from _flatten(part)
    else:
        yield item


def _try_first(row: Row, argument: str, reads: Reads, batched: bool | None) -> bool:
    """Call the model with the first item; return whether it is a batch. SourceError where the model cannot read it."""
    if batched is None:
        batched = _is_batch(row, argument)
    if reads.call is None or not reads.names:
        return batched
    inputs = [row[name] if batched else row[name][None] for name in reads.names]
    try:
        reads.call(inputs)
    except Exception as error:  # whatever a user's own code raises
        shown = ", ".join(f"{name} {list(x.shape)} {x.dtype}" for name, x in zip(reads.names, inputs, strict=True))
        raise SourceError(
            f"{argument}: the model cannot be called with its first item, {shown}: {type(error).__name__}: {error}; "
            "give what forward reads, by transform_fn"
        ) from error
    return batched


def _is_batch(row: Row, argument: str) -> bool:
    """Return whether what a function yields is a batch: its label is one for each row of the input."""
    first = next(iter(row.values()))
    if not isinstance(first, np.ndarray) or not first.ndim:
        return False
    if LABEL not in row:
        raise SourceError(
            f"{argument}: whether it yields samples or batches cannot be told; give a list or a DataLoader"
        )
    label = row[LABEL]
    return isinstance(label, np.ndarray) and label.ndim > 0 and len(label) == len(first)


def _split_batch(row: Row, argument: str) -> Iterator[Row]:
    sizes = {name: len(values) for name, values in row.items()}
    if len(set(sizes.values())) > 1:
        raise SourceError(
            f"{argument}: a batch has {', '.join(f'{n} of {name}' for name, n in sizes.items())}; {WAY_OUT}"
        )
    for place in range(next(iter(sizes.values()))):
        yield {name: values[place] for name, values in row.items()}


def _to_value(value: Any) -> Any:
    """Return a value as a column holds it: arrays of what has a shape, texts and lists as they are."""
    if isinstance(value, str | bytes | list | Mapping):
        return value
    return _to_array(value)


def _to_array(value: Any) -> np.ndarray:
    """Return an array of a tensor, an image, a list or a number; types that numpy lacks become float32."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) in ("torch.bfloat16", "torch.float8_e4m3fn") else value
        return np.asarray(value.numpy())
    return np.asarray(value)


def _to_label(label: Any) -> Any:
    """Return a label as a column holds it: a number, an array, a name, or boxes [m, 5] of a detector's targets."""
    if isinstance(label, Mapping) and "boxes" in label and LABELS[1] in label:
        return np.column_stack([_to_array(label[LABELS[1]]).reshape(-1, 1), _to_array(label["boxes"]).reshape(-1, 4)])
    if isinstance(label, tuple | list) and label and isinstance(label[0], Mapping):
        return [_to_label(each) for each in label]
    return label if isinstance(label, str) else _to_array(label)


def _stack(values: list[Any], name: str, argument: str) -> Any:
    if not all(isinstance(value, np.ndarray | np.generic) for value in values):
        return values
    shapes = {value.shape for value in values}
    if len(shapes) == 1:
        return np.stack(values)
    if name == LABEL and all(len(shape) == 2 and shape[1] == 5 for shape in shapes):  # boxes
        most = max(len(value) for value in values)
        return np.stack([np.pad(value, [(0, most - len(value)), (0, 0)], constant_values=NO_BOX) for value in values])
    if all(value.dtype == np.uint8 for value in values):  # images
        return values
    told = " and ".join(str(list(shape)) for shape in itertools.islice(shapes, 2))
    raise SourceError(f"{argument}: {name} is {told} in two samples; give one shape to all, by transform_fn")


def _write_columns(columns: Mapping[str, Any], stem: Path) -> dict[str, str]:
    if all(isinstance(values, np.ndarray) and values.dtype.kind in "biuf" for values in columns.values()):
        file = io.BytesIO()
        np.savez(file, **columns)
        path = stem.with_name(f"{stem.name}.npz")
        write_whole(path, file.getvalue())
        return {"source": f"npz:{path}"}
    from datasets import Dataset
    from PIL import Image

    def to_cells(values: Any) -> list[Any]:
        images = isinstance(values[0], np.ndarray) and values[0].dtype == np.uint8 and values[0].ndim in (2, 3)
        return [Image.fromarray(value) for value in values] if images else [_to_cell(value) for value in values]

    return _write_parquet(Dataset.from_dict({name: to_cells(values) for name, values in columns.items()}), stem)


def _to_cell(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _write_parquet(dataset: Any, stem: Path) -> dict[str, str]:
    file = io.BytesIO()
    with hide_bars():
        dataset.to_parquet(file)
    path = stem.with_name(f"{stem.name}.parquet")
    write_whole(path, file.getvalue())
    return {"source": f"parquet:{path}"}


def _is_image(value: Any) -> bool:
    return hasattr(value, "getbands")  # of Pillow, which needs not be installed
