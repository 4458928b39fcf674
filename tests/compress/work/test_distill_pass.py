"""The pass `distill`: what it refuses, what its loss is made of, and that a shaken student comes back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distilling import Arrays, conv_net, images, noisy
from streaming import TEXT, bert, llama, model_context, output_of
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from compress.data.samples import samples_of
from compress.data.training import make_encoded_set, n_rows
from compress.distill.batch import Batch
from compress.distill.datasets import Augment, batch_maker
from compress.distill.losses import label_loss
from compress.distill.objective import (
    Weighted,
    hidden_term,
    labels_term,
    next_token_logits_term,
    next_token_term,
    total_loss,
)
from compress.distill.sequences import Writing, write_sequences
from compress.distill.teacher import PREFIX, keep_outputs
from compress.distill.watch import Seen, Watched, attention_modules
from compress.errors import PassError, SourceError
from compress.facts import BlockFacts, LayerFacts, ModelFacts, Structure
from compress.formats.targets import TARGETS
from compress.models.huggingface import TextModel
from compress.models.load import TorchModel
from compress.passes.base import DataSize
from compress.passes.distill import Distill, Sequences
from compress.passes.distill_student import Student
from compress.passes.qat import Qat
from compress.passes.training import AttentionTerm, Augmentation, HiddenTerm, LabelsTerm, LogitsTerm, OutputTerm
from compress.work import apply_pass
from compress.work.contexts import ModelContext
from compress.work.settle_schedule import BLENDED_EPOCHS
from runtime.bundle.tensors import TensorSpec
from runtime.encode.preprocess import TensorPreprocess, make_preprocessor
from runtime.progress import no_progress

IMAGES = (TensorSpec("pixel_values", "float32", ("batch", 3, 8, 8)),)
TOKENS = tuple(TensorSpec(name, "int64", ("batch", "sequence")) for name in TEXT)
TARGET = TARGETS["onnxruntime-cpu"]
BODY = [LayerFacts(f"body.{i}.fc", "Linear", "MatMul", f"body.{i}.fc.weight", (8, 8)) for i in range(2)]
LAYERS = (*BODY, LayerFacts("head", "Linear", "Gemm", "head.weight", (4, 8)))
FACTS = ModelFacts(
    source="torch",
    architecture="Net",
    task="image-classification",
    inputs=IMAGES,
    outputs=(TensorSpec("logits", "float32", ("batch", 4)),),
    layers=LAYERS,
    structure=Structure((BlockFacts("body.0", ()), BlockFacts("body.1", ()))),
)


pytestmark = pytest.mark.usefixtures("one_thread")


def token_set(n: int = 12, width: int = 10, seed: int = 0) -> Arrays:
    """Texts of different lengths, padded on the right."""
    random = np.random.default_rng(seed)
    lengths = random.integers(3, width + 1, n)
    mask = (np.arange(width) < lengths[:, None]).astype(np.int64)
    return Arrays({"input_ids": random.integers(1, 60, (n, width)) * mask, "attention_mask": mask})


def image_model(net: nn.Module) -> TorchModel:
    outputs = (TensorSpec("logits", "float32", ("batch", 4)),)
    names = {"pixel_values": "x"}
    return TorchModel(
        architecture="ConvNet",
        inputs=IMAGES,
        outputs=outputs,
        module=net,
        parameters=names,
        task="image-classification",
    )


def text_model(net: nn.Module) -> TorchModel:
    """A Hugging Face model in its wrapper."""
    output = output_of(net)
    task = "text-generation" if output == "logits" else "feature-extraction"
    config: Any = net.config
    width = config.vocab_size if output == "logits" else config.hidden_size
    config.use_cache = False
    net.set_attn_implementation("eager")  # type: ignore[operator]
    outputs = (TensorSpec(output, "float32", ("batch", "sequence", width)),)
    module = TextModel(net, output).eval().requires_grad_(False)
    return TorchModel(
        architecture=type(net).__name__, inputs=TOKENS, outputs=outputs, module=module, parameters=TEXT, task=task
    )


def options(trainset: Any, teacher: Callable[[], TorchModel] | None, work: Path | None = None) -> ModelContext:
    return model_context(work=work, train=trainset, teacher=teacher)


def small(**more: Any) -> Distill:
    return Distill(**{"steps": 20, "batch_size": 8, "learning_rate": 3e-3, "held_out": 0.25} | more)


def outputs(net: nn.Module) -> Tensor:
    with torch.no_grad():
        return net(torch.from_numpy(images().columns["pixel_values"])).log_softmax(-1)


def test_what_is_wrong_is_said_by_the_plan() -> None:
    def problems(config: Distill, **more: Any) -> tuple[str, ...]:
        return config.check(replace(FACTS, **more), TARGET).problems

    deep = (TensorSpec("x", "float32", ("batch", 4, 8, 8)),)
    assert any("has neither 1 nor 3 channels" in one for one in problems(Distill(augment={"flip": True}), inputs=deep))

    assert problems(Distill()) == ()
    named = HiddenTerm(layers=(("body.0.fk", "body.0.fc"),))
    assert problems(Distill(hidden=named)) == (
        "distill: hidden: the model has no layer or block 'body.0.fk'; did you mean 'body.0.fc'?",
    )
    named_map = AttentionTerm(layers=(("zzz", "body.0"),))
    assert problems(Distill(attention=named_map)) == ("distill: attention: the model has no layer or block 'zzz'",)
    assert problems(Distill(hidden=HiddenTerm(layers="even"))) == (
        "distill: hidden: layers: 'even' is neither uniform, nor a re: pattern, nor pairs",
    )
    assert problems(Distill(hidden=HiddenTerm()), structure=None) == (
        "distill: hidden: no chain of blocks was found; give pairs of modules",
    )
    assert problems(Distill(), source="onnx")[0].startswith("distill: trains a torch model")
    augmented = Distill(augment=Augmentation(flip=True))
    assert problems(augmented, task="text-generation")[0].startswith("distill: augment is for images")
    assert problems(Distill(logits=LogitsTerm()), task="feature-extraction")[0].endswith("use output and hidden")
    assert problems(Distill(), layers=(replace(LAYERS[0], bits=4),)) == (
        "distill: must come before the pass that rounds body.0.fc",
    )
    mixed = Distill(augment=Augmentation(mixup=0.2), attention=AttentionTerm(), logits=LogitsTerm())
    assert problems(mixed)[0].startswith("distill: mixup blends images")


def test_what_is_wrong_with_a_training_set() -> None:
    labelled = Distill(labels=LabelsTerm())
    assert labelled.train_problems("image-classification", 100, has_labels=False) == [
        "distill: labels: the training set has no labels; name their column, or leave the term out"
    ]
    assert labelled.train_problems("image-classification", 100, has_labels=True) == []
    assert labelled.train_problems("text-generation", 100, has_labels=False) == []
    assert Distill(held_out=0.5).train_problems("image-classification", 1, True) == []
    with pytest.raises(ValueError, match="epochs and steps both say how long"):
        Distill(epochs=1, steps=5)


def test_the_loss_follows_from_the_task() -> None:
    said = {
        task: Distill().describe_loss(task) for task in ("text-classification", "text-generation", "feature-extraction")
    }
    assert said == {
        "text-classification": "KL of the logits at temperature 4",
        "text-generation": "KL of the logits at temperature 1",
        "feature-extraction": "cosine of the outputs (mean pooling), mse of hidden states",
    }
    assert Distill().describe_loss("generic") == "mse of the outputs"
    mixed = Distill(logits=LogitsTerm(temperature=2), labels=LabelsTerm(weight=0.1))
    assert mixed.describe_loss("image-classification") == "KL of the logits at temperature 2, the labels"
    assert mixed.describe_loss("text-generation").endswith("the next tokens")


def test_how_long_and_what_is_kept() -> None:
    config = Distill(epochs=3, batch_size=10, held_out=0.1)
    schedule = config.make_schedule(1000, seed=7)
    assert (schedule.steps, schedule.seed, schedule.warmup, schedule.evaluate_every) == (270, 7, 14, 13)
    assert config.cache_bytes(FACTS, 1000) == 4 * 1000 * 4
    assert Distill(epochs=1, held_out=0.1).cache_bytes(FACTS, 1000) == 0  # each sample is seen once
    for never in ({"augment": Augmentation(flip=True)}, {"hidden": HiddenTerm()}):
        assert config.model_copy(update={**never, "logits": LogitsTerm()}).cache_bytes(FACTS, 1000) == 0
    texts = replace(FACTS, task="text-generation", outputs=(TensorSpec("logits", "float32", ("batch", "sequence", 9)),))
    assert config.cache_bytes(texts, 1000) == 0
    notes = [config.train_notes(facts, 1000)[0].text for facts in (FACTS, texts)]
    assert notes[0] == "distill: 270 steps of 10 samples; the teacher: its outputs are kept on disk (15.6 KiB)"
    assert notes[1].endswith("the teacher: it is run in every step")
    assert config.estimate_cost(FACTS, DataSize(train=1000)).forwards == pytest.approx(4 * 2700 + 2 * 270 / 13 * 100)


def test_a_model_that_learns_from_itself_stays_as_it_is() -> None:
    net = conv_net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    terms = {"logits": LogitsTerm(temperature=4), "hidden": HiddenTerm(layers=(("conv1", "conv1"), ("bn2", "bn2")))}
    result = apply_pass(
        small(**terms, freeze_batchnorm=True), image_model(net), options(images(), lambda: image_model(conv_net()))
    )
    assert result.measured["distill"]["loss_before"] == 0
    assert set(result.measured["distill: training loss"].values()) == {0.0}
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert result.notes[0].level == "warning" and "nothing was better than the start" in result.notes[0].text


def test_a_shaken_student_comes_back() -> None:
    student, teacher = noisy(conv_net()), conv_net()
    far = float((outputs(student) - outputs(teacher)).norm())
    result = apply_pass(small(steps=60), image_model(student), options(images(), lambda: image_model(conv_net())))
    assert float((outputs(student) - outputs(teacher)).norm()) < 0.4 * far
    numbers = result.measured["distill"]
    assert numbers["loss_after"] < 0.5 * numbers["loss_before"]
    assert {d.layer: d.action for d in result.decisions} == dict.fromkeys(("conv1", "conv2", "fc"), "distilled")
    assert not student.training and not any(p.requires_grad for p in student.parameters())


def test_zeros_of_matrices_stay() -> None:
    student = noisy(conv_net())
    student.conv2.weight.data[:, :3] = 0
    student.fc.bias.data[:] = 0
    apply_pass(small(), image_model(student), options(images(), lambda: image_model(conv_net())))
    assert bool((student.conv2.weight[:, :3] == 0).all()) and bool((student.fc.bias != 0).all())


def test_labels_and_augmentation_are_learned_from() -> None:
    config = small(
        labels=LabelsTerm(), augment=Augmentation(flip=True, crop=1, mixup=0.3), optimizer="sgd", learning_rate=0.1
    )
    student = noisy(conv_net())
    result = apply_pass(config, image_model(student), options(images(), lambda: image_model(conv_net())))
    assert result.measured["distill"]["loss_after"] < result.measured["distill"]["loss_before"]


def test_a_narrower_student_gets_projections_and_a_fresh_one_none_of_them() -> None:
    student = conv_net(3, width=5)
    names = list(student.state_dict())
    terms = {"logits": LogitsTerm(), "hidden": HiddenTerm(layers=(("bn1", "bn1"), ("bn2", "bn2")))}
    result = apply_pass(small(**terms), image_model(student), options(images(), lambda: image_model(conv_net())))
    assert result.measured["distill"]["loss_after"] < result.measured["distill"]["loss_before"]
    assert list(student.state_dict()) == names


def test_refusals_when_it_is_run() -> None:
    loaded, teacher = image_model(conv_net()), lambda: image_model(conv_net())
    with pytest.raises(PassError, match=r"there is no training set; give the recipe data\.train"):
        apply_pass(small(), loaded, options(None, teacher))
    with pytest.raises(PassError, match="there is no teacher"):
        apply_pass(small(), loaded, options(images(), None))
    other = conv_net()
    other.fc = nn.Linear(8, 7)
    with pytest.raises(PassError, match=r"the student gives output \[2, 4\], the teacher output \[2, 7\]"):
        apply_pass(small(), loaded, options(images(), lambda: image_model(other)))
    missing = small(hidden=HiddenTerm(layers=(("bn1", "bn7"),)))
    with pytest.raises(PassError, match=r"the teacher has no module 'bn7'; did you mean"):
        apply_pass(missing, loaded, options(images(), teacher))
    with pytest.raises(PassError, match=r"conv1 gives \[2, 8, 8, 8\], conv2 of the teacher \[2, 8, 4, 4\]"):
        apply_pass(small(hidden=HiddenTerm(layers=(("conv1", "conv2"),))), loaded, options(images(), teacher))
    with pytest.raises(
        PassError, match=r"bn1 has 0 modules that give an attention map, one is needed; those of the model: none"
    ):
        apply_pass(small(attention=AttentionTerm(layers=(("bn1", "bn1"),))), loaded, options(images(), teacher))


def test_kept_outputs_are_what_the_teacher_gives(tmp_path: Path) -> None:
    calls, net, data = [0], conv_net(), images(20)
    batch_of = batch_maker(data, {"pixel_values": "x"}, Augment(), tokens=False)

    def answer(batch: Batch) -> Seen:
        calls[0] += 1
        return Seen({"output": net(**batch.feeds)})

    kept = keep_outputs(answer, lambda rows: batch_of(rows, None), 20, tmp_path, no_progress)
    rows = np.array([17, 3, 3])
    batch = batch_of(rows, None)
    assert torch.allclose(kept(batch).first, net(**batch.feeds), atol=1e-6)
    assert [path.name.startswith(PREFIX) for path in tmp_path.iterdir()] == [True]
    before = calls[0]
    keep_outputs(answer, lambda rows: batch_of(rows, None), 20, tmp_path, no_progress)
    assert calls[0] == before + 1  # the shape is asked for, no more
    (tmp_path / "w").mkdir()
    result = apply_pass(
        small(), image_model(noisy(conv_net())), options(images(), lambda: image_model(conv_net()), tmp_path / "w")
    )
    assert result.measured["distill"]["steps"] == 20


def test_terms_are_weighed_sample_by_sample() -> None:
    """However a batch is cut, its loss is the mean of the parts', each counted by its weight."""
    net, teacher = text_model(llama(layers=1)), text_model(llama(1, layers=1))
    batch = batch_maker(token_set(), TEXT, Augment(), tokens=True)(np.arange(6), None)
    assert batch.mask is not None
    assert batch.weights.tolist() == (batch.mask.sum(1) - 1).tolist()
    terms = [Weighted(0.5, next_token_logits_term(2.0)), Weighted(2.0, next_token_term)]
    assert net.module is not None and teacher.module is not None
    own, other = (Seen({"logits": model.module(**batch.feeds)}) for model in (net, teacher))  # type: ignore[misc]
    found = float(total_loss(terms, batch, own, other))
    slow, count = 0.0, 0
    for i in range(6):
        for t in range(int(batch.mask[i].sum()) - 1):
            p, q = ((seen.first[i, t] / 2).softmax(-1) for seen in (other, own))
            slow += 0.5 * 4 * float((p * (p / q).log()).sum())
            slow -= 2.0 * float(own.first[i, t].log_softmax(-1)[batch.feeds["input_ids"][i, t + 1]])
            count += 1
    assert found == pytest.approx(slow / count, rel=1e-4)


