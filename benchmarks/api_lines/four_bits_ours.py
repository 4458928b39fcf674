from given import read_stories, read_writer, tell

(model, tokenizer), (texts, held_out) = read_writer(), read_stories()
# ---
import compress

data = {"calibration_dataset": texts, "eval_dataset": held_out, "num_calibration_samples": 128}
result = compress.quantize(model, "W4A16", target="vllm", processing_class=tokenizer, **data)
# ---
tell(result)
