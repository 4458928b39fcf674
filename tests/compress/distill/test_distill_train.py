"""The training loop: what must not change its result, what ends it, and a run that is killed."""

from __future__ import annotations

import atexit
import json
import math
import os
import signal
import time
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from child_processes import run_in_process, run_in_two_processes, start_process
from distilling import SCHEDULE, SHARED, Interrupted, conv_net, images, label_dataset, quiet, taught, train_and_save
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save
from torch import nn

from compress.distill import train as loop
from compress.distill.batch import Batch, Mixed, part
from compress.distill.schedule import TrainingSchedule
from compress.distill.train import FILE, Dataset, train
from compress.distill.training_log import TrainLog
from compress.errors import PassError
from compress.store import training_state
from compress.store.training_state import module_state, read_state, write_state

pytestmark = pytest.mark.usefixtures("one_thread")


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def near(a: nn.Module, b: nn.Module, atol: float = 1e-5) -> bool:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.allclose(x.float(), y.float(), atol=atol) for x, y in pairs)


def test_training_lowers_the_loss_and_keeps_the_best() -> None:
    net, log = taught(replace(SCHEDULE, steps=40))
    assert log.end == "steps" and log.start_loss is not None and log.best_loss is not None
    assert log.curve[-1][1] < 0.8 * log.curve[0][1]
    assert (
        log.best_loss == min(loss for _, loss in log.evaluations) and (log.best_step, log.best_loss) in log.evaluations
    )
    assert [step for step, _ in log.evaluations] == list(range(0, 41, 4))
    assert not net.training
    dataset = label_dataset(net, images())
    held = loop.split_rows(48, 0.25, 0)[1]
    with torch.no_grad():
        assert float(dataset.loss(dataset.batch(held, None))) == pytest.approx(log.best_loss, rel=1e-5)


def test_a_second_run_gives_the_same_bytes_and_another_seed_does_not() -> None:
    first, second, other = taught()[0], taught()[0], taught(replace(SCHEDULE, seed=1))[0]
    assert same(first, second) and not same(first, other)


def test_the_global_random_state_is_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    net = conv_net()  # seeds 0
    torch.manual_seed(5)
    train(net.requires_grad_(True), label_dataset(net, images()), SCHEDULE, quiet())
    assert torch.equal(torch.rand(3), expected)


def test_sgd_is_torch_s_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "LARGEST_NORM", 0.05)
    schedule = replace(SCHEDULE, steps=5, optimizer="sgd", weight_decay=0.1, warmup=0, held_out=0.0)
    net, log = taught(schedule)
    slow = conv_net().requires_grad_(True)
    dataset, rows = label_dataset(slow, images()), np.arange(48)
    velocity = {name: torch.zeros_like(p) for name, p in slow.named_parameters()}
    for step in range(5):
        slow.eval()
        slow.bn1.train()
        slow.bn2.train()
        slow.zero_grad()
        batch = dataset.batch(loop.step_rows(rows, schedule, step), loop.step_random(schedule, step))
        dataset.loss(batch).backward()
        norm = torch.stack([p.grad.norm() for p in slow.parameters() if p.grad is not None]).norm()
        for name, p in slow.named_parameters():
            assert p.grad is not None
            grad = p.grad * min(1.0, 0.05 / float(norm)) + (0.1 * p.detach() if p.dim() > 1 else 0)
            velocity[name] = 0.9 * velocity[name] + grad
            p.data -= 0.01 * (1 + math.cos(math.pi * step / 5)) / 2 * velocity[name]
    assert near(net, slow) and log.best_loss is None and log.end == "steps"


def test_bfloat16_learns_about_the_same() -> None:
    exact, rough = taught(replace(SCHEDULE, steps=30)), taught(replace(SCHEDULE, steps=30, precision="bfloat16"))
    assert not same(exact[0], rough[0])
    assert all(p.dtype == torch.float32 for p in rough[0].parameters())
    assert [v for _, v in rough[1].evaluations] == pytest.approx([v for _, v in exact[1].evaluations], rel=0.1)