def test_what_is_learned_is_drawn_anew_and_what_is_held_out_is_not() -> None:
    kept, seeds = images(), []

    def redraw(rows: np.ndarray, seed: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        seeds.append(seed)
        return {"pixel_values": kept.columns["pixel_values"][rows] + 1}, rows % 4

    batch_of = batch_maker(replace(kept, redraw=redraw), {"pixel_values": "x"}, Augment(), tokens=False)
    rows = np.arange(3, 7)
    learned, held = batch_of(rows, np.random.default_rng(0)), batch_of(rows, None)
    assert learned.augmented and not held.augmented and len(seeds) == 1
    assert torch.allclose(learned.feeds["x"], held.feeds["x"] + 1)
    assert learned.labels is not None and learned.labels.tolist() == [3, 0, 1, 2]


def test_blended_labels_count_by_their_shares() -> None:
    random = np.random.default_rng(0)
    batch = batch_maker(images(), {"pixel_values": "x"}, Augment(mixup=0.5), tokens=False)(np.arange(8), random)
    assert batch.mixed is not None and batch.mixed.labels is not None and batch.labels is not None and batch.augmented
    out = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    found = labels_term(label_loss)(batch, Seen({"logits": out}), Seen({}))
    log = out.log_softmax(-1)
    for i in range(8):
        own, other = log[i, batch.labels[i]], log[i, batch.mixed.labels[i]]
        assert float(found[i]) == pytest.approx(
            -float(batch.mixed.share * own + (1 - batch.mixed.share) * other), rel=1e-5
        )


def test_a_decoder_learns_every_token_and_its_attention() -> None:
    student, teacher = text_model(noisy(llama())), text_model(llama())
    terms = {
        "logits": LogitsTerm(),
        "labels": LabelsTerm(weight=0.1),
        "hidden": HiddenTerm(),
        "attention": AttentionTerm(),
    }
    result = apply_pass(small(**terms), student, options(token_set(), lambda: teacher))
    assert result.measured["distill"]["loss_after"] < 0.97 * result.measured["distill"]["loss_before"]


def test_a_student_learns_from_what_its_teacher_writes(tmp_path: Path) -> None:
    teacher, data = text_model(llama()), token_set()
    assert teacher.module is not None
    how = Writing(prompt=4, temperature=1.0, seed=0)
    found = write_sequences(teacher.module, data, how, tmp_path, no_progress)
    mask = data.columns["attention_mask"]
    assert (
        found.n == 12 and (found.lengths <= mask.sum(1)).all() and (found.lengths >= np.minimum(mask.sum(1), 5)).all()
    )
    assert (found.ids[:, :4] == data.columns["input_ids"][:, :4] * (np.arange(4) < mask.sum(1)[:, None])).all()
    assert not np.array_equal(found.feeds(np.arange(12))["input_ids"], data.feeds(np.arange(12))["input_ids"])
    again, kept = (write_sequences(teacher.module, data, how, p, no_progress) for p in (None, tmp_path))
    assert np.array_equal(found.ids, again.ids) and np.array_equal(found.ids, kept.ids)
    settings = teacher.module.wrapped.generation_config  # type: ignore[union-attr]
    settings.repetition_penalty, settings.min_p = 9.0, 0.9  # its makers' taste is not the distribution to learn
    assert np.array_equal(found.ids, write_sequences(teacher.module, data, how, None, no_progress).ids)
    assert settings.min_p == 0.9
    sharp = write_sequences(teacher.module, data, replace(how, temperature=1e-4), None, no_progress)
    row = int(sharp.lengths.argmax())
    with torch.no_grad():
        best = teacher.module(**{k: torch.from_numpy(v) for k, v in sharp.feeds(np.array([row])).items()}).argmax(-1)
    assert sharp.ids[row, 4 : sharp.lengths[row]].tolist() == best[0, 3 : sharp.lengths[row] - 1].tolist()
    student = text_model(noisy(llama()))
    config = small(labels=LabelsTerm(), sequences=Sequences(prompt_tokens=2))
    result = apply_pass(config, student, options(data, lambda: text_model(llama())))
    assert result.measured["distill"]["loss_after"] < result.measured["distill"]["loss_before"]


def test_outputs_of_a_decoder_are_compared_token_by_token() -> None:
    student, teacher = text_model(noisy(llama())), text_model(llama())
    config = small(logits=LogitsTerm(), output=OutputTerm(loss="mse"))
    result = apply_pass(config, student, options(token_set(), lambda: teacher))
    assert result.measured["distill"]["loss_after"] < result.measured["distill"]["loss_before"]


def test_a_new_student_may_begin_at_zero() -> None:
    net = conv_net()
    net.fc.weight.zero_()
    config = small(student=Student(source="python:net.py:net"))
    apply_pass(config, image_model(net), options(images(), lambda: image_model(conv_net())))
    assert (net.fc.weight != 0).all()


def test_labels_of_one_output_are_scores() -> None:
    scores, labels = torch.tensor([[2.5], [1.0]]), torch.tensor([3, 1])
    assert label_loss(scores, labels).tolist() == [0.25, 0.0]


def test_sequences_are_refused_where_nothing_is_written() -> None:
    problems = Distill(sequences=Sequences()).check(FACTS, TARGET).problems
    assert problems == ("distill: sequences: a image-classification model writes no text; leave it out",)
    with pytest.raises(PassError, match="the teacher is no Hugging Face model that generates"):
        apply_pass(
            small(sequences=Sequences()), image_model(conv_net()), options(images(), lambda: image_model(conv_net()))
        )


def test_embeddings_come_back_by_default() -> None:
    student, teacher = text_model(noisy(bert(), 0.5)), text_model(bert())
    result = apply_pass(small(), student, options(token_set(), lambda: teacher))
    assert result.measured["distill"]["loss_after"] < 0.8 * result.measured["distill"]["loss_before"]
    assert len(result.notes) == 1


def test_a_student_of_fewer_layers_learns_from_evenly_spread_ones() -> None:
    torch.manual_seed(4)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "vocab_size": 64}
    shallow = BertModel(BertConfig(**sizes, num_hidden_layers=2), add_pooling_layer=False).eval()
    deep = BertModel(BertConfig(**sizes, num_hidden_layers=4), add_pooling_layer=False).eval()
    terms = {"output": OutputTerm(), "hidden": HiddenTerm(loss="cosine"), "attention": AttentionTerm()}
    result = apply_pass(small(**terms), text_model(shallow), options(token_set(), lambda: text_model(deep)))
    assert result.measured["distill"]["loss_after"] < result.measured["distill"]["loss_before"]


