"""What a backend is: a name, whether it works here, and how it opens a model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np

from runtime.bundle.columns import Array
from runtime.bundle.files import find_encoder, find_vision
from runtime.bundle.manifest import IMAGE_FEATURES, MOST_THREADS
from runtime.bundle.records import from_json, to_json
from runtime.bundle.tensors import State, TensorSpec, as_sequence, has_batch
from runtime.errors import BundleError, UsageError

Feeds = dict[str, Array]
Options = Mapping[str, str | int | bool]
"""What a backend is told beside the model and its threads: name -> value, as JSON has it."""
Handle = TypeVar("Handle")


class Session(Protocol):
    """A loaded model."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...

    @property
    def outputs(self) -> tuple[TensorSpec, ...]: ...

    def run(self, feeds: Feeds, outputs: Sequence[str] | None = None) -> Feeds:
        """Run one call: {input name: array} -> {output name: array} that the caller may keep; `outputs`: only these.

        UsageError, BundleError.
        """
        ...

    def close(self) -> None:
        """Free the model; `run` may not be called afterwards."""
        ...


@runtime_checkable
class DeviceTimed(Protocol):
    """A session whose device has a clock of its own."""

    device_ms: float
    """Milliseconds that the last call took there, without the copies."""


@runtime_checkable
class Resident(Protocol):
    """A session that can leave tensors on its device between calls."""

    path: Path
    keeper: object
    """Whose tensors they are."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...

    @property
    def outputs(self) -> tuple[TensorSpec, ...]: ...

    def resume(
        self, feeds: Feeds, resident: Mapping[str, tuple[int, ...]], outputs: Sequence[str] | None = None
    ) -> Feeds:
        """Run one call as `run` does, where the inputs `resident` (name -> shape) are on the device already."""
        ...

    def exchange(self, first: str, second: str) -> None:
        """Swap the device memory of two tensors: what was given is read next."""
        ...

    def largest(self, name: str) -> tuple[int, ...]:
        """Return the largest shape that an input may have."""
        ...


class CacheState(Protocol):
    """The keys and values of one batch, kept by the session that made them."""

    def reset(self) -> None:
        """Forget all that was read."""
        ...

    def run(self, feeds: Feeds) -> Feeds:
        """Run one call on all inputs but the past, which follows what was read; outputs hold until the next call."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """A session of a decoder that keeps keys and values itself; its `run` begins with nothing read."""

    path: Path
    past: tuple[TensorSpec, ...]
    """The inputs of the file that became state; () where the file has the state itself."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...

    @property
    def outputs(self) -> tuple[TensorSpec, ...]: ...

    def make_state(self) -> CacheState:
        """Return a new state, which has read nothing."""
        ...


@dataclass(frozen=True)
class Backend:
    """One runtime."""

    name: str
    available: Callable[[], str | None]
    """None where it works on this machine, else the reason and the mend."""
    open: Callable[[Path, int, Options], Session]
    """(model.onnx, threads, options) -> Session. BundleError names the file; UsageError for an unknown option."""
    library: Callable[[], object]
    """Imports what the backend needs, so that a model's memory can be told from its library's. MissingDependency."""
    decoders: bool = False
    """Whether it generates text: keys and values stay in its sessions between calls."""
    exact: Options = field(default_factory=dict)
    """Options with which what the file has in float32 is computed in float32: a baseline that is measured against."""
    on_gpu: bool = False
    """Whether it computes on a GPU, so that the processor's own time says nothing of a call."""
    planned_as: str = ""
    """Of a plug-in: the target as for which a recipe that names this backend is planned and its graph written."""


def check_call(backend: str, threads: int, options: Options, known: tuple[str, ...] = ()) -> None:
    """Raise UsageError for threads out of range or an option that the backend does not have."""
    if not 1 <= threads <= MOST_THREADS:
        raise UsageError(f"{backend}: threads is {threads}; give 1 to {MOST_THREADS}")
    unknown = sorted(options.keys() - set(known))
    if unknown:
        raise UsageError(f"{backend}: unknown option '{unknown[0]}'; known: {', '.join(known) or 'none'}")


def check_open(path: Path, handle: Handle | None) -> Handle:
    """Return the session's handle; UsageError if the session was closed, so that it is None."""
    if handle is None:
        raise UsageError(f"{path}: the session is closed; open the model again")
    return handle


