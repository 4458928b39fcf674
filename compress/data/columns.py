"""Which column of a file plays which role, and its values, checked and in the form that its role asks for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from compress.data.chat import LABEL, MESSAGES, TOOLS, ChatEncoder, are_chats, read_tools, read_turns
from compress.data.table import Table
from compress.errors import SourceError
from compress.specs import DataSpec, MessageKeys
from compress.store.digests import READ_AT_ONCE_BYTES
from compress.tasks import TorchTask, find_torch_task
from compress.tasks.base import MaskIds
from runtime.bundle.columns import Array
from runtime.bundle.pixels import load_pixels, read_image_size
from runtime.encode.audio import AUDIO, RATE, AudioPreprocess, load_audio, stack_waveforms, to_waveform
from runtime.encode.chat import IMAGE, TEXT, ask_about, take_parts
from runtime.encode.language import IDS, LOSS_MASK
from runtime.errors import UsageError
from runtime.tasks import find_task
from runtime.tasks.base import TEXT_COLUMNS
from runtime.words import did_you_mean

USUAL_NAMES: dict[str, tuple[str, ...]] = {
    "image": ("image", "img", "pixel_values"),
    "audio": ("audio", "file", "path", "speech"),
    "rate": ("rate", "sampling_rate", "sample_rate"),
    "text": ("text", "sentence", "sentence1"),
    "text_pair": ("text_pair", "sentence2"),
    "messages": ("messages",),
    "tools": ("tools",),
    "label": ("label", "labels", "score", "target"),
}
"""Role -> the column names it is found under when the recipe gives no `columns`."""


def sample_roles(task: str, images: bool) -> tuple[str, ...]:
    """Return the roles that inputs are made of; (): one for each input.

    `images`: inputs are made of images, whatever the task.
    """
    known = find_torch_task(task)
    chat = (*((known.perceives,) if known.perceives else ()), *((MESSAGES, TOOLS) if known.chats else ()))
    return (*find_task(task).columns, *chat) or (("image",) if images else ())


def resolve_roles(
    spec: DataSpec,
    table: Table,
    task: str,
    input_names: Sequence[str],
    images: bool = False,
    slices: Sequence[str] = (),
) -> dict[str, str]:
    """Map each role to a column name. `images`: as for `sample_roles`; `slices`, which no model reads, are passed over.

    SourceError, all problems at once: an unknown role, a missing column, a missing input.
    """
    if not table.names:
        raise SourceError(f"{table.where}: holds no samples")
    if LABEL in input_names:
        raise SourceError(
            f"{table.where}: the model's input '{LABEL}' cannot be told from the samples' labels, which are called so; "
            "rename the input"
        )
    task_roles = sample_roles(task, images)
    known = (*task_roles, *input_names, LABEL)
    if any(role in known or role not in slices for role in spec.columns):
        columns = _resolve_declared(spec, table, task_roles, input_names, slices)
    else:
        columns = _match_usual_names(table, task, task_roles, input_names, slices)
    required = task_roles[: find_task(task).required] or tuple(input_names)
    if MESSAGES in task_roles and {MESSAGES, TOOLS} & columns.keys():
        if "text" in columns:
            raise SourceError(f"{table.where}: columns: text and messages are both given; give one of them")
        required = (MESSAGES,)
    elif find_torch_task(task).perceives in columns:
        required = (find_torch_task(task).perceives,)
    required = required or tuple(role for role in columns if role != LABEL)[:1]
    if find_task(task).encodes:  # what its decoder reads is the reference
        required = (*required, LABEL)
    missing = [role for role in required if role not in columns]
    as_tensors = bool(input_names) and set(input_names) <= columns.keys()
    if (missing and not as_tensors) or not columns.keys() - {"label"}:
        roles = ", ".join(missing) or "an input"
        roles += " (or messages)" if MESSAGES in task_roles and "text" in missing else ""
        raise SourceError(
            f"{table.where}: no column for {roles}; the file has: {', '.join(table.names) or 'no columns'}; name them "
            f"in the recipe, such as `columns: {{{missing[0] if missing else 'x'}: ...}}`{table.hint}"
        )
    lengths = {column: table.lengths[column] for column in columns.values()}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{column} {n}" for column, n in lengths.items())
        raise SourceError(f"{table.where}: columns differ in length: {shown}")
    return columns


def same_roles(parts: Sequence[tuple[str, Collection[str]]]) -> None:
    """Raise SourceError unless all files, of which (source, roles) are given, have the same roles."""
    first, roles = parts[0]
    for source, others in parts[1:]:
        if set(others) != set(roles):
            raise SourceError(
                f"{source}: also: has {', '.join(sorted(others))}, but {first} has {', '.join(sorted(roles))}; give "
                "both the same columns"
            )


def resolve_slices(spec: DataSpec, table: Table, slices: Sequence[str]) -> dict[str, str]:
    """Map each slice but `label` to the column of its name, or the one that the spec gives. SourceError."""
    return _find_columns(table, {name: spec.columns.get(name, name) for name in slices if name != LABEL}, "slice ")


def _resolve_declared(
    spec: DataSpec, table: Table, task_roles: Sequence[str], input_names: Sequence[str], slices: Sequence[str]
) -> dict[str, str]:
    allowed = (*task_roles, *input_names, LABEL)
    any_role = not task_roles and not input_names
    given = {role: column for role, column in spec.columns.items() if role in allowed or role not in slices}
    unknown = [role for role in given if role not in allowed and not any_role]
    problems = [
        f"{table.where}: role '{role}' is not one of {', '.join(allowed)}{did_you_mean(role, allowed)}"
        for role in unknown
    ]
    return _find_columns(table, given, problems=problems)


def _find_columns(
    table: Table, given: Mapping[str, str | int], what: str = "", problems: Sequence[str] = ()
) -> dict[str, str]:
    """Return the names of columns that are given by name or number, for each role; `what` roles are, in errors.

    SourceError, with the `problems` found before.
    """
    columns, found = {}, list(problems)
    for role, column in given.items():
        if isinstance(column, int):
            if not 0 <= column < len(table.names):
                found.append(
                    f"{table.where}: there is no column {column} (for {what}{role}): the file has {len(table.names)}, "
                    "from 0"
                )
                continue
            column = table.names[column]
        if column not in table.lengths:
            shown = did_you_mean(column, table.names) or f"; the file has: {', '.join(table.names) or 'no columns'}"
            found.append(f"{table.where}: there is no column '{column}' (for {what}{role}){shown}{table.hint}")
        columns[role] = column
    if found:
        raise SourceError(found)
    return columns


def _match_usual_names(
    table: Table, task: str, task_roles: Sequence[str], input_names: Sequence[str], slices: Sequence[str]
) -> dict[str, str]:
    further = find_torch_task(task).usual_names
    columns: dict[str, str] = {}
    for role in (*task_roles, "label"):
        usual = USUAL_NAMES.get(role, (role,)) + further.get(role, ())
        taken = input_names if role == LABEL else ()
        names = [name for name in usual if name in table.lengths and name not in taken]
        if names:
            columns[role] = names[0]
    if MESSAGES in columns:  # a text beside them is mostly one that somebody has rendered of them
        columns.pop("text", None)
        columns.pop(LABEL, None)  # a score of the conversation, which no model reads
    else:
        columns.pop(TOOLS, None)
        if (perceives := find_torch_task(task).perceives) and perceives not in columns:
            columns.pop(LABEL, None)  # of a text, which goes on by itself
    if not task_roles:
        wanted = input_names or [name for name in table.names if name not in (*USUAL_NAMES[LABEL], *slices)]
        columns |= {name: name for name in wanted if name in table.lengths}
    return columns


CheckSize = Callable[[tuple[int, int]], None]
USUAL_MASKS, USUAL_KEYS = MaskIds(), MessageKeys()


@dataclass(frozen=True)
class ColumnReader:
    """Reads columns of `table` at the row numbers `rows`; every error names file, column and row."""

    table: Table
    rows: Array
    task: TorchTask
    n_classes: int | None = None
    class_names: tuple[str, ...] = ()
    images: bool = False
    """Inputs are made of images, whatever the task."""
    masks: MaskIds = USUAL_MASKS
    messages: MessageKeys = USUAL_KEYS
    chats: ChatEncoder | None = None
    """Encodes conversations for the model."""

    def read_all(self, roles: Mapping[str, str]) -> dict[str, Any]:
        """Read the columns, role -> column, as `Samples` has them. SourceError, also where they do not go together."""
        sound = {AUDIO, RATE} & roles.keys() if AUDIO in self.task.task.columns and AUDIO in roles else set()
        chat = {MESSAGES, TOOLS} & roles.keys() if self.chats is not None else set()
        if self.task.perceives and are_chats(roles):
            chat |= {self.task.perceives} if MESSAGES in roles else {self.task.perceives, TEXT, LABEL}
        columns = {role: self.values(role, column) for role, column in roles.items() if role not in sound | chat}
        if chat and self.chats is not None:
            columns |= self._encode_chats(self.chats, {role: roles[role] for role in roles if role in chat})
        if sound:
            columns |= self._load_audio(roles[AUDIO], roles.get(RATE))
        if misfit := self.task.find_misfit(columns):
            raise self.fail(roles["label"], *misfit)
        return columns

    def read_slice(self, name: str, column: str) -> list[str]:
        """Read a column as texts, one a row, by which samples are told apart. SourceError for lists."""
        raw = self.table.read(column, self.rows)
        names = self.table.label_names.get(column)
        texts = []
        for i, value in enumerate(raw):
            value = value.item() if isinstance(value, np.generic | np.ndarray) and np.size(value) == 1 else value
            if not isinstance(value, str | int | float) and value is not None:
                problem = f"slice '{name}' is {type(value).__name__}: give a text or a number for each sample"
                raise self.fail(column, i, problem)
            if names is not None and isinstance(value, int) and 0 <= value < len(names):
                value = names[value]
            texts.append(f"{value:g}" if isinstance(value, float) else str(value))
        return texts

    def values(self, role: str, column: str) -> Any:
        """Read a column, as `Samples` has it. SourceError for the first value that the role cannot have."""
        raw = self.table.read(column, self.rows)
        if role == "label":
            return self.task.read_labels(self, column, raw)
        # without `images`, "image" may be the name of a generic model's input, whatever that takes
        if role in sample_roles(self.task.name, self.images):
            if role == "image":
                images = []
                for i, item in enumerate(raw):
                    try:
                        images.append(load_pixels(self._find_file(item)))
                    except UsageError as error:
                        raise self.fail(column, i, str(error)) from error
                same_size = len({image.shape for image in images}) == 1
                return np.stack(images) if same_size else images
            if role in TEXT_COLUMNS or self.task.task.reads_texts:
                return self._check_texts(column, [self.task.make_text(item) for item in raw])
        return self._check_finite(column, self._to_numbers(column, raw))

    def fail(self, column: str, row: int, problem: str) -> SourceError:
        """Return the error of a row."""
        return SourceError(f"{self.table.where}: column '{column}', {self.table.place(int(self.rows[row]))}: {problem}")

    def check_headers(self, column: str, masks: bool, check_size: CheckSize) -> bool:
        """Look at the headers of a column's image files, and return whether pixels are left that nothing is known of.

        `masks`: they may have more than 8 bits, and any size. SourceError for the first that cannot be read, and where
        `check_size` raises UsageError for its (height, width).
        """
        if isinstance(self.table.read(column, self.rows[:1]), np.ndarray):  # of one array the first row tells all
            return False
        if self.table.n_bytes > READ_AT_ONCE_BYTES and len(self.table.files) == 1:  # they lie in it, and are decoded
            return True
        for i, item in enumerate(raw := self.table.read(column, self.rows)):
            try:
                if isinstance(item, str | Path):
                    size = read_image_size(self._find_file(item), any_depth=masks)
                    if not masks:
                        check_size(size)
            except UsageError as error:
                name = "" if str(item) in str(error) else f"{item}: "
                raise self.fail(column, i, f"{name}{error}") from error
        return any(isinstance(item, str | Path) for item in raw)

    def _load_audio(self, column: str, rates: str | None) -> dict[str, Any]:
        """Return the columns "audio" (float32 or int16 [T] each, one channel) and "rate" int64 [N]. SourceError."""
        raw = self.table.read(column, self.rows)
        known = [None] * len(raw) if rates is None else self._to_numbers(rates, self.table.read(rates, self.rows))
        loaded = []
        for i, (item, rate) in enumerate(zip(raw, known, strict=True)):
            try:
                loaded.append(load_audio(self._find_file(item), rate))
            except UsageError as error:
                raise self.fail(column, i, str(error)) from error
        return {
            AUDIO: stack_waveforms([waveform for waveform, _ in loaded]),
            RATE: np.array([rate for _, rate in loaded], np.int64),
        }

    def _encode_chats(self, chats: ChatEncoder, roles: Mapping[str, str]) -> dict[str, Any]:
        """Return the columns "input_ids" (int64 [t] each) and, unless all tokens count, "loss_mask". SourceError.

        With images or sounds, what the model's processor makes of them, too: arrays [n, ...], empty where are none.
        """
        main = roles.get(MESSAGES, roles.get(self.task.perceives, ""))
        read = {role: self.table.read(column, self.rows) for role, column in roles.items()}
        read |= {TEXT: self._check_texts(roles[TEXT], read[TEXT])} if TEXT in read else {}
        read |= {LABEL: self.task.read_labels(self, roles[LABEL], read[LABEL])} if LABEL in read else {}
        encoded: list[tuple[Array, Array, dict[str, Array]]] = []
        for i in range(len(self.rows)):
            try:
                encoded.append(self._encode_chat(chats, {role: values[i] for role, values in read.items()}))
            except UsageError as error:
                raise self.fail(main, i, str(error)) from error
        columns: dict[str, Any] = {IDS: [ids for ids, _, _ in encoded]}
        seen = {name: values for _, _, made in encoded for name, values in made.items()}
        for name, values in seen.items():
            columns[name] = [made.get(name, np.zeros(0, values.dtype)) for _, _, made in encoded]
        if seen or chats.chat.loss_on != "all":
            columns[LOSS_MASK] = [mask for _, mask, _ in encoded]
        return columns

    def _encode_chat(self, chats: ChatEncoder, row: Mapping[str, Any]) -> tuple[Array, Array, dict[str, Array]]:
        """Return the ids, the mask and what is made of the images or sounds of one row. UsageError."""
        kind = self.task.perceives
        parts = _list_parts(row.get(kind))
        turns = (
            read_turns(row[MESSAGES], self.messages)
            if MESSAGES in row
            else ask_about(parts, row.get(TEXT), row.get(LABEL), kind)
        )
        turns, named = take_parts(turns, parts if MESSAGES in row else (), kind)
        functions = read_tools(row.get(TOOLS))
        if not named:
            return (*chats.encode(turns, functions), {})
        return chats.add_parts(turns, functions, [self._load_part(chats, self._find_file(item)) for item in named])

    def _load_part(self, chats: ChatEncoder, item: Any) -> Array:
        """Return an image, uint8 [H, W(, C)], or a waveform, float32 [T] at the rate of the model's. UsageError."""
        if chats.perceives == IMAGE:
            return load_pixels(item)
        return to_waveform(item, None, AudioPreprocess(rate=chats.processor.rate, resample=True))

    def _find_file(self, item: Any) -> Any:
        """Return a path that a file names, sought beside that file, too; anything else as it is."""
        if not isinstance(item, str) or Path(item).exists() or not self.table.files:
            return item
        beside = self.table.files[0].parent / item
        return beside if beside.exists() else item

    def _check_texts(self, column: str, raw: Any) -> list[str]:
        for i, item in enumerate(raw):
            if not isinstance(item, str):
                raise self.fail(column, i, f"expected a text, found {type(item).__name__}")
        return [str(item) for item in raw]

    def _to_numbers(self, column: str, raw: Any) -> Array:
        """Return the values as an array of numbers [N, ...]; texts that are numbers (csv) are converted."""
        try:
            array = np.asarray(raw)
            array = array.astype(np.float64) if array.dtype.kind in "US" else array
        except ValueError as error:
            raise SourceError(f"{self.table.where}: column '{column}' is not numbers of one shape: {error}") from error
        if array.dtype.kind not in "biuf":
            raise SourceError(f"{self.table.where}: column '{column}' holds {array.dtype} values, not numbers")
        return array

    def _check_finite(self, column: str, array: Array) -> Array:
        if array.dtype.kind == "f":
            bad = np.flatnonzero(~np.isfinite(array.reshape(len(array), -1)).all(axis=1))
            if len(bad):
                raise self.fail(column, int(bad[0]), f"holds NaN or infinity ({_count_rows(bad)})")
        return array

    def read_numbers(self, column: str, raw: Sequence[Any]) -> Array:
        """Return labels as finite numbers [N]; names of classes, and ids in a file that names them, as the model's."""
        class_ids = self._map_class_names(column, raw)
        labels = self._check_finite(
            column, self._to_numbers(column, self._parse_numbers(column, raw) if class_ids is None else class_ids)
        )
        if labels.ndim != 1:
            raise SourceError(
                f"{self.table.where}: column '{column}': labels have shape {labels.shape}, one number a row is needed"
            )
        return labels

    def at(self, rows: Array) -> ColumnReader:
        """Return a reader of values that stand in these rows, int64 [M], for several values of one row."""
        return replace(self, rows=self.rows[rows])

    def knows_classes(self) -> bool:
        """Return whether the number of the model's classes is known."""
        return self.count_classes() is not None

    def count_classes(self) -> int | None:
        """Return the number of the model's classes; None where it is not known."""
        return self.n_classes or len(self.class_names) or None

    def read_class_ids(self, column: str, values: Array, least: int) -> Array:
        """Return whole numbers as int64, checked: from `least` on, and classes of the model."""
        broken = np.flatnonzero(values != np.floor(values))
        if len(broken):
            raise self.fail(column, int(broken[0]), f"label {values[broken[0]]} is not a class number")
        n_classes = self.count_classes()
        bad = np.flatnonzero((values < least) | (values >= (n_classes or 2**63)))
        if len(bad):
            limit = f"{least}..{n_classes - 1}, the model's classes" if n_classes else f"{least} or above"
            problem = f"label {int(values[bad[0]])} is not in {limit} ({_count_rows(bad)})"
            raise self.fail(column, int(bad[0]), problem)
        return values.astype(np.int64)

    def _map_class_names(self, column: str, raw: Any) -> Sequence[int] | None:
        """Return class numbers by `class_names` where labels are names or the file names its class ids, else None."""
        index = {name.casefold(): i for i, name in enumerate(self.class_names)}
        stated = self.table.label_names.get(column)
        if stated is not None and index:
            mapped = [index.get(name.casefold()) for name in stated]
            if None in mapped:
                raise SourceError(
                    f"{self.table.where}: column '{column}': the file's classes "
                    f"{', '.join(self.table.label_names[column])} are not all among the model's, "
                    f"{', '.join(self.class_names)}; set `class_names` in the recipe's model, in the model's order and "
                    "with the data's names"
                )
            return [-1 if label is None or label < 0 else mapped[label] for label in raw]
        if index and all(isinstance(label, str) and label.casefold() in index for label in raw):
            return [index[label.casefold()] for label in raw]
        return None

    def _parse_numbers(self, column: str, raw: Any) -> Any:
        """Convert texts to numbers: int where all are written so, else float."""
        if not any(isinstance(label, str) for label in raw):
            return raw
        wrong = [i for i, label in enumerate(raw) if not _is_number(str(label))]
        if wrong:
            names = {name.casefold() for name in self.class_names}
            i = next((i for i in wrong if str(raw[i]).casefold() not in names), wrong[0])
            known = ", ".join(self.class_names) or "none: set `class_names` in the recipe's model"
            raise self.fail(column, i, f"label '{raw[i]}' is neither a number nor one of the class names ({known})")
        texts = [str(label).strip() for label in raw]
        return (
            [int(text) for text in texts]
            if all(text.lstrip("+-").isdecimal() for text in texts)
            else [float(t) for t in texts]
        )


def _list_parts(value: Any) -> Sequence[Any]:
    """Return the images or sounds of one row: one, or a list of them."""
    return () if value is None else value if isinstance(value, list | tuple) else (value,)


def _count_rows(bad: Array) -> str:
    """Return how many rows are like one that is named."""
    return "1 such row" if len(bad) == 1 else f"{len(bad)} such rows"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