def test_attention_maps_are_those_of_the_innermost_modules() -> None:
    model = text_model(bert())
    assert model.module is not None
    feeds = {name: torch.from_numpy(values[:2]) for name, values in token_set().columns.items()}
    found = attention_modules(model.module, feeds)
    assert found == [f"encoder.layer.{i}.attention.self" for i in range(2)]
    with Watched("distill", model.module, ["encoder.layer.0"], found) as watched:
        seen = watched(feeds)
    assert seen.maps[found[1]].shape == (2, 4, 10, 10) and seen.hidden["encoder.layer.0"].shape == (2, 10, 32)
    assert not model.module.wrapped.encoder.layer[0]._forward_hooks  # type: ignore[union-attr, index]


def test_a_module_that_is_not_called_cannot_be_watched() -> None:
    net = conv_net()
    net.idle = nn.Linear(2, 2)
    with Watched("distill", net, ["idle"]) as watched, pytest.raises(PassError, match="runs without calling idle"):
        watched({"x": torch.zeros(1, 3, 8, 8)})


def test_hidden_states_of_convolutions_are_compared_channel_by_channel() -> None:
    own, other = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    batch = Batch(np.arange(2), {}, torch.ones(2))
    term = hidden_term("cosine", (("a", "b"),), nn.ModuleDict())
    found = term(batch, Seen({}, {"a": own}), Seen({}, {"b": other}))
    expected = 1 - torch.stack([nn.functional.cosine_similarity(own[i], other[i], dim=0).mean() for i in range(2)])
    assert torch.allclose(found, expected, atol=1e-6)