def test_running_statistics_follow_the_data_unless_frozen() -> None:
    before = conv_net().bn1
    moved, frozen = taught()[0].bn1, taught(replace(SCHEDULE, freeze_batchnorm=True))[0].bn1
    assert before.running_mean is not None and moved.running_mean is not None and frozen.running_mean is not None
    assert torch.equal(frozen.running_mean, before.running_mean)
    assert not torch.equal(moved.running_mean, before.running_mean)


def test_the_average_of_the_states_is_looked_at_and_kept() -> None:
    last = replace(SCHEDULE, held_out=0.0, evaluate_every=100)
    states: list[dict[str, torch.Tensor]] = []
    net = conv_net().requires_grad_(True)

    def note(step: int) -> None:
        states.append({name: value.detach().clone() for name, value in net.state_dict().items()})

    expected = {name: value.clone() for name, value in net.state_dict().items()}
    train(net, label_dataset(net, images()), replace(last, ema_decay=0.6), quiet(after_step=note))
    for step, state in enumerate(states):
        decay = min(0.6, (1 + step) / (10 + step))
        for name, value in state.items():
            expected[name] = decay * expected[name] + (1 - decay) * value if value.is_floating_point() else value
    found = net.state_dict()
    assert len(states) == SCHEDULE.steps
    assert all(torch.allclose(found[name].float(), value.float(), atol=1e-6) for name, value in expected.items())
    assert not torch.allclose(found["conv1.weight"], states[-1]["conv1.weight"])
    plain, _ = taught(last)
    assert near_states(plain.state_dict(), states[-1])  # training itself goes on from the weights as they are


def near_states(a: Any, b: Any) -> bool:
    return all(torch.allclose(a[name].float(), b[name].float(), atol=1e-6) for name in a)


def test_dropout_stays_off() -> None:
    seen: list[bool] = []
    net = conv_net().requires_grad_(True)
    net.drop.register_forward_hook(lambda module, args, out: seen.append(module.training))
    train(net, label_dataset(net, images()), replace(SCHEDULE, steps=1, held_out=0.0), quiet())
    assert seen == [False]


def test_rates_of_their_own_and_calls_around_steps() -> None:
    calls: list[tuple[str, float]] = []
    options = {
        "rates": {"fc.weight": 0.0},
        "before_step": lambda step, done: calls.append(("before", done)),
        "after_step": lambda step: calls.append(("after", step)),
    }
    net, _ = taught(replace(SCHEDULE, steps=2, held_out=0.0), **options)
    assert torch.equal(net.fc.weight, conv_net().fc.weight) and not torch.equal(net.fc.bias, conv_net().fc.bias)
    assert calls == [("before", 0.0), ("after", 0), ("before", 0.5), ("after", 1)]


@dataclass
class Ticks:
    """A clock that goes on by a `step` whenever it is asked."""

    now: float = -1.0
    step: float = 1.0

    def ask(self) -> float:
        self.now += self.step
        return self.now


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Ticks:
    ticks = Ticks()
    monkeypatch.setattr(loop.time, "monotonic", ticks.ask)
    return ticks


@pytest.mark.usefixtures("ticks")
def test_time_ends_a_run_with_a_last_look() -> None:
    done: list[float] = []
    schedule = replace(SCHEDULE, steps=10_000, max_seconds=60.0, save_seconds=1e9)
    _, log = taught(schedule, before_step=lambda step, part: done.append(part))
    assert log.end == "time" and 3 < log.step < 60 and log.evaluations[-1][0] == log.step
    seldom, _ = taught(replace(schedule, evaluate_every=5_000)), None
    assert 4 < len(seldom[1].evaluations) <= 7  # the clock asks for them, at most for a tenth of itself: each takes 1 s
    assert done == sorted(done) and done[-1] > 0.5  # by the clock: 10,000 steps are far