def check_feeds(inputs: tuple[TensorSpec, ...], feeds: Feeds) -> None:
    """Raise UsageError if a call does not give exactly the model's inputs, or gives one in another dtype."""
    names = {spec.name for spec in inputs}
    if names != feeds.keys():
        raise UsageError(
            f"the model takes the inputs {', '.join(sorted(names))}; given: {', '.join(sorted(feeds)) or 'none'}"
        )
    for spec in inputs:
        if feeds[spec.name].dtype.name != spec.dtype:
            raise UsageError(f"input '{spec.name}' is {feeds[spec.name].dtype}, but the model takes {spec.dtype}")


def choose_outputs(specs: tuple[TensorSpec, ...], outputs: Sequence[str] | None) -> list[str]:
    """Return the names of the outputs to give; UsageError for one that the model does not have."""
    names = [spec.name for spec in specs]
    unknown = [name for name in outputs or () if name not in names]
    if unknown:
        raise UsageError(f"the model has no output '{unknown[0]}'; its outputs: {', '.join(names)}")
    return names if outputs is None else list(outputs)


@dataclass(frozen=True)
class EncoderDecoderSession:
    """An encoder and its decoder as one: `run` calls the encoder, then the decoder with what it gave.

    Whoever generates calls each as often as it needs.
    """

    path: Path
    """The decoder's file."""
    encoder: Session
    decoder: Session

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Return the encoder's inputs, then the decoder's that neither the encoder gives nor both read."""
        known = {spec.name for spec in (*self.encoder.inputs, *self.encoder.outputs)}
        return (*self.encoder.inputs, *(spec for spec in self.decoder.inputs if spec.name not in known))

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Return the decoder's outputs."""
        return self.decoder.outputs

    @property
    def cross(self) -> tuple[str, ...]:
        """Return the names of what the encoder gives to the decoder."""
        return tuple(spec.name for spec in self.encoder.outputs)

    def encode(self, feeds: Feeds) -> Feeds:
        """Run the encoder; return what the decoder reads at every token: the encoder's outputs, a mask."""
        given = self.encoder.run({spec.name: feeds[spec.name] for spec in self.encoder.inputs})
        read = {spec.name for spec in self.decoder.inputs}
        return {name: values for name, values in {**feeds, **given}.items() if name in read}

    def run(self, feeds: Feeds, outputs: Sequence[str] | None = None) -> Feeds:
        check_feeds(self.inputs, feeds)
        names = choose_outputs(self.outputs, outputs)
        return self.decoder.run(self.encode(feeds), names)

    def close(self) -> None:
        self.encoder.close()
        self.decoder.close()


@dataclass(frozen=True)
class SeeingSession:
    """A decoder and what sees for it: `look` gives what the decoder reads in the places of images' tokens."""

    path: Path
    """The decoder's file."""
    vision: Session
    decoder: Session

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Return the decoder's inputs."""
        return self.decoder.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Return the decoder's outputs."""
        return self.decoder.outputs

    @property
    def pixels(self) -> TensorSpec:
        """Return the input that one image's pixels are."""
        return self.vision.inputs[0]

    def look(self, images: Sequence[Array]) -> Feeds:
        """Return the features of images, by name [n, width], one image after another.

        `images`: pixels of one each or of several, as a processor gives them. UsageError for another size.
        """
        size = math.prod(int(side) for side in self.pixels.shape)
        if odd := next((image for image in images if image.size % size), None):
            raise UsageError(f"pixels {odd.shape} are not of images {list(self.pixels.shape)}, which the model takes")
        each = [one for image in images for one in image.reshape(-1, *self.pixels.shape)]
        made = [self.vision.run({self.pixels.name: np.ascontiguousarray(one, self.pixels.dtype)}) for one in each]
        empty = no_features(self.inputs)
        return {name: np.concatenate([none, *(given[name] for given in made)]) for name, none in empty.items()}

    def run(self, feeds: Feeds, outputs: Sequence[str] | None = None) -> Feeds:
        return self.decoder.run(feeds, outputs)

    def close(self) -> None:
        self.vision.close()
        self.decoder.close()


def no_features(inputs: Sequence[TensorSpec]) -> Feeds:
    """Return what a decoder with these inputs reads of images where there are none: features without rows."""
    names = [IMAGE_FEATURES.format(i=i) for i in range(len(inputs))]
    return {spec.name: np.zeros((0, *map(int, spec.shape[1:])), spec.dtype) for spec in inputs if spec.name in names}


