"""The training loop, on accelerate: steps, looks at samples held out, the best state so far, resume after a kill.

It knows nothing of what is learned from: a `Dataset` makes batches and says how far off the module is. With several
processes of one launch each takes its part of every batch, and the gradients are summed, so that the losses are those
of one process to rounding.
"""

from __future__ import annotations

import math
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import convert_conv2d_weight_memory_format

from compress.blocks import heap
from compress.blocks.device import halve_rows
from compress.blocks.sharing import share, wait
from compress.distill.batch import Batch, part, to_device
from compress.distill.batchnorm import set_mode, share_statistics
from compress.distill.schedule import (
    MEASURED_BYTES,
    Rows,
    TrainingSchedule,
    fit_samples,
    is_evaluation_due,
    learning_rate,
    progress_made,
    split_rows,
    step_random,
    step_rows,
)
from compress.distill.training_log import TrainLog, line, log_of, make_divergence_error
from compress.errors import PassError
from compress.store.training_state import (
    SavedRun,
    Tensors,
    add_prefix,
    distinct,
    module_state,
    optimizer_state,
    remove_prefix,
    restore_module,
    restore_optimizer,
)
from runtime.processes.memory import available_bytes
from runtime.progress import Progress

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "IProgress not found")  # of bars in notebooks, which nothing here draws
    from accelerate import Accelerator  # type: ignore[import-untyped]
    from accelerate.state import AcceleratorState, PartialState  # type: ignore[import-untyped]

T = TypeVar("T")
TINY = 1e-12
"""In the place of a weight that is 0: a batch of which nothing counts."""
FILE = "training.safetensors"
MOMENTUM = 0.9
"""Of SGD."""
REDUCED_BYTES = 2
"""Of a number in bfloat16."""
COPIES_TO_COME = 2
"""Of what is learned, beside the moments: the gradients, and the state while it is saved."""
LARGEST_NORM = 1.0
"""Of all gradients together, to which they are clipped."""


@dataclass(frozen=True)
class Dataset:
    """What is learned from: `n` samples.

    `batch`: the samples of these rows on the CPU, changed at random by the generator, or as they are without one.
    `loss`: mean over a batch's samples, each counted by its weight; a scalar with gradients.
    """

    n: int
    batch: Callable[[Rows, np.random.Generator | None], Batch]
    loss: Callable[[Batch], Tensor]


def _do_nothing(step: int, done: float = 0.0) -> None:
    pass


@dataclass(frozen=True)
class TrainOptions:
    """What training may use beside its batches. `name`: what bar, log and errors call it.

    `device`: "cpu" or "cuda:n". `work`: a folder that outlives a killed run; None: nothing is saved. `rates`: parameter
    -> a factor on the learning rate. `before_step`, `after_step`: called with each step's number, the first also with
    the part of the run that is done, in [0, 1); what they do must follow from these and the module alone, for a resumed
    run calls them from its first step on.
    """

    name: str
    log: Callable[[str], None]
    progress: Progress
    work: Path | None = None
    rates: Mapping[str, float] = field(default_factory=dict)
    before_step: Callable[[int, float], None] = _do_nothing
    after_step: Callable[[int], None] = _do_nothing
    device: str = "cpu"


def _make_accelerator(device: torch.device) -> Accelerator:
    """Make the accelerator of this process of a launch; RuntimeError where accelerate knows of other processes."""
    size = share().size  # joins the group before accelerate would, which sees processes on CPUs only if it is told so
    if PartialState._shared_state and PartialState().device.type != device.type:
        AcceleratorState._reset_state(reset_partial_state=True)  # it is one for the process, and keeps its first device
    if device.type != "cpu":
        torch.cuda.set_device(device)
    accelerator = Accelerator(cpu=device.type == "cpu")
    if accelerator.num_processes != size:
        raise RuntimeError(f"{size} processes work together, but accelerate was set up for {accelerator.num_processes}")
    return accelerator


def _find_layout(module: nn.Module) -> torch.memory_format:
    """Return how images are held: channels last, but for 1 x 1 convolutions of fewer than 8 channels.

    Where such a one has strides, torch 2.13 writes beyond the gradient of its weights on a CPU with AVX2 alone: of
    [8, 4, 1, 1] with strides of 2 the process is aborted within 60 steps, of 8 channels or in the usual layout never.
    """
    narrow = any(p.dim() == 4 and p.shape[1] < 8 and p.shape[2:] == (1, 1) for p in module.parameters())
    return torch.contiguous_format if narrow else torch.channels_last