def test_a_training_set_is_encoded_on_demand() -> None:
    columns = {"x": np.arange(12, dtype=np.float32).reshape(6, 2), "label": np.arange(6)}
    preprocessor = make_preprocessor(TensorPreprocess(), (TensorSpec("x", "float32", ("batch", 2)),))
    found = make_encoded_set(samples_of(columns), preprocessor, "generic")
    assert found.n == 6 and found.labels is not None and found.labels.tolist() == list(range(6))
    assert found.feeds(np.array([4, 0]))["x"].tolist() == [[8, 9], [0, 1]]
    wrong = make_encoded_set(samples_of({"x": np.zeros((3, 5), np.float32)}), preprocessor, "generic")
    with pytest.raises(SourceError, match=r"data\.train: column 'x' has shape"):
        wrong.feeds(np.arange(2))


class Letters:
    """A preprocessor whose tokens are letters' numbers."""

    spec = TensorPreprocess()

    def encode(self, columns: Any, rows: Any = None) -> dict[str, np.ndarray]:
        texts = columns["text"] if rows is None else [columns["text"][i] for i in rows]
        return {"input_ids": np.array([[ord(letter) for letter in text] for text in texts])}


def test_texts_that_are_read_apart_are_rows_of_their_own() -> None:
    samples = samples_of({"text": ["a", "b", "c"], "text_pair": ["x", "y", "z"], "label": np.arange(3.0)})
    found = make_encoded_set(samples, Letters(), "feature-extraction")
    assert found.n == n_rows("feature-extraction", 3, samples.columns) == 6 and found.labels is None
    assert [chr(i) for i in found.feeds(np.array([4, 0, 5, 2]))["input_ids"][:, 0]] == ["y", "a", "z", "c"]