@pytest.mark.slow
def test_a_slow_disk_does_not_take_the_run_over(tmp_path: Path, ticks: Ticks, monkeypatch: pytest.MonkeyPatch) -> None:
    saves: list[float] = []
    ticks.step = 0.5

    def slow(*args: Any) -> None:
        saves.append(ticks.now)
        ticks.now += 3.0

    monkeypatch.setattr(training_state, "write_state", slow)
    taught(replace(SCHEDULE, steps=400, save_seconds=1.0), tmp_path)
    assert 3 < len(saves) < 20
    assert min(np.diff(saves[:-1])) > 60  # twenty times what one takes


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_samples_of_which_nothing_counts(weight: float) -> None:
    """A text of one token predicts nothing: in a batch of its own it teaches nothing, alone it cannot be judged by."""
    net = conv_net().requires_grad_(True)
    dataset, schedule = label_dataset(net, images()), replace(SCHEDULE, steps=3, batch_size=1)
    held = set(loop.split_rows(dataset.n, schedule.held_out, schedule.seed)[1].tolist())

    def batch(rows: np.ndarray, random: Any) -> Any:
        made = dataset.batch(rows, random)
        return replace(made, weights=torch.tensor([weight if row in held else 0.0 for row in rows.tolist()]))

    def loss(one: Any) -> torch.Tensor:
        return dataset.loss(replace(one, weights=one.weights.clamp_min(1e-9)))

    if weight:
        assert train(net, replace(dataset, batch=batch, loss=loss), schedule, quiet()).step == 3
    else:
        with pytest.raises(PassError, match="the 12 samples held out have nothing to be judged by"):
            train(net, replace(dataset, batch=batch, loss=loss), schedule, quiet())


def test_a_first_look_that_is_nan_is_no_best() -> None:
    log = TrainLog()
    assert log.look(math.nan) and log.look(2.0) and not log.look(3.0) and log.best_loss == 2.0


def poisoned(net: nn.Module, at: int) -> Dataset:
    """Lessons whose loss is NaN from the step of that number on, while training."""
    good, calls = label_dataset(net, images()), [0]

    def loss(batch: Batch) -> torch.Tensor:
        calls[0] += torch.is_grad_enabled()
        return good.loss(batch) * (float("nan") if torch.is_grad_enabled() and calls[0] > at else 1.0)

    return replace(good, loss=loss)


def test_a_broken_loss_keeps_the_best_so_far() -> None:
    net = conv_net().requires_grad_(True)
    log = train(net, poisoned(net, 10), SCHEDULE, quiet())
    _, whole = taught(SCHEDULE)
    assert log.end == "diverged" and log.step == 10 and log.best_step in (4, 8)
    assert log.evaluations == whole.evaluations[:3] and not same(net, conv_net())
    assert all(bool(torch.isfinite(p).all()) for p in net.parameters())


def test_a_loss_that_breaks_before_anything_is_better_is_an_error(tmp_path: Path) -> None:
    net = conv_net().requires_grad_(True)
    with pytest.raises(PassError, match=r"the loss became NaN or infinite in step 3 .*lower learning_rate \(0.01\)"):
        train(net, poisoned(net, 2), SCHEDULE, quiet(tmp_path))
    assert same(net, conv_net())
    with pytest.raises(PassError, match="NaN or infinite"):  # and so it is for a run that comes after it
        train(net, poisoned(net, 2), SCHEDULE, quiet(tmp_path))


def test_too_few_samples() -> None:
    net = conv_net().requires_grad_(True)
    with pytest.raises(PassError, match="held_out 1 leaves no sample to learn from"):
        train(net, label_dataset(net, images(4)), replace(SCHEDULE, held_out=1.0), quiet())


def test_fewer_samples_than_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PassError, match="batch_size 2 is less than the 3 processes"):
        loop.check_sizes(9, replace(SCHEDULE, batch_size=2), 3, "test")


