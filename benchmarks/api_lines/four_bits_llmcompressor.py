from given import read_stories, read_writer, tell

(model, tokenizer), (texts, held_out) = read_writer(), read_stories()
# ---
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier

oneshot(
    model=model,
    processor=tokenizer,
    dataset=Dataset.from_dict({"text": texts[:128]}),
    recipe=GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"]),
    max_seq_length=256,
    num_calibration_samples=128,
)
model.save_pretrained("W4A16", save_compressed=True)
tokenizer.save_pretrained("W4A16")
# ---
tell("a folder: not how good it is")