def test_a_rate_is_found_and_a_killed_run_takes_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.work.settle_schedule.LEAST_STEPS", 1)
    monkeypatch.setattr("compress.work.settle_schedule.follow_trend", lambda arm, trials, steps: arm)
    context = options(images(), lambda: image_model(conv_net()), tmp_path)
    config = small(steps=300, learning_rate="auto", optimizer="auto")
    result = apply_pass(config, image_model(noisy(conv_net(), 1.0)), context)
    tried = result.measured["distill: loss after trials"]
    assert len(tried) > 8  # of both optimizers
    assert f"{result.settled['optimizer']} at {result.settled['learning_rate']:g}, 4 steps" in tried
    fixed = apply_pass(
        small(steps=300, **result.settled), image_model(noisy(conv_net(), 1.0)), options(images(), context.teacher)
    )
    curve = "distill: training loss"
    assert fixed.measured[curve] == result.measured[curve]  # trials left nothing behind
    assert result.measured["distill"]["loss_after"] < 0.5 * result.measured["distill"]["loss_before"]

    loops: list[str] = []

    def note(items: Sequence[Any], text: str, /, most_s: float | None = None) -> Sequence[Any]:
        loops.append(text)
        return items

    again = apply_pass(config, image_model(noisy(conv_net(), 1.0)), replace(context, progress=note))
    assert again.settled == result.settled and loops == ["distill"], "nothing is tried again"