SCHEDULES = st.builds(
    lambda optimizer, **changes: replace(
        SCHEDULE, optimizer=optimizer, learning_rate={"adamw": 0.01, "sgd": 0.1}[optimizer], **changes
    ),
    st.sampled_from(["adamw", "sgd"]),
    ema_decay=st.sampled_from([0.0, 0.7]),
    evaluate_every=st.integers(3, 5),
    save_seconds=st.sampled_from([0.0, 1e9]),
    seed=st.integers(0, 3),
)
PLACES = st.tuples(st.sampled_from(["before_step", "after_step"]), st.integers(0, 11))


@settings(max_examples=4)
@given(SCHEDULES, st.lists(PLACES, min_size=1, max_size=3))
@example(schedule=replace(SCHEDULE, ema_decay=0.7), strikes=[("after_step", 4)])
@pytest.mark.slow
def test_a_run_that_is_broken_off_ends_with_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, schedule: TrainingSchedule, strikes: list[tuple[str, int]]
) -> None:
    """At any steps, once or again and again, whatever was saved by then."""
    work = tmp_path_factory.mktemp("run")
    expected, whole = taught(schedule)
    for where, stop in strikes:

        def strike(step: int, *done: float, stop: int = stop) -> None:
            if step >= stop:
                raise Interrupted

        with pytest.raises(Interrupted):
            taught(schedule, work, **{where: strike})
    net, log = taught(schedule, work)
    assert same(net, expected)
    assert (log.curve, log.evaluations, log.best_step) == (whole.curve, whole.evaluations, whole.best_step)
    again, _ = taught(schedule, work)  # finished: read, not trained
    assert same(again, expected)


def test_saving_seldom_changes_nothing(tmp_path: Path) -> None:
    expected, log = taught()
    assert log.best_step > 0

    def strike(step: int) -> None:
        if step == 10:
            raise Interrupted

    seldom = replace(SCHEDULE, save_seconds=1e9)
    with pytest.raises(Interrupted):
        taught(seldom, tmp_path, after_step=strike)
    assert not (tmp_path / FILE).exists()
    assert same(taught(seldom, tmp_path)[0], expected)


@pytest.mark.slow
def test_a_run_that_is_killed_ends_with_the_same_bytes(tmp_path: Path) -> None:
    """SIGKILL at an instant that depends on the machine; then the run is let go to its end."""
    with start_process(train_and_save, tmp_path, 60, {}) as process:
        wait_for_step(tmp_path / FILE, 5, process)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    assert any("goes on from step" in line for line in run_in_process(train_and_save, tmp_path, 60, {}))
    expected, log = taught(replace(SHARED, steps=60))
    assert log.best_step > 5
    assert save(expected.state_dict()) == (tmp_path / "0.safetensors").read_bytes()
    assert json.loads((tmp_path / "0.json").read_text())[:2] == json.loads(json.dumps([log.curve, log.evaluations]))


def wait_for_step(file: Path, least: int, process: BaseProcess) -> int:
    """The step that a run has saved, once it is `least` or later."""
    while process.is_alive():
        found = read_state(file)
        if found is not None and found[1]["step"] >= least:
            return int(found[1]["step"])
        time.sleep(0.01)
    raise AssertionError("the run ended before it was killed")


def count_threads() -> int:
    """Of process groups."""
    names = [thread.joinpath("comm").read_text().strip() for thread in Path("/proc/self/task").iterdir()]
    return names.count("pt_gloo_runloop")


def train_and_end(out: Path, steps: int, changes: dict[str, Any]) -> None:
    """Train, and tell of the threads of process groups that end before all else does."""
    ended, most = out / f"{os.environ['RANK']}.ended", [0]
    atexit.register(lambda: ended.write_text(f"{most[0] - count_threads()}"))  # runs last
    train_and_save(out, steps, changes)
    most[0] = count_threads()


@pytest.mark.slow
def test_two_processes_are_one_to_rounding_and_end_in_order(tmp_path: Path) -> None:
    """Batch norm's statistics among them; one sample of each batch is left over."""
    changes = {"batch_size": 7, "ema_decay": 0.6}
    run_in_two_processes(train_and_end, tmp_path, 8, changes)
    check_shared_run(tmp_path, changes, shares=[4, 3])
    ended = [int((tmp_path / f"{rank}.ended").read_text()) for rank in (0, 1)]
    assert min(ended) >= 2  # one that frees a tensor later aborts


