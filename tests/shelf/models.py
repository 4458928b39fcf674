"""What people deploy, small: transformers' own classes with random weights, each in a folder as a hub has it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from small_audio import draw_tone, write_wave

SIZE = 64
"""Pixels of a side."""
N = 48
"""Samples, for calibration and for the judgement alike."""
LABELS = {i: f"class{i}" for i in range(5)}
TINY: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
VOCABULARY = 64
N_WORDS = VOCABULARY - 3
BINS = 16
"""Of a sound's mel spectrum."""
WRITING: dict[str, Any] = {"preprocess": {"kind": "seq2seq", "target": {"max_length": 80}}}
"""A recipe's part for answers long enough to be timed."""


@dataclass(frozen=True)
class Shelved:
    """One model of the shelf."""

    name: str
    task: str
    model: str
    """Name of transformers' class."""
    config: Callable[[], Any]
    passes: tuple[dict[str, Any], ...] = field(default=({"kind": "prune_channels", "ratio": 0.25},))
    """The structure passes that it goes through before int8; (): none fits."""
    metric: str = "cosine"
    """What the table shows: closeness to the float model, such as `token_agreement` of models that write."""
    least: float = 0.8

    def write(self, folder: Path) -> dict[str, Any]:
        """Write the model as a hub's folder has it, with samples beside; return the recipe, without passes."""
        torch.manual_seed(0)
        config = self.config()
        if self.task != "question-answering":  # whose two outputs transformers counts as labels
            config.id2label = LABELS
        model = getattr(transformers, self.model)(config).eval()
        spread_outputs(model)
        model.save_pretrained(folder / "model")
        more = WRITERS[self.task](folder)
        return {
            "version": 1,
            "name": self.name,
            "model": {"source": "dir:model", "task": self.task},
            "validate": {
                "gates": [{"metric": self.metric, "min": self.least, "undecided": "pass"}],
                "benchmark": {"iterations": 30, "warmup": 2, "throughput_batch_size": 4},
            },
            **more,
        }


@torch.no_grad()
def spread_outputs(model: torch.nn.Module) -> None:
    """Scale every weight matrix and kernel so that signals keep their size; batch norms have the statistics of noise.

    With transformers' initial weights of 0.02 the signals of a narrow model die out: outputs do not depend on inputs.
    """
    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    for module in model.modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d)):
            fan_in = module.weight[0].numel()
            module.weight.normal_(0, 1.5 / fan_in**0.5)
        elif isinstance(module, torch.nn.Embedding):
            module.weight.normal_(0, 1)
    if norms:
        for norm in norms:
            norm.momentum = None  # the mean of what it sees
        model.train()(torch.randn(16, 3, SIZE, SIZE))
        model.eval()


def write_images(folder: Path) -> dict[str, Any]:
    """Write an image processor and smooth random images with labels."""
    processor = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": SIZE, "width": SIZE},
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.25, 0.25, 0.25],
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "resample": 2,
    }
    (folder / "model/preprocessor_config.json").write_text(json.dumps(processor))
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (N, 8, 8, 3), dtype=np.uint8)
    images = coarse.repeat(SIZE // 8, axis=1).repeat(SIZE // 8, axis=2)
    np.savez(folder / "samples.npz", image=images, label=rng.integers(0, len(LABELS), N))
    return {"data": {part: {"source": "npz:samples.npz"} for part in ("calibration", "evaluation")}}


def write_texts(folder: Path) -> dict[str, Any]:
    """Write a tokenizer of words and texts with labels."""
    write_tokenizer(folder / "model")
    rng = np.random.default_rng(0)
    return write_rows(folder, [{"text": draw_text(rng), "label": int(rng.integers(len(LABELS)))} for _ in range(N)])


def write_answers(folder: Path) -> dict[str, Any]:
    """Write a tokenizer of words and texts with references."""
    write_tokenizer(folder / "model")
    rng = np.random.default_rng(0)
    return {**WRITING, **write_rows(folder, [{"text": draw_text(rng), "label": draw_text(rng)} for _ in range(N)])}


def write_speech(folder: Path) -> dict[str, Any]:
    """Write a tokenizer of words, Whisper's feature extractor for a second, and recordings with references."""
    write_tokenizer(folder / "model")
    transformers.WhisperFeatureExtractor(feature_size=BINS, chunk_length=1).save_pretrained(folder / "model")
    rng, rows = np.random.default_rng(0), []
    for i in range(N):
        write_wave(folder / f"{i}.wav", draw_tone(("low", "high")[i % 2], rng, seconds=float(rng.uniform(0.3, 0.9))))
        rows.append({"audio": f"{i}.wav", "label": draw_text(rng)})
    return {**WRITING, **write_rows(folder, rows)}


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of words, which knows an end of texts and adds none."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[PAD]", "[UNK]", "[END]", *(f"w{i}" for i in range(N_WORDS))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", eos_token="[END]"
    )
    fast.save_pretrained(folder)