def test_the_average_is_over_a_twentieth_of_the_steps_that_there_is_time_for() -> None:
    context = options(images(), lambda: image_model(conv_net()))
    result = apply_pass(small(steps=80, ema_decay="auto"), image_model(noisy(conv_net())), context)
    assert result.settled == {"ema_decay": 0.75}
    timed = apply_pass(small(steps=10**6, ema_decay="auto", max_seconds=1.0), image_model(noisy(conv_net())), context)
    assert 0 <= timed.settled["ema_decay"] < 0.9999


def test_a_short_course_blends_no_images() -> None:
    def train(**config: Any) -> Any:
        context = options(images(), lambda: image_model(conv_net()))
        return apply_pass(small(steps=None, augment="auto", **config), image_model(noisy(conv_net())), context)

    short, long = train(epochs=2.0), train(epochs=BLENDED_EPOCHS + 1)
    assert short.settled["augment"]["mixup"] == 0 and any("no mixup" in note.text for note in short.notes)
    assert long.settled["augment"]["mixup"] == 1 and not any("no mixup" in note.text for note in long.notes)
    given = apply_pass(
        small(augment={"mixup": 0.5}),
        image_model(noisy(conv_net())),
        options(images(), lambda: image_model(conv_net())),
    )
    assert given.settled == {}  # what the recipe says stays