def check_shared_run(out: Path, changes: dict[str, Any], shares: list[int]) -> None:
    """Hold what two processes left against one's training. `shares`: of each batch, the two processes'."""
    first, second = (load_file(out / f"{rank}.safetensors") for rank in (0, 1))
    one, log = taught(replace(SHARED, steps=8, **changes))
    assert log.best_step > 0
    for name, value in one.state_dict().items():
        assert torch.equal(first[name], second[name])
        assert torch.allclose(first[name].float(), value.float(), atol=1e-4), name
    found = [json.loads((out / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert [seen for _, _, seen in found] == [8 * share for share in shares]
    curve, evaluations, _ = found[0]
    assert found[0][:2] == found[1][:2]
    assert np.allclose(curve, log.curve, rtol=1e-4) and np.allclose(evaluations, log.evaluations, rtol=1e-4)


def test_parts_of_a_batch() -> None:
    rows = np.arange(5)
    labels = torch.arange(5)
    batch = Batch(rows, {"x": torch.arange(10).view(5, 2)}, torch.arange(5.0), labels, Mixed(labels.flip(0), 0.3))
    halves = [part(batch, rank, 2) for rank in (0, 1)]
    assert [half.rows.tolist() for half in halves] == [[0, 2, 4], [1, 3]]
    assert halves[1].feeds["x"].tolist() == [[2, 3], [6, 7]] and halves[1].weights.tolist() == [1, 3]
    assert halves[1].mixed is not None and halves[1].mixed.labels is not None
    assert halves[1].mixed.labels.tolist() == [3, 1] and sum(half.weight for half in halves) == batch.weight
    assert part(batch, 0, 1) is batch


def test_a_state_is_one_whole_file_or_none(tmp_path: Path) -> None:
    path = tmp_path / FILE
    assert read_state(path) is None
    write_state(path, {"a": torch.arange(3)}, {"step": 4, "loss": 0.1})
    found = read_state(path)
    assert found is not None and found[0]["a"].tolist() == [0, 1, 2] and found[1] == {"step": 4, "loss": 0.1}
    assert [p.name for p in tmp_path.iterdir()] == [FILE]
    path.write_bytes(path.read_bytes()[:-4])
    assert read_state(path) is None


def test_tied_weights_are_saved_once() -> None:
    net = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    net["b"].weight = net["a"].weight
    assert list(module_state(net)) == ["a.weight", "a.bias", "b.bias"]


def test_a_step_is_taken_in_parts_that_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = replace(SCHEDULE, steps=5, freeze_batchnorm=True)
    whole, log = taught(schedule)
    sizes: list[int] = []
    compute = loop._Training._compute_loss

    def note(self: loop._Training, batch: Batch) -> torch.Tensor:
        sizes.append(len(batch.rows))
        return compute(self, batch)

    monkeypatch.setattr(loop._Training, "_compute_loss", note)
    net = conv_net().requires_grad_(True)
    dataset, held = label_dataset(net, images()), list(net.parameters())
    one, two = (dataset.batch(np.arange(n), None) for n in (1, 2))
    kept, twice = (loop.measure_kept_bytes(lambda: dataset.loss(batch), held) for batch in (one, two))  # noqa: B023
    assert 1.5 * kept < twice <= 2 * kept
    monkeypatch.setattr(loop, "MEASURED_BYTES", 1)
    learned = sum(p.numel() * p.element_size() for p in net.parameters())
    monkeypatch.setattr(loop, "available_bytes", lambda: 4 * learned + 5 * kept)  # seven tenths of these
    parts, cut = taught(schedule)
    assert max(sizes) == 3 and near(parts, whole)
    assert [loss for _, loss in cut.curve] == pytest.approx([loss for _, loss in log.curve], rel=1e-5)