def draw_text(rng: np.random.Generator) -> str:
    return " ".join(f"w{i}" for i in rng.integers(0, N_WORDS, rng.integers(4, 16)))


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Write samples, which calibrate and judge alike; return the recipe's data."""
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"data": {part: {"source": "jsonl:samples.jsonl"} for part in ("calibration", "evaluation")}}


def write_masks(folder: Path) -> dict[str, Any]:
    """Write what `write_images` does, and for each image a class of each pixel."""
    written = write_images(folder)
    with np.load(folder / "samples.npz") as arrays:
        images = arrays["image"]
    masks = images[..., 0] // 52
    np.savez(folder / "samples.npz", image=images, label=masks.astype(np.uint8))
    return written


def write_unlabelled_images(folder: Path) -> dict[str, Any]:
    """Write what `write_images` does, without labels."""
    written = write_images(folder)
    with np.load(folder / "samples.npz") as arrays:
        images = arrays["image"]
    np.savez(folder / "samples.npz", image=images)
    return written


def write_questions(folder: Path) -> dict[str, Any]:
    """Write a tokenizer, and texts with questions."""
    written = write_texts(folder)
    texts = [json.loads(line)["text"] for line in (folder / "samples.jsonl").read_text().splitlines()]
    rows = [{"question": text[:8], "context": text} for text in texts]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return written


def write_pairs(folder: Path) -> dict[str, Any]:
    """Write an image processor, a tokenizer, and images with texts."""
    from PIL import Image

    write_images(folder)
    with np.load(folder / "samples.npz") as arrays:
        images = arrays["image"]
    written = write_texts(folder)
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    for i, (row, image) in enumerate(zip(rows, images, strict=True)):
        Image.fromarray(image).save(folder / f"{i}.png")
        row["image"] = f"{i}.png"
        del row["label"]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return written


def write_sounds(folder: Path) -> dict[str, Any]:
    """Write the extractor that goes with the model, and noises of its length with labels."""
    kind = json.loads((folder / "model/config.json").read_text())["model_type"]
    if kind == "audio-spectrogram-transformer":
        transformers.ASTFeatureExtractor(num_mel_bins=32, max_length=24).save_pretrained(folder / "model")
    else:
        transformers.Wav2Vec2FeatureExtractor(return_attention_mask=False).save_pretrained(folder / "model")
    rng = np.random.default_rng(0)
    sounds = rng.normal(0, 0.1, (N, 4000)).cumsum(axis=1).astype(np.float32)
    sounds /= np.abs(sounds).max(axis=1, keepdims=True)
    rates, labels = np.full(N, 16000), rng.integers(0, len(LABELS), N)
    np.savez(folder / "samples.npz", audio=sounds, rate=rates, label=labels)
    return {"data": {part: {"source": "npz:samples.npz"} for part in ("calibration", "evaluation")}}


WRITERS = {
    "image-classification": write_images,
    "semantic-segmentation": write_masks,
    "object-detection": write_unlabelled_images,
    "text-classification": write_texts,
    "question-answering": write_questions,
    "zero-shot-image-classification": write_pairs,
    "audio-classification": write_sounds,
    "feature-extraction": write_texts,
    "text2text-generation": write_answers,
    "automatic-speech-recognition": write_speech,
}


def _text(cls: str, **more: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, cls)(
        vocab_size=VOCABULARY, max_position_embeddings=64, pad_token_id=0, **{**TINY, **more}
    )


def _image(cls: str, **more: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, cls)(**more)


def _t5() -> Any:
    return transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        pad_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=0,
    )


def _whisper() -> Any:
    special = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
    return transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=BINS,
        max_source_positions=50,
        max_target_positions=80,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **special,
    )