def train(module: nn.Module, dataset: Dataset, schedule: TrainingSchedule, options: TrainOptions) -> TrainLog:
    """Train every parameter of `module` that wants a gradient; it is left with the best state, in eval mode, on CPU.

    The best is that with the least loss on the samples held out, the start included; without any, the last.
    Raises PassError: a loss that is NaN or infinite before anything better than the start was found; too few samples.
    """
    training = _Training(module, dataset, schedule, options)
    training.resume()
    training.run()
    restore_module(module, training.best)
    _bring_back(module)
    if training.log.end == "diverged" and (training.log.best_loss is None or not training.log.best_step):
        raise PassError(make_divergence_error(options.name, training.log, schedule))
    return training.log


def try_schedule(module: nn.Module, dataset: Dataset, schedule: TrainingSchedule, options: TrainOptions) -> float:
    """Train as `train` does; return the mean loss of the last third of the steps, infinite where it broke.

    Schedules of one length are so compared on the same batches. The samples held out tell less: a module that begins
    well loses there before it gains, the more so the more it learns (a net of depthwise blocks, five of nine taken out,
    0.096 held out at its start: after 28 steps AdamW at 6e-6 had lost least there; at 1.6e-3, the best by the steps'
    own loss, 300 steps came to 0.064). The module is left as it was, on the CPU in eval mode; nothing is saved.
    """
    start = learned_state(module)
    training = _Training(module, dataset, schedule, options)
    training.held = training.held[:0]
    training.run()
    restore_module(module, start)
    _bring_back(module)
    late = [loss for step, loss in training.log.curve if 3 * step > 2 * schedule.steps]
    return float(np.mean(late)) if late and training.log.end != "diverged" else math.inf


def _bring_back(module: nn.Module) -> None:
    """Put the module in eval mode on the CPU, its kernels held as modules come."""
    convert_conv2d_weight_memory_format(module.cpu().eval(), torch.contiguous_format)