def test_a_course_too_short_for_trials_says_so() -> None:
    result = apply_pass(
        small(learning_rate="auto"), image_model(noisy(conv_net())), options(images(), lambda: image_model(conv_net()))
    )
    assert result.settled == {"optimizer": "adamw", "learning_rate": 5e-4}
    assert any("too few steps to find a learning rate" in note.text for note in result.notes)
    result = apply_pass(
        small(steps=60, learning_rate="auto"),
        image_model(noisy(conv_net())),
        options(images(), lambda: image_model(conv_net())),
    )
    assert any("adamw at 0.0005, found by 1 trial of 4 steps" in note.text for note in result.notes)
    with pytest.raises(ValueError, match="give learning_rate: auto as well"):
        Distill(optimizer="auto")
    with pytest.raises(ValueError, match="auto is for distill"):
        Qat(learning_rate="auto")


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_language_model_learns_beside_tables_that_stay(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of large tables: the student's are the teacher's, and logits are made of two tokens at a time."""
    tables = ("wrapped.model.embed_tokens.weight", "wrapped.lm_head.weight")
    data, net = token_set(), llama()
    net.model.layers.requires_grad_(False)
    for parameter in net.model.layers.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))

    def learn() -> tuple[TorchModel, Any]:
        student = text_model(copy.deepcopy(net))
        config = Distill(steps=10, batch_size=4, learning_rate=3e-3, held_out=0.25, precision=precision)
        return student, apply_pass(config, student, options(data, lambda: text_model(llama())))

    plain, _ = learn()
    monkeypatch.setattr("compress.work.training.LARGE_TABLE", 1)
    monkeypatch.setattr("compress.distill.vocabulary.PIECE_LOGITS", 2 * 64)
    large, result = learn()
    before = text_model(llama()).module.state_dict()
    assert all(torch.equal(large.module.state_dict()[name], before[name]) for name in tables)
    assert not torch.equal(plain.module.state_dict()[tables[0]], before[tables[0]])
    assert (
        result.notes[0].text
        == "distill: not trained: wrapped.model.embed_tokens, wrapped.lm_head, as the teacher has them"
    )
    held = result.measured["distill: loss held out"]
    assert min(held.values()) < 0.9 * held["0"]