CLASSIFY, TEXTS = "image-classification", "text-classification"
SHELF = (
    Shelved(
        "resnet-50",
        CLASSIFY,
        "ResNetForImageClassification",
        _image("ResNetConfig", embedding_size=16, hidden_sizes=[32, 64, 96, 128], depths=[3, 4, 6, 3]),
    ),
    Shelved(
        "mobilenet-v1",
        CLASSIFY,
        "MobileNetV1ForImageClassification",
        _image("MobileNetV1Config", image_size=SIZE, depth_multiplier=0.25),
    ),
    Shelved(
        "mobilenet-v2",
        CLASSIFY,
        "MobileNetV2ForImageClassification",
        _image("MobileNetV2Config", image_size=SIZE, depth_multiplier=0.35),
    ),
    Shelved(
        "efficientnet-b0",
        CLASSIFY,
        "EfficientNetForImageClassification",
        _image("EfficientNetConfig", image_size=SIZE, width_coefficient=0.25, depth_coefficient=0.5, hidden_dim=320),
    ),
    Shelved(
        "convnext",
        CLASSIFY,
        "ConvNextForImageClassification",
        _image("ConvNextConfig", hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 2, 1], image_size=SIZE),
    ),
    Shelved(
        "vit",
        CLASSIFY,
        "ViTForImageClassification",
        _image("ViTConfig", image_size=SIZE, patch_size=16, **TINY),
    ),
    Shelved(
        "deit",
        CLASSIFY,
        "DeiTForImageClassification",
        _image("DeiTConfig", image_size=SIZE, patch_size=16, **TINY),
    ),
    Shelved(
        "swin",
        CLASSIFY,
        "SwinForImageClassification",
        _image(
            "SwinConfig", image_size=SIZE, patch_size=4, embed_dim=16, depths=[1, 2], num_heads=[2, 4], window_size=4
        ),
    ),
    Shelved("bert", TEXTS, "BertForSequenceClassification", _text("BertConfig")),
    Shelved(
        "distilbert",
        TEXTS,
        "DistilBertForSequenceClassification",
        lambda: transformers.DistilBertConfig(
            vocab_size=VOCABULARY, max_position_embeddings=64, dim=32, n_layers=2, n_heads=4, hidden_dim=64
        ),
    ),
    Shelved("roberta", TEXTS, "RobertaForSequenceClassification", _text("RobertaConfig")),
    Shelved(
        "deberta-v2",
        TEXTS,
        "DebertaV2ForSequenceClassification",
        _text("DebertaV2Config", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=16),
    ),
    Shelved(
        "deberta",
        TEXTS,
        "DebertaForSequenceClassification",
        _text("DebertaConfig", relative_attention=True, pos_att_type=["p2c", "c2p"], max_relative_positions=16),
    ),
    Shelved(
        "bert-answers",
        "question-answering",
        "BertForQuestionAnswering",
        _text("BertConfig"),
        metric="answer_agreement",
        least=0.05,  # of random weights, whose answers are chosen by a hair
    ),
    Shelved(
        "yolos",
        "object-detection",
        "YolosForObjectDetection",
        _image("YolosConfig", image_size=[SIZE, SIZE], patch_size=16, num_detection_tokens=5, **TINY),
        metric="box_agreement",
        least=0.3,
    ),
    Shelved(
        "detr",
        "object-detection",
        "DetrForObjectDetection",
        lambda: transformers.DetrConfig(
            use_timm_backbone=False,
            use_pretrained_backbone=False,
            backbone=None,
            backbone_config=transformers.ResNetConfig(
                embedding_size=16, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1], out_features=["stage4"]
            ),
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            num_queries=5,
        ),
        metric="box_agreement",
        least=0.3,
    ),
    Shelved(
        "segformer",
        "semantic-segmentation",
        "SegformerForSemanticSegmentation",
        _image(
            "SegformerConfig",
            num_encoder_blocks=2,
            hidden_sizes=[32, 64],
            depths=[1, 1],
            num_attention_heads=[1, 2],
            sr_ratios=[4, 2],
            patch_sizes=[7, 3],
            strides=[4, 2],
            mlp_ratios=[2, 2],
            decoder_hidden_size=64,
        ),
        metric="pixel_agreement",
        least=0.5,
    ),
    Shelved(
        "ast",
        "audio-classification",
        "ASTForAudioClassification",
        _image("ASTConfig", patch_size=8, frequency_stride=8, time_stride=8, max_length=24, num_mel_bins=32, **TINY),
    ),
    Shelved(
        "wav2vec2",
        "audio-classification",
        "Wav2Vec2ForSequenceClassification",
        _image(
            "Wav2Vec2Config",
            conv_dim=(16, 16),
            conv_kernel=(10, 8),
            conv_stride=(8, 8),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            classifier_proj_size=16,
            **TINY,
        ),
    ),
    Shelved(
        "clip",
        "zero-shot-image-classification",
        "CLIPModel",
        lambda: transformers.CLIPConfig(
            text_config={**TINY, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "eos_token_id": 3},
            vision_config={**TINY, "image_size": SIZE, "patch_size": 16},
            projection_dim=16,
        ),
    ),
    Shelved(
        "t5",
        "text2text-generation",
        "T5ForConditionalGeneration",
        _t5,
        metric="token_agreement",
    ),
    Shelved(
        "whisper",
        "automatic-speech-recognition",
        "WhisperForConditionalGeneration",
        _whisper,
        metric="token_agreement",
    ),
)