class _Training:
    """One run. What changes is the module, the optimizer, `average`, `log` and `best`; these are what is saved."""

    def __init__(self, module: nn.Module, dataset: Dataset, schedule: TrainingSchedule, options: TrainOptions) -> None:
        self.device = torch.device(options.device)
        self.accelerator = _make_accelerator(self.device)
        self.rank, self.size = self.accelerator.process_index, self.accelerator.num_processes
        self.module, self.dataset, self.schedule, self.options = module.to(self.device), dataset, schedule, options
        # as the images are: a step of 14 blocks of ResNet-56 in bfloat16 takes 0.92 of the time (measured on a CPU)
        self.layout = _find_layout(self.module)
        convert_conv2d_weight_memory_format(self.module, self.layout)
        self.rows, self.held = split_rows(dataset.n, schedule.held_out, schedule.seed)
        check_sizes(len(self.rows), schedule, self.size, options.name)
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.optimizer = _make_optimizer(module, schedule, options.rates)
        self.log, self.best = TrainLog(), learned_state(module)
        self.average = Average(self.module, schedule.ema_decay) if schedule.ema_decay else None
        file = None if options.work is None else options.work / FILE
        self.saved = SavedRun(file, self.rank == 0, schedule.save_seconds)
        self.begun = time.monotonic()
        self.at_once = self._fit_samples()
        """Samples; fewer where memory holds no more, or once the device's was full."""
        self._check_same_start()

    def _fit_samples(self) -> int:
        """Return how many samples of a step go through the module together: all of them, or as many as memory holds.

        What one needs is measured in a forward pass, of large models. A GPU says by itself when it is full.
        """
        wanted = self.schedule.batch_size
        n_learned = sum(p.numel() * p.element_size() for p in self.parameters)
        if self.device.type != "cpu" or wanted == 1 or n_learned < MEASURED_BYTES:
            return wanted
        step = self.dataset.batch(step_rows(self.rows, self.schedule, 0), None)
        self.module.eval()
        first, held = part(step, 0, len(step.rows)), [*self.module.parameters(), *step.feeds.values()]
        kept = measure_kept_bytes(lambda: self._compute_loss(first), held)
        if self.schedule.precision == "bfloat16":  # matrices are kept in it, however many samples there are
            kept -= sum(p.numel() * REDUCED_BYTES for p in self.parameters if p.dim() > 1)
        moments = 1 if self.schedule.optimizer == "sgd" else 2
        to_come = n_learned * (COPIES_TO_COME + moments)
        fitting = fit_samples(wanted, kept, available_bytes() - to_come)
        if fitting < wanted:
            text = f"memory holds {fitting} of a step's {wanted} samples at once; they are taken in parts"
            self.options.log(f"{self.options.name}: {text}")
        return fitting

    def run(self) -> None:
        """Run all steps that are left."""
        with heap.keep_freed(), share_statistics(self.module, self.sum, self.size):
            self._make_steps()
        self._save()

    def _make_steps(self) -> None:
        if not self.log.evaluations:
            self._evaluate()
        steps = range(self.log.step, 0 if self.log.end else self.schedule.steps)
        longest = self.schedule.max_seconds
        most_s = None if longest is None else max(longest - self.log.seconds, 0.0)
        for step in self.options.progress(steps, self.options.name, most_s):
            loss = self._make_step(step)
            if not math.isfinite(loss):
                self.log.end = "diverged"
                break
            self.log.add(loss, self.schedule.steps)
            self._judge()
            if self.log.end:
                break
        if not self.log.end:
            self.log.end = "steps"

    def _check_same_start(self) -> None:
        """Raise RuntimeError where processes would train different models: their gradients are summed."""
        if self.size == 1:
            return
        digest = 0
        for name, tensor in sorted(module_state(self.module).items()):
            digest = zlib.crc32(tensor.double().numpy().tobytes(), zlib.crc32(name.encode(), digest))
        total = int(self.sum(torch.tensor(digest, dtype=torch.int64, device=self.device)))
        same = self.sum(torch.tensor(int(total == digest * self.size), dtype=torch.int64, device=self.device))
        if int(same) != self.size:
            raise RuntimeError(f"{self.options.name}: the {self.size} processes begin with different weights")

    def _make_step(self, step: int) -> float:
        """Make one optimizer step; return its loss, or NaN if loss or gradient are not finite and nothing was done."""
        self.options.before_step(step, progress_made(self.schedule, step, self._agreed_seconds()))
        set_mode(self.module, self.schedule.freeze_batchnorm)
        batch = self.dataset.batch(step_rows(self.rows, self.schedule, step), step_random(self.schedule, step))
        loss_sum = float(self.sum(self._where_it_fits(lambda: self._sum_gradients(batch))))
        if not math.isfinite(loss_sum) or not self._clip():
            return math.nan
        self._apply(step)
        return loss_sum

    def _sum_gradients(self, batch: Batch) -> Tensor:
        """Set the gradients of this process's part of a step; return its part of the loss."""
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.device)
        for mine in self._split(part(batch, self.rank, self.size)):
            loss = self._compute_loss(mine) * (mine.weight / max(batch.weight, TINY))
            self.accelerator.backward(loss)
            total += loss.detach()
        return total

    def _split(self, batch: Batch) -> list[Batch]:
        """Return a batch in parts of as many samples as fit at once: nearly always itself."""
        n_parts = max(1, -(-len(batch.rows) // self.at_once))
        return [part(batch, number, n_parts) for number in range(n_parts)]

    def _where_it_fits(self, work: Callable[[], T]) -> T:
        """Return what `work` gives, done with fewer samples at once where the device has no memory for it."""
        if self.size > 1:  # the others would wait for the sums of what is begun again
            return work()
        for attempt in halve_rows(self.at_once, self.options.log, least=1, what="samples"):
            with attempt:
                self.at_once = attempt.rows or self.at_once
                done = work()
        return done

    def _compute_loss(self, batch: Batch) -> Tensor:
        reduced = self.schedule.precision == "bfloat16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=reduced):
            return self.dataset.loss(to_device(batch, self.device, self.layout))

    def _clip(self) -> bool:
        """Sum the gradients of all processes and clip them; return False if they are not finite."""
        if self.size > 1:
            _reduce_gradients(self.parameters, self.sum)
        return bool(torch.isfinite(self.accelerator.clip_grad_norm_(self.parameters, LARGEST_NORM)))

    def _apply(self, step: int) -> None:
        rate = learning_rate(self.schedule, step, self._agreed_seconds())
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        self.optimizer.step()
        self.options.after_step(step)
        if self.average is not None:
            self.average.follow(step)

    def _judge(self) -> None:
        """Look, end and save where it is time, after a step."""
        schedule, log = self.schedule, self.log
        seconds, n_evaluations = self._agreed_seconds(), len(log.evaluations)
        late = schedule.max_seconds is not None and seconds >= schedule.max_seconds
        last = late or log.step == schedule.steps
        due = is_evaluation_due(schedule, log.step, seconds, n_evaluations, self._agree(log.evaluating_s))
        if last or due or log.step % schedule.evaluate_every == 0:
            self._evaluate()
        if last:
            log.end = "time" if late else "steps"
        if self.saved.is_due():
            self._save()

    def _evaluate(self) -> None:
        """Take the loss on what is held out and keep the best state; where nothing is held out, keep the last."""
        with self.average.in_place() if self.average is not None else nullcontext():
            if not len(self.held):
                self.best, self.log.best_step = learned_state(self.module), self.log.step
                return
            begun = time.monotonic()
            if self.log.look(self._compute_held_out_loss()):
                self.best = learned_state(self.module)
            self.log.evaluating_s += time.monotonic() - begun
        self.options.log(line(self.options.name, self.log, self.schedule, self._seconds()))

    def _compute_held_out_loss(self) -> float:
        """Return the loss on the samples held out, in eval mode and as they are. Processes take batches in turn."""
        self.module.eval()
        size = self.schedule.batch_size
        pieces = [self.held[start : start + size] for start in range(0, len(self.held), size)]
        totals = self.sum(self._where_it_fits(lambda: self._sum_losses(pieces[self.rank :: self.size])))
        if not totals[1]:
            raise PassError(
                f"{self.options.name}: the {len(self.held)} samples held out have nothing to be judged by (texts of "
                "one token?); raise held_out, or leave them out of the training set"
            )
        return float(totals[0] / totals[1])

    @torch.no_grad()
    def _sum_losses(self, pieces: Sequence[Rows]) -> Tensor:
        """Return the sum of the losses of samples, each counted by its weight, and of the weights; float64 [2]."""
        sums = torch.zeros(2, dtype=torch.float64)
        for batch in (piece for rows in pieces for piece in self._split(self.dataset.batch(rows, None))):
            sums += torch.tensor([float(self._compute_loss(batch)) * batch.weight, batch.weight], dtype=torch.float64)
        return sums

    def _save(self) -> None:
        self.log.seconds = self._seconds()
        self.begun = time.monotonic()
        self.saved.save(self._tensors, asdict(self.log))

    def _tensors(self) -> Tensors:
        """Return all that changes in a run, but for the log."""
        tensors = add_prefix("now", learned_state(self.module)) | add_prefix("best", self.best)
        tensors |= add_prefix("optimizer", optimizer_state(self.optimizer))
        return tensors | ({} if self.average is None else add_prefix("average", self.average.state()))

    def resume(self) -> None:
        """Go on where an earlier run stood, if it left anything."""
        left = self.saved.take()
        wait()  # until all have read, nobody writes
        if left is None:
            if self.saved.damaged:
                self.options.log(f"{self.options.name}: what an earlier run left is damaged; training starts afresh")
            return
        tensors, record = left
        restore_module(self.module, remove_prefix("now", tensors))
        restore_optimizer(self.optimizer, remove_prefix("optimizer", tensors))
        if self.average is not None:
            self.average.restore(remove_prefix("average", tensors))
        self.best, self.log = remove_prefix("best", tensors), log_of(record)
        self.options.log(f"{self.options.name}: goes on from step {self.log.step} of {self.schedule.steps}")

    def _seconds(self) -> float:
        return self.log.seconds + time.monotonic() - self.begun

    def _agreed_seconds(self) -> float:
        return self._agree(self._seconds())

    def _agree(self, seconds: float) -> float:
        """Return the mean over processes, so that all do the same; 0 where time does not count."""
        if self.schedule.max_seconds is None:
            return 0.0
        return float(self.sum(torch.tensor(seconds, dtype=torch.float64))) / self.size

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all processes."""
        return self.accelerator.reduce(tensor, "sum") if self.size > 1 else tensor


def learned_state(module: nn.Module) -> Tensors:
    """Copy, as `module_state` does, all but the parameters that are not learned, which stay as they are."""
    return {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in distinct(module).items()
        if tensor.requires_grad or not isinstance(tensor, nn.Parameter)
    }


def measure_kept_bytes(loss: Callable[[], Tensor], held: Sequence[Tensor]) -> int:
    """Return the bytes that a forward pass keeps for its gradients, beside tensors that are `held` anyway."""
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        given = loss()  # held until all is counted, or a place in memory might be counted as another's
    places = {tensor.untyped_storage().data_ptr() for tensor in held}
    del given
    return sum(size for place, size in kept.items() if place not in places)


def _make_optimizer(module: nn.Module, schedule: TrainingSchedule, rates: Mapping[str, float]) -> torch.optim.Optimizer:
    """Make AdamW (arXiv:1711.05101) or SGD with momentum over the parameters that want a gradient.

    Matrices and kernels decay, biases, norms and other vectors do not. Each group's "factor" multiplies the rate that
    is set before every step; `rates`: parameter -> its factor, 1 where not named.
    """
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            decay = schedule.weight_decay if parameter.dim() > 1 else 0.0
            groups.setdefault((rates.get(name, 1.0), decay), []).append(parameter)
    given: list[dict[str, Any]] = [
        {"params": parameters, "factor": factor, "weight_decay": decay}
        for (factor, decay), parameters in groups.items()
    ]
    if schedule.optimizer == "sgd":
        return torch.optim.SGD(given, lr=schedule.learning_rate, momentum=MOMENTUM)
    n_bytes = sum(p.numel() * p.element_size() for parameters in groups.values() for p in parameters)
    # Of Qwen2.5-Coder 0.5B a step takes a fifth of the time fused, and other last bits.
    fused = n_bytes >= MEASURED_BYTES
    return torch.optim.AdamW(given, lr=schedule.learning_rate, eps=schedule.epsilon, fused=fused or None)


def _reduce_gradients(parameters: Sequence[nn.Parameter], reduce: Callable[[Tensor], Tensor]) -> None:
    """Put the sum over processes into every gradient; one message for all. Absent ones are taken for 0."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    total = reduce(torch.cat([grad.reshape(-1) for grad in grads]))
    for parameter, grad, summed in zip(parameters, grads, total.split([g.numel() for g in grads]), strict=True):
        parameter.grad = summed.view(grad.shape).clone()


def check_sizes(n_rows: int, schedule: TrainingSchedule, n_processes: int, name: str) -> None:
    """Raise PassError if there is nothing to learn from, or not a sample for each process."""
    if not n_rows:
        raise PassError(f"{name}: held_out {schedule.held_out:g} leaves no sample to learn from; hold out less")
    if schedule.batch_size < n_processes:
        raise PassError(
            f"{name}: batch_size {schedule.batch_size} is less than the {n_processes} processes; give each a sample"
        )


class Average:
    """Parameters and floating-point buffers, averaged exponentially over the steps (Polyak and Juditsky 1992).

    The first steps count less, so that the start is soon forgotten: the decay of step s is at most (1 + s) / (10 + s).
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.module, self.decay = module, decay
        self.tensors = {name: tensor.detach().clone() for name, tensor in _floats(module)}

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Update the average after the step of that number, from 0 on."""
        decay = min(self.decay, (1 + step) / (10 + step))
        for name, tensor in _floats(self.module):
            self.tensors[name].lerp_(tensor.detach(), 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the module the average's values while the context is open."""
        values = module_state(self.module)
        restore_module(self.module, self.tensors)
        try:
            yield
        finally:
            restore_module(self.module, values)

    def state(self) -> Tensors:
        """Return the average by name, on the CPU, to be saved."""
        return {name: tensor.cpu().contiguous() for name, tensor in self.tensors.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Set the average to what `state` gave."""
        for name, tensor in state.items():
            self.tensors[name].copy_(tensor)


def _floats(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((name, tensor) for name, tensor in distinct(module).items() if tensor.is_floating_point())