@dataclass(frozen=True)
class SequenceSession:
    """A model that hands states from call to call, as one that reads whole sequences: `run` makes a call for each step.

    Every sequence begins with the states' initial values. `inputs` and `outputs` are a sequence's, [1, time, ...].
    """

    session: Session
    states: tuple[State, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batched: Mapping[str, bool]
    """Input or output of a call -> whether its first axis is the batch of one sequence."""

    def run(self, feeds: Feeds, outputs: Sequence[str] | None = None) -> Feeds:
        check_feeds(self.inputs, feeds)
        names = choose_outputs(self.outputs, outputs)
        calls = [given for _, given in iter_calls(self.session.run, self.batched, self.states, feeds)]
        return {
            name: np.stack([call[name] for call in calls], 1)
            if self.batched[name]
            else np.stack([call[name] for call in calls])[None]
            for name in names
        }

    def close(self) -> None:
        self.session.close()


def read_sequences(session: Session, states: tuple[State, ...]) -> SequenceSession:
    """Return the session as one of whole sequences. BundleError where the model lacks a state."""
    ends = {spec.name for spec in (*session.inputs, *session.outputs)}
    handed = {name for state in states for name in (state.input.name, state.output)}
    if lost := sorted(handed - ends):
        session.close()
        raise BundleError(f"the model has no '{lost[0]}', which is a state: the two are not of one bundle")
    inputs, outputs = (
        tuple(as_sequence(spec) for spec in specs if spec.name not in handed)
        for specs in (session.inputs, session.outputs)
    )
    batched = {spec.name: has_batch(spec) for spec in (*session.inputs, *session.outputs)}
    return SequenceSession(session, states, inputs, outputs, batched)


def iter_calls(
    run: Callable[[Feeds], Feeds], batched: Mapping[str, bool], states: Sequence[State], feeds: Feeds
) -> Iterator[tuple[Feeds, Feeds]]:
    """Yield (what a call reads, what it gives) for each step of one sequence, `feeds` [1, time, ...].

    `batched`: as of a SequenceSession. UsageError for inputs of different lengths.
    """
    lengths = {values.shape[1] for values in feeds.values()}
    if len(lengths) != 1 or 0 in lengths:
        shown = ", ".join(f"'{name}' {list(values.shape)}" for name, values in feeds.items())
        raise UsageError(f"the inputs of a sequence have one length, of 1 or more: {shown}")
    handed = {state.input.name: np.full(state.shape, state.initial, state.input.dtype) for state in states}
    for step in range(lengths.pop()):
        steps = {name: values[:, step] if batched[name] else values[0, step] for name, values in feeds.items()}
        given = {name: np.ascontiguousarray(values) for name, values in steps.items()} | handed
        made = run(given)
        yield given, made
        handed = {state.input.name: made[state.output] for state in states}


STATES = "states"
"""Option that every backend has here: the states of the model, as `write_states` writes them."""


def write_states(states: Sequence[State]) -> str:
    """Return states as an option's value."""
    return json.dumps(to_json(tuple(states)))


def open_model(backend: Backend, path: Path, threads: int, options: Options) -> Session:
    """Open the model's file on a backend, with its encoder or what sees for it. BundleError, UsageError.

    With STATES among the options it reads whole sequences.
    """
    if STATES in options:
        states = tuple(from_json(State, state, STATES) for state in json.loads(str(options[STATES])))
        rest = {name: value for name, value in options.items() if name != STATES}
        return read_sequences(backend.open(path, threads, rest), states)
    encoder, vision = find_encoder(path), find_vision(path)
    if vision is not None and backend.decoders:
        return SeeingSession(path, backend.open(vision, threads, options), backend.open(path, threads, options))
    if encoder is None:
        return backend.open(path, threads, options)
    if not backend.decoders:
        raise UsageError(f"backend '{backend.name}' does not run encoder-decoders: it keeps no cache between calls")
    session = EncoderDecoderSession(path, backend.open(encoder, threads, options), backend.open(path, threads, options))
    lost = [name for name in session.cross if name not in {spec.name for spec in session.decoder.inputs}]
    if lost:
        session.close()
        raise BundleError(f"{path}: does not read '{lost[0]}', which {encoder.name} gives: they are not of one model")
    return session
